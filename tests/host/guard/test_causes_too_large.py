"""A weight that is Inf in fp16 alone is told alike by the guards of models, VAEs and text encoders."""

import math

import pytest
import torch
from halfsafe.nodes.host.guard.encoders import guard_clip, guard_vae
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, tiny_encoders, tiny_models, tiny_vaes
from support.families import load
from support.guarding import guarded, is_finite, report_of
from support.model_files import changed
from support.rows import rotated

VALUE = 1e5
"""A number that bf16 holds, and fp16 does not."""
VAES = ("sd", "svd", "oobleck", "stable_audio3", "wan21", "ace")


def spoil(tensors, name):
    tensors[name] = tensors[name].to(torch.bfloat16)
    tensors[name].view(-1)[0] = VALUE


def test_a_model_keeps_such_a_weight_in_bf16_and_a_repeat_cures_it(comfy, wan, models_dir):
    name = "blocks.1.self_attn.k.weight"
    path = changed(wan, models_dir / "diffusion_models" / "too_large.safetensors", lambda tensors: spoil(tensors, name))
    plain = load(comfy, path, "fp16", "fp16")
    with pytest.raises(NonFinite, match="retry_higher") as error:
        families.sample(guarded(comfy, plain, "stop"), "wan")
    model = guarded(comfy, plain)
    assert (
        error.value.verdict == "stopped"
        and is_finite(families.sample(model, "wan"))
        and report_of(model).verdict == "recovered"
    )


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop"])
def test_a_vae_names_the_file_the_value_and_dtype(comfy, models_dir, on_nan):
    folder, name = models_dir / "vae", "decoder.mid.block_1.conv2.weight"
    path = changed(
        tiny_models.sd_vae(folder / "held.safetensors"),
        folder / "too_large_vae.safetensors",
        lambda tensors: spoil(tensors, name),
    )
    vae = comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype="fp16")[0]
    with pytest.raises(NonFinite) as error:
        guard_vae(vae, on_nan).decode(torch.randn(1, 4, 8, 8))
    said = (name, path.name, "reaches 9.984e+04 in", "more than fp16 holds", "load it with dtype bf16 or fp32")
    assert (
        error.value.verdict == "bad_weights"
        and all(each in str(error.value) for each in said)
        and "No higher precision" not in str(error.value)
    )


def layer_in(module: torch.nn.Module, run) -> str:
    """The parameter in the middle of those that a call multiplies by."""
    ran, hooks = [], []
    for name, each in module.named_modules():
        weight = getattr(each, "weight", None)
        if "parametrizations" not in name and weight is not None and weight.dim() > 1:
            hooks.append(each.register_forward_hook(lambda *args, name=name: ran.append(name)))
    run()
    for hook in hooks:
        hook.remove()
    layers = list(dict.fromkeys(ran))
    return layers[len(layers) // 2]


def with_inf(module: torch.nn.Module, layer: str) -> None:
    found = module.get_submodule(layer)
    weight = found.parametrizations.weight.original1 if hasattr(found, "parametrizations") else found.weight
    weight.data.view(-1)[0] = math.inf


@pytest.mark.parametrize(("name", "on_nan"), rotated(VAES, ["retry_higher", "stop"]))
def test_a_vae_of_no_known_file_is_told_that_fp16_may_be_narrow(comfy, name, on_nan):
    vae = tiny_vaes.build(name, torch.float16)
    options = [tiny_vaes.VAES[name].options] if tiny_vaes.VAES[name].options else []
    with_inf(
        vae.first_stage_model, layer_in(vae.first_stage_model, lambda: vae.decode(tiny_vaes.latent(name), *options))
    )
    with pytest.raises(NonFinite) as error:
        guard_vae(vae, on_nan).decode(tiny_vaes.latent(name), *options)
    text = str(error.value)
    assert (
        error.value.verdict == "bad_weights" and "is Inf in fp16, perhaps because its own value is too large" in text
    ), text
    assert "load it with dtype bf16 or fp32" in text and "No higher precision" not in text


@pytest.mark.parametrize("name", ["clip_l", "t5", "qwen3"])
def test_a_text_encoder_whose_file_is_not_known_is_told_so_too(comfy, name):
    clip = tiny_encoders.build(name)
    network = clip.cond_stage_model.tiny.transformer.half()
    with_inf(network, layer_in(network, lambda: clip.encode_from_tokens(tiny_encoders.tokens())))
    with pytest.raises(NonFinite) as error:
        guard_clip(clip, "retry_higher").encode_from_tokens(tiny_encoders.tokens())
    text = str(error.value)
    assert (
        error.value.verdict == "bad_weights"
        and "perhaps because its own value is too large" in text
        and "load it with storage bf16 or fp32" in text
    ), text
