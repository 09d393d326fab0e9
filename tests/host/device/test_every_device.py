"""The pack in ComfyUI on a Mac, an Intel GPU, DirectML and an NVIDIA card, emulated with values: each by ComfyUI's own branch for it."""

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.guard.encoders import ATTRIBUTE
from halfsafe.nodes.host.study import analysis
from halfsafe.precision.errors import HalfsafeError
from safetensors.torch import load_file, save_file
from support import families, model_files, tiny_models
from support.families import load
from support.guarding import guarded, plain_fp16, report_of
from support.measures import relative_error

KINDS = ("mps", "cuda", "xpu", "privateuseone")
LORA = {"blocks.0.ffn.0": (1024, 256), "blocks.1.self_attn.q": (256, 256)}


def modes(comfy, model) -> set[str]:
    return {layer["mode"] for layer in families.report(comfy, model)["layers"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_overflows_is_right_in_fp16_safe(comfy, overflowing, cured, on, kind):
    device = on(kind)
    model = load(comfy, overflowing, "fp16", "fp16_safe")
    assert relative_error(cured, families.sample(model, "wan", steps=2)) < 2e-3
    assert ("aten::mm.dtype" in device.operations) is (kind == "cuda"), "a wide result is CUDA's alone"
    assert device.used(device.device()) > 7e6, "the weights are in the device's memory"


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_the_guard_cures_and_the_check_finds_the_cure_right(comfy, overflowing, cured, on, kind):
    on(kind)
    model = guarded(comfy, plain_fp16(comfy, overflowing), check="first step")
    assert relative_error(cured, families.sample(model, "wan", steps=2)) < 2e-3
    report = report_of(model)
    assert report.verdict == "recovered" and report.escalations["blocks.0.ffn.2"] == "fp16_wide"


WAYS = [
    ("mps", "int8", "fp16_safe", 6e-3), ("cuda", "int8", "int8", 1e-2), ("cuda", "fp8_e4m3fn", "fp8", 3e-2),
    ("xpu", "fp8_e4m3fn", "auto", 3e-2), ("privateuseone", "int8", "fp16_safe", 6e-3),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "storage", "compute", "bound"), WAYS)
def test_eight_bit_weights_are_right(comfy, wan, clean, on, kind, storage, compute, bound):
    device = on(kind)
    model = load(comfy, wan, storage, compute)
    assert relative_error(clean, families.sample(model, "wan", steps=2)) < bound
    if kind == "cuda":
        assert compute in modes(comfy, model)
        assert {"int8": "aten::_int_mm", "fp8": "aten::_scaled_mm_v2"}[compute] in device.operations


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_a_lora_beside_eight_bit_weights(comfy, wan, on, kind):
    lora = model_files.lora(LORA, rank=4)

    def sampled(storage, compute):
        return families.sample(load_lora_for_models(load(comfy, wan, storage, compute), None, dict(lora), 0.5, 0.0)[0], "wan", steps=2)

    exact = sampled("fp32", "fp32")
    on(kind)
    assert relative_error(exact, sampled("int8", "fp16_safe")) < 6e-3


@pytest.fixture(scope="module")
def vae_file(models_dir):
    path = tiny_models.sd_vae(models_dir / "vae" / "second_device.safetensors", dtype=torch.float32)
    tensors = load_file(str(path))
    tensors["decoder.mid.block_1.conv2.weight"] *= 2e5
    save_file(tensors, str(path))
    return path


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_a_decode_that_overflows_is_made_again(comfy, vae_file, on, kind):
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    exact = comfy.run("HalfsafeLoadVAE", vae_name=vae_file.name, dtype="fp32")[0].decode(latent)
    on(kind)
    vae = comfy.run("HalfsafeGuardVAE", vae=comfy.run("HalfsafeLoadVAE", vae_name=vae_file.name, dtype="fp16")[0], on_nan="retry_higher")[0]
    assert relative_error(exact, vae.decode(latent)) < 0.02
    (event,) = getattr(vae, ATTRIBUTE).log.events
    assert (event.from_mode, event.recovered) == ("fp16", True)


def encoded(comfy, path, storage):
    clip = comfy.run("HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage=storage, compute="auto")[0]
    clip = comfy.run("HalfsafeGuardCLIP", clip=clip, on_nan="retry_higher")[0]
    return clip.encode_from_tokens_scheduled(clip.tokenize("a black image"))[0][0]


def test_a_guarded_text_encoder(comfy, clip_file, on):
    exact = encoded(comfy, clip_file, "as_file")
    device = on("cuda")
    assert relative_error(exact, encoded(comfy, clip_file, "as_file")) < 2e-2
    assert device.operations["aten::mm"]


def test_analyze_layers_says_what_the_device_cannot_hold_and_measures_the_rest(comfy, models_dir, on, monkeypatch):
    monkeypatch.setattr(analysis, "STEPS", 1)
    path = tiny_models.wan(models_dir / "diffusion_models" / "second_device_small.safetensors", dim=128, blocks=1, ffn=256)
    on("mps")
    model = load(comfy, path, "as_file", "fp16")
    inputs = {
        "latent_image": {"samples": torch.zeros_like(families.noise(model, size=4))}, "positive": families.conditioning("wan"), "seed": 1,
        "target_snr_db": 20.0, "sensitive_layers": "keep high",
    }  # fmt: skip
    with pytest.raises(HalfsafeError, match="fp8_e4m3fn cannot be measured: not on Apple"):
        comfy.run("HalfsafeAnalyzeLayers", model=model, candidate="fp8_e4m3fn", **inputs)
    assert "int8" in comfy.run("HalfsafeAnalyzeLayers", model=model, candidate="int8", **inputs)[1]
