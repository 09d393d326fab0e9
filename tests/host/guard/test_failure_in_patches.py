"""Code that a node patched into a model's blocks and that overflows in fp16 is named, and runs in fp32 alone if that is enough."""

import math

import comfy.ops
import pytest
import torch
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.model_patcher import CoreModelPatcher
from comfy_extras.nodes_model_patch import QwenImageBlockWiseControlNet, QwenImageDiffsynthControlnet
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, plants, tiny_models
from support.families import load
from support.guarding import core, guarded, is_finite, plain_fp16, report_of
from support.measures import relative_error
from support.page_words import untranslated

PICTURE = torch.full((1, 64, 64, 3), 0.5)


class VAE:
    """The latent of a picture, whatever the picture."""

    def __init__(self, *shape: int):
        self.shape = shape

    def encode(self, picture):
        return torch.randn(1, *self.shape, generator=torch.Generator().manual_seed(4))

    def spacial_compression_encode(self):
        return 8


def model_patch(module: torch.nn.Module, factors: dict[str, float]) -> CoreModelPatcher:
    """A MODEL_PATCH as of ModelPatchLoader: random weights in fp16, some of them multiplied."""
    generator = torch.Generator().manual_seed(5)
    for name, weight in module.named_parameters():
        values = torch.randn(weight.shape, generator=generator) * math.prod(weight.shape[1:]) ** -0.5
        scale = math.prod(factor for part, factor in factors.items() if part in name)
        weight.data.copy_(values * scale if weight.dim() > 1 else 1.0)
    return CoreModelPatcher(module.half(), torch.device("cpu"), torch.device("cpu"))


def diffsynth(model, **factors: float):
    build = {"device": "cpu", "dtype": torch.float16, "operations": comfy.ops.manual_cast}
    patch = model_patch(QwenImageBlockWiseControlNet(num_layers=1, dim=256, **build), factors)
    return QwenImageDiffsynthControlnet().diffsynth_controlnet(model, patch, VAE(16, 1, 8, 8), PICTURE)[0]


def z_image_control(model, **factors: float):
    build = {"device": "cpu", "dtype": torch.float16, "operations": comfy.ops.manual_cast}
    patch = model_patch(ZImage_Control(dim=256, n_heads=2, n_kv_heads=2, **build), factors)
    return QwenImageDiffsynthControlnet().diffsynth_controlnet(model, patch, VAE(16, 8, 8), PICTURE)[0]


# family, what patches it, the weights of the patch that are multiplied, what is said of it, what runs wider from then on
CASES = {
    "a product inside": ("qwen_image", diffsynth, {"input_proj": 1e5, "output_proj": 1e-5}, "DiffSynthCnetPatch", "overflow", "patch DiffSynthCnetPatch"),
    "its result": ("qwen_image", diffsynth, {"output_proj": 3e4}, "DiffSynthCnetPatch", "overflow", "residual stream"),
    "what it clamps": ("z_image", z_image_control, {"feed_forward.w1": 300, "feed_forward.w3": 300}, "ZImageControlPatch", "saturation", "patch ZImageControlPatch"),
    "what it writes into the model's": ("z_image", z_image_control, {"after_proj": 1e5}, "ZImageControlPatch", "overflow", "residual stream"),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(models_dir):
    return families.files_in(models_dir / "diffusion_models", "patched")


@pytest.mark.parametrize("name", CASES)
def test_a_model_patch_that_overflows_is_named_and_widened_alone_if_that_is_enough(comfy, files, name):
    family, apply, factors, patch, kind, wider = CASES[name]
    exact = load(comfy, files(family), "fp32", "fp32")
    reference, without = (families.sample(model, family) for model in (apply(exact, **factors), exact))
    assert relative_error(reference, without) > 0.1, "the patch is seen in the picture"
    plain = apply(plain_fp16(comfy, files(family)), **factors)
    assert not relative_error(reference, families.sample(plain, family)) < 0.1, "it overflows"
    model = guarded(comfy, plain)
    for repeats in (3 if wider == "residual stream" else 2, 0):
        assert relative_error(reference, families.sample(model, family)) < 0.01
        assert report_of(model).extra_calls == repeats and set(report_of(model).escalations) == {wider}
        events = [(event.layer, event.kind, event.to_mode) for event in report_of(model).events]
        assert events == ([(f"patch {patch}", kind, "fp32")] if repeats else [])


def test_a_nodes_own_arithmetic_is_named_and_widened_alone(comfy, models_dir):
    """Normalized attention guidance sums the magnitudes of all channels, which fp16 does not hold."""

    def loud(model):
        model.model.diffusion_model.middle_block[1].transformer_blocks[0].attn1.to_v.weight *= 250
        return core("comfy_extras.nodes_nag").NAGuidance.execute(model, 5.0, 0.5, 1.5).args[0]

    path = tiny_models.sd15_unet(models_dir / "diffusion_models" / "patched_sd15.safetensors")
    reference = plants.sample(loud(load(comfy, path, "fp32", "fp32")), "sd15")
    plain = loud(plain_fp16(comfy, path))
    assert not relative_error(reference, plants.sample(plain, "sd15")) < 0.1, "it overflows"
    model = guarded(comfy, plain)
    assert relative_error(reference, plants.sample(model, "sd15")) < 0.01
    assert (
        set(report_of(model).escalations) == {"patch NAGuidance"}
        and report_of(model).events[0].layer == "patch NAGuidance"
    )


def adapter(out: torch.Tensor, options: dict) -> torch.Tensor:
    """As of a pack's IP-Adapter: a layer whose result is added to that of the model's attention."""
    weight = torch.randn(320, 320, generator=torch.Generator().manual_seed(3)) * 1e4
    return out + torch.nn.functional.linear(out, weight.to(out.dtype)).mul(2.0**-14)


adapter.__code__ = adapter.__code__.replace(co_filename="/custom_nodes/SomePack/adapter.py")


def adapted(model):
    clone = model.clone()
    clone.set_model_attn2_output_patch(adapter)
    return clone


def test_a_packs_adapter_is_named_with_its_pack_and_widened_alone(comfy, models_dir):
    path = tiny_models.sd15_unet(models_dir / "diffusion_models" / "patched_sd15.safetensors")
    reference = plants.sample(adapted(load(comfy, path, "fp32", "fp32")), "sd15")
    model = guarded(comfy, adapted(plain_fp16(comfy, path)))
    assert relative_error(reference, plants.sample(model, "sd15")) < 0.01
    report = report_of(model)
    assert report.events[0].layer == "patch adapter of SomePack" and set(report.escalations) == {
        "patch adapter of SomePack"
    }
    assert "SomePack may keep state" in report.events[0].evidence, "the sampling starts again beside it"
    assert untranslated([report.events[0].brief]) == []


def test_a_patch_in_place_of_a_block_is_named_and_widened_alone(comfy, files):
    ran = []

    class Replacing:
        def __call__(self, arguments: dict, extra: dict) -> dict:
            result = extra["original_block"](arguments)
            ran.append(result["img"].dtype)
            loud = result["img"].half() * 2.0 if result["img"].dtype == torch.float16 else result["img"] * 2.0
            return {**result, "img": loud * 1e5 * 1e-5}

    def replaced(model):
        clone = model.clone()
        clone.set_model_patch_replace(Replacing(), "dit", "double_block", 0)
        return clone

    path = files("qwen_image")
    reference = families.sample(replaced(load(comfy, path, "fp32", "fp32")), "qwen_image", steps=1)
    model = guarded(comfy, replaced(plain_fp16(comfy, path)))
    ran.clear()
    assert relative_error(reference, families.sample(model, "qwen_image", steps=1)) < 0.01
    assert report_of(model).events[0].layer == "patch Replacing" and set(report_of(model).escalations) == {
        "residual stream"
    }
    assert ran == [torch.float16, torch.float16, torch.float16, torch.float32]


@pytest.mark.parametrize("on_nan", ["stop", "report"])
def test_a_patch_that_may_not_be_widened_is_named(comfy, files, on_nan):
    plain = diffsynth(plain_fp16(comfy, files("qwen_image")), input_proj=1e5, output_proj=1e-5)
    model = guarded(comfy, plain, on_nan)
    if on_nan == "stop":
        with pytest.raises(NonFinite, match=r"in patch DiffSynthCnetPatch \(matmul\)"):
            families.sample(model, "qwen_image")
    else:
        assert not is_finite(families.sample(model, "qwen_image"))
    assert report_of(model).events[0].layer == "patch DiffSynthCnetPatch" and not report_of(model).escalations
