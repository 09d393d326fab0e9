"""Verdicts that must not be given: each test makes one look true, and something else is at fault."""

import math

import pytest
import torch
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, tiny_models
from support.families import load
from support.guarding import core, guarded, is_finite, plain_fp16, report_of
from support.measures import relative_error

MOST_REPEATS = 5


class StyleModel:
    """Four tokens, as of a Redux model."""

    def get_cond(self, clip_vision_output):
        return torch.randn(1, 4, 4096, generator=torch.Generator().manual_seed(4))


def styled(comfy, strength: float):
    """A text with a style whose tokens ComfyUI masks: at strength 0 by -inf, on purpose.

    The mask has the picture's size already: resizing one of -inf makes NaN of it (``upscale_dit_mask`` in ``comfy/utils.py``).
    """
    cond = families.conditioning("flux")
    cond[0][1] |= {"attention_mask": torch.zeros(1, 32, 32), "attention_mask_img_shape": (4, 4)}
    return comfy.core["StyleModelApply"]().apply_stylemodel(cond, StyleModel(), None, strength, "attn_bias")[0]


@pytest.fixture(scope="module")
def flux(models_dir):
    """A Flux that is finite in fp16."""
    return families.write("flux", models_dir / "diffusion_models")


@pytest.fixture(scope="module")
def loud_flux(flux, models_dir):
    """The same with a last layer that overflows in fp16, where no clamp of the model's own hides it."""
    path = models_dir / "diffusion_models" / "evidence_flux.safetensors"
    return families.write_scaled(flux, path, {r"final_layer\.linear\.weight": 1e7})


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop", "report"])
def test_a_mask_of_minus_inf_is_not_blamed_for_an_overflow(comfy, loud_flux, on_nan):
    cond = styled(comfy, 0.0)
    assert torch.isinf(cond[0][1]["attention_mask"]).any()
    reference = families.sample(load(comfy, loud_flux, "fp32", "fp32"), "flux", cond=cond, steps=1)
    model = guarded(comfy, plain_fp16(comfy, loud_flux), on_nan)
    if on_nan == "stop":
        with pytest.raises(NonFinite, match="final_layer.linear"):
            families.sample(model, "flux", cond=cond, steps=1)
    else:
        result = families.sample(model, "flux", cond=cond, steps=1)
    report = report_of(model)
    assert report.verdict == ("recovered" if on_nan == "retry_higher" else "stopped")
    assert report.events[0].layer == "final_layer.linear"
    if on_nan == "retry_higher":
        assert relative_error(reference, result) < 0.02 and report.extra_calls == 2


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop"])
def test_a_mask_that_leaves_nothing_to_attend_to_is_blamed_with_evidence(comfy, flux, on_nan):
    cond = styled(comfy, 0.0)
    cond[0][1]["attention_mask"][:] = -math.inf
    model = guarded(comfy, load(comfy, flux, "as_file", "bf16"), on_nan)
    with pytest.raises(NonFinite, match="attention_mask") as error:
        families.sample(model, "flux", cond=cond, steps=1)
    report = report_of(model)
    assert error.value.verdict == "bad_input" and report.extra_calls <= MOST_REPEATS
    assert "but finite if" in report.events[0].evidence


def test_a_mask_that_the_models_own_clamp_hides_is_blamed_and_not_precision(comfy, flux):
    """In fp16 a Flux makes zeros of NaN, so the picture is finite and wrong."""
    cond = styled(comfy, 0.0)
    cond[0][1]["attention_mask"][:] = math.nan
    plain = plain_fp16(comfy, flux)
    assert is_finite(families.sample(plain, "flux", cond=cond, steps=1))
    with pytest.raises(NonFinite, match="attention_mask") as error:
        families.sample(guarded(comfy, plain), "flux", cond=cond, steps=1)
    assert error.value.verdict == "bad_input"


def test_attention_in_16_bit_of_a_model_in_fp32_is_a_matter_of_precision(comfy, wan):
    def kernel(function, q, k, v, heads, *args, **kwargs):
        return function(q, k, v, heads, *args, **kwargs) * math.nan

    plain = load(comfy, wan, "fp32", "fp32")
    expected = families.sample(plain, "wan")
    model = guarded(comfy, plain)
    model.model_options["transformer_options"]["optimized_attention_override"] = kernel
    assert relative_error(expected, families.sample(model, "wan")) < 1e-4
    assert report_of(model).verdict == "recovered"


def test_a_buffer_of_minus_inf_is_no_bad_weight(comfy, overflowing, fp32):
    """A causal mask that a model keeps among its buffers."""
    reference = families.sample(fp32, "wan")
    plain = plain_fp16(comfy, overflowing)
    part = plain.model.diffusion_model.blocks[0].ffn
    part.register_buffer("mask", torch.full((4,), -math.inf))
    model = guarded(comfy, plain)
    assert relative_error(reference, families.sample(model, "wan")) < 0.02
    assert report_of(model).verdict == "recovered"


def test_a_nan_that_nothing_reads_is_no_bad_weight(comfy, wan):
    plain = plain_fp16(comfy, wan)
    blocks = plain.model.diffusion_model.blocks
    blocks[0].register_buffer("unused", torch.full((4,), math.nan))
    module = blocks[1].norm3
    forward = type(module).forward
    module.forward = lambda x: forward(module, x) * ((x - x) / (x - x))
    try:
        model = guarded(comfy, plain)
        with pytest.raises(NonFinite) as error:
            families.sample(model, "wan")
    finally:
        del module.forward
    assert error.value.verdict == "not_precision" and "blocks.1.norm3" in str(error.value)
    assert report_of(model).extra_calls <= MOST_REPEATS


def test_a_lora_with_nan_that_is_off_is_no_bad_weight(comfy, overflowing, fp32):
    reference = families.sample(fp32, "wan")
    model = plain_fp16(comfy, overflowing).clone()
    model.add_patches({"diffusion_model.blocks.1.ffn.2.weight": ("diff", (torch.full((256, 1024), math.nan),))}, 0.0)
    model = guarded(comfy, model)
    assert relative_error(reference, families.sample(model, "wan")) < 0.02
    assert report_of(model).verdict == "recovered"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("on_nan", ["retry_higher", "report"])
def test_one_bad_image_of_the_incoming_latent_is_lost_alone(comfy, wan, on_nan, value):
    plain = plain_fp16(comfy, wan)
    noise, cond = families.noise(plain, 3), families.conditioning("wan", batch=3)
    latent = torch.zeros_like(noise)

    def run(model):
        sample = core("comfy.sample").sample
        return sample(model, noise, 3, 1.0, "euler", "simple", cond, cond, latent, seed=1)

    expected = run(plain)
    latent[1] = value
    model = guarded(comfy, plain, on_nan)
    result = run(model)
    assert [is_finite(row) for row in result] == [True, False, True]
    assert torch.equal(result[0], expected[0]) and torch.equal(result[2], expected[2])
    report = report_of(model)
    assert report.verdict == "bad_input" and [event.batch_rows for event in report.events] == [[1]]
    assert "latent" in report.events[0].layer


def test_a_mask_with_nan_is_named_and_not_the_sampler(comfy, wan):
    model = guarded(comfy, plain_fp16(comfy, wan))
    noise, cond = families.noise(model), families.conditioning("wan")
    mask = torch.full((1, 1, 8, 8), math.nan)
    with pytest.raises(NonFinite, match="noise mask") as error:
        core("comfy.sample").sample(
            model, noise, 2, 1.0, "euler", "simple", cond, cond, torch.zeros_like(noise), noise_mask=mask, seed=1
        )
    assert error.value.verdict == "bad_input"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_advised_of_a_control_net_can_be_done(comfy, models_dir, value):
    """Check Finite takes no CONTROL_NET: it cannot stand behind the node that made it."""
    path = tiny_models.narrow_sd15(models_dir / "diffusion_models" / "evidence_sd15.safetensors")
    control = core("comfy.controlnet").ControlBase()
    control.get_control = lambda *args: {"middle": [torch.full((1, 64, 8, 8), value)]}
    text, model = [[torch.randn(1, 16, 768), {"control": control}]], guarded(comfy, plain_fp16(comfy, path))
    start = families.noise(model)
    with pytest.raises(NonFinite, match=r"ControlNet output.*bad_input\. Load the ControlNet with compute fp32"):
        core("comfy.sample").sample(
            model, start, 1, 1.0, "euler", "simple", text, text, torch.zeros_like(start), seed=1
        )


class OfAnotherPack(torch.nn.Module):
    """A layer whose product is in fp16 whatever it is given, as of a pack with kernels of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        weight, bias = self.layer.weight.half(), self.layer.bias.half()
        return torch.nn.functional.linear(x.half(), weight, bias).to(x.dtype)


OfAnotherPack.forward.__code__ = OfAnotherPack.forward.__code__.replace(co_filename="/custom_nodes/SomePack/layers.py")


def test_an_overflow_in_another_packs_own_dtype_is_no_verdict_on_precision(comfy, overflowing):
    model = families.load(comfy, overflowing, "fp16", "fp16")
    ffn = model.model.diffusion_model.blocks[1].ffn
    loud, ffn[0] = ffn[0], OfAnotherPack(ffn[0])  # ffn.2 is called with a folded activation by a later ComfyUI
    with torch.no_grad():
        loud.weight.mul_(30000 / loud.weight.abs().amax().float().item())
    with pytest.raises(NonFinite) as error:
        families.sample(guarded(comfy, model), "wan", steps=1)
    assert error.value.verdict == "stopped" and "No higher precision" not in str(error.value)
    assert "blocks.1.ffn.0 is created by SomePack and computes in its own dtype, which Halfsafe does not change" in str(
        error.value
    )
