"""``auto`` on every NVIDIA profile: models that overflow in fp16 are finite and right, counted by a spy on the products."""

import pytest
import torch
from halfsafe.precision.devices.detect import PROFILE_NAMES
from safetensors.torch import save_file
from support import families, model_files, tiny_models
from support.families import load, with_compute
from support.guarding import guarded
from support.matmul_spy import MatmulSpy
from support.measures import relative_error

NVIDIA = [name for name in PROFILE_NAMES if name.startswith("sm_")]
HALF = [name for name in NVIDIA if name != "sm_61"]
KINDS = {"wan": "ffn", "sdxl": "convolution"}
LORA = {"blocks.0.ffn.0": (1024, 256), "blocks.0.ffn.2": (256, 1024)}


@pytest.fixture(scope="module")
def model_of(comfy, models_dir):
    """``(path, call, reference)`` of a family's model that overflows in fp16; of the last family only."""
    state = {}

    def build(family):
        if family not in state:
            state.clear()
            folder = models_dir / "diffusion_models"
            clean = tiny_models.wan(folder / "auto_wan.safetensors", blocks=1) if family == "wan" else families.write_narrow(family, folder)
            path = families.write_scaled(clean, folder / "auto_scaled.safetensors", families.OVERFLOWS[family][KINDS[family]])
            exact = load(comfy, path, "fp32")
            call = families.capture(exact, family)
            state[family] = path, call, families.replay(exact, call)
        return state[family]

    return build


def counted(model, call):
    """(result of a call after the one that calibrates, that call's products)"""
    families.replay(model, call)
    with MatmulSpy(model.model.diffusion_model) as spy:
        result = families.replay(model, call)
    return result, spy.seen


@pytest.mark.parametrize("family", KINDS)
def test_an_overflowing_model_is_finite_and_close_to_fp32(comfy, monkeypatch, model_of, family):
    path, call, reference = model_of(family)
    stored = load(comfy, path, "as_file", "fp16")
    assert torch.isnan(families.replay(stored, call)).any(), "an fp16 that was asked for is plain fp16, and overflows"
    errors, asked = {}, {}
    for profile in NVIDIA if family == "wan" else ("sm_75", "sm_90"):
        monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
        model = with_compute(comfy, stored, "auto")
        result, products = counted(model, call)
        errors[profile] = relative_error(reference, result)
        asked[profile] = {layer["mode"] for layer in families.report(comfy, model)["layers"]} & {"fp32", "fp16_wide", "fp16"}
        rounded = [product.rounded or "fp16" in product.operands for product in products]
        assert len(rounded) > 10 and (sum(rounded) / len(rounded) > 0.8) is (profile in HALF)
    assert max(errors.values()) < 2e-3
    assert all("fp16_wide" in modes for profile, modes in asked.items() if profile in HALF)


@pytest.mark.parametrize("profile", ["sm_75", "sm_100"])
def test_the_loader_decides_as_the_node_does(comfy, monkeypatch, model_of, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    path, call, reference = model_of("wan")
    loaded = load(comfy, path, "auto", "auto")
    result, _ = counted(loaded, call)
    assert relative_error(reference, result) < 2e-3
    assert torch.equal(result, counted(with_compute(comfy, loaded, "auto"), call)[0])
    planned, *_, why = comfy.run("HalfsafeAutoPrecision", model=loaded, goal="balanced")
    assert "model: fp16_safe." in why and torch.equal(result, counted(planned, call)[0])
    text = comfy.run("HalfsafeDeviceInfo", profile=profile)[0]
    assert "fp16_safe" in text and "longer by estimate" in " ".join(text.split())


def test_a_lora_that_leaves_the_range_of_fp16_makes_no_picture_black(comfy, monkeypatch, models_dir):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    path = tiny_models.wan(models_dir / "diffusion_models" / "auto_clean.safetensors", torch.float16, blocks=1)
    save_file({name: 40 * tensor for name, tensor in model_files.lora(LORA, size=0.5).items()}, str(models_dir / "loras" / "auto.safetensors"))

    def with_lora(model):
        return comfy.core["LoraLoaderModelOnly"]().load_lora_model_only(model, "auto.safetensors", 1.0)[0]

    exact, plain, model = (load(comfy, path, "as_file", compute) for compute in ("fp32", "fp16", "auto"))
    clean, expected = families.sample(exact, "wan"), families.sample(with_lora(exact), "wan")
    assert not torch.isfinite(families.sample(with_lora(plain), "wan")).all(), "the LoRA takes fp16 out of its range"
    watched = guarded(comfy, with_lora(model))
    for run in (model, watched, watched, model):  # the same object again, as a cached prompt has it
        result = families.sample(run, "wan")
        assert relative_error(clean if run is model else expected, result) < 5e-3
    assert families.report(comfy, watched)["guard"]["verdict"] == "clean", "nothing was left for the guard to repair"
