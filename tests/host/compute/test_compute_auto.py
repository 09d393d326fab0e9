"""``auto`` on every profile: models that overflow in fp16 are finite and right, counted by a spy on the products."""

import pytest
import torch
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from safetensors.torch import save_file
from support import families, model_files, tiny_models
from support.families import load, with_compute
from support.guarding import guarded
from support.matmul_spy import MatmulSpy
from support.measures import relative_error
from support.rows import rotated

NO_HALF = ("sm_61", "cpu")
NO_BF16 = ("sm_70", "sm_75", "mps_m1")
LORA = {"blocks.0.ffn.0": (1024, 256), "blocks.0.ffn.2": (256, 1024)}
FIRST_LAYERS = {
    r"^patch_embedding\.weight": 3e4,
    r"^text_embedding\.0\.weight": 3e3,
    r"^text_embedding\.2\.weight": 3e3,
}
# model: family, {pattern of tensor names: factor}, dtype of its file; Wan and SDXL are listed for fp16, Qwen-Image is not
MODELS = {
    "listed and in range": ("wan", {}, torch.bfloat16),
    "listed": ("wan", families.OVERFLOWS["wan"]["ffn"], torch.bfloat16),
    "first layers of an fp16 file": ("wan", FIRST_LAYERS, torch.float16),
    "not listed": ("qwen_image", families.OVERFLOWS["qwen_image"]["ffn"], torch.bfloat16),
    "convolutions": ("sdxl", families.OVERFLOWS["sdxl"]["convolution"], torch.float16),
}
KINDS = ("cpu", "sm_70", "sm_75", "sm_86", "gfx1100", "mps_m1")
"""A device of each kind, on which every model is tried; on the others one in turn."""
CASES = [(model, profile) for profile, model in rotated(PROFILE_NAMES, list(MODELS)[:4], whole=KINDS)]
CASES += [("convolutions", profile) for profile in ("sm_90", "gfx1100", "mps_m1")]
CASES.sort(key=lambda case: [*MODELS].index(case[0]))  # each model is made once


@pytest.fixture(scope="module")
def model_of(comfy, models_dir):
    """``(path, call, fp32 result)`` of a row of ``MODELS``; of the last one only."""
    state = {}

    def build(name):
        if name not in state:
            state.clear()
            family, factors, dtype = MODELS[name]
            folder = models_dir / "diffusion_models"
            clean = (
                tiny_models.wan(folder / "auto_wan.safetensors", blocks=1)
                if family == "wan"
                else families.write_narrow(family, folder)
            )
            path = families.write_scaled(clean, folder / "auto_scaled.safetensors", factors, dtype)
            exact = load(comfy, path, "fp32")
            call = families.capture(exact, family)
            state[name] = path, call, families.replay(exact, call)
        return state[name]

    return build


def counted(model, call):
    """(result of a call after the one that calibrates, that call's products)"""
    families.replay(model, call)
    with MatmulSpy(model.model.diffusion_model) as spy:
        result = families.replay(model, call)
    return result, spy.seen


@pytest.mark.parametrize("name", MODELS)
def test_an_fp16_that_is_asked_for_is_plain_fp16(comfy, model_of, name):
    path, call, reference = model_of(name)
    assert torch.isfinite(reference).all()
    overflows = not torch.isfinite(families.replay(load(comfy, path, "as_file", "fp16"), call)).all()
    assert overflows is (name != "listed and in range")


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_no_model_is_black_on_any_device(comfy, monkeypatch, model_of, name, profile):
    path, call, reference = model_of(name)
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    model = with_compute(comfy, load(comfy, path, "as_file", "fp16"), "auto")
    result, products = counted(model, call)
    used = {product.operands for product in products}
    rounded = [product.rounded or "fp16" in product.operands for product in products]
    report = families.report(comfy, model)
    modes, instead = (
        {layer["mode"] for layer in report["layers"]} & {"fp32", "fp16_wide", "fp16", "bf16"},
        report["decisions"].get("instead", ""),
    )
    if profile in NO_HALF:
        expected, error = "fp32", 1e-5
    elif name == "listed and in range" and profile.startswith("sm_"):
        expected, error = "fp16", 2e-3
    elif profile in NO_BF16 or (profile.startswith("sm_") and name != "not listed"):
        expected, error = "fp16_wide", 2e-3
    else:
        expected, error = "bf16", 5e-2
    assert relative_error(reference, result) < error
    assert expected in modes and len(products) > 10
    assert bool(instead) is (expected != "fp16") and ("ComfyUI does not list fp16" in instead) is (
        name == "not listed"
    ), instead
    assert (("bf16", "bf16") in used) is (expected == "bf16")
    assert (sum(rounded) / len(rounded) > 0.8) is (expected in ("fp16", "fp16_wide"))


@pytest.mark.parametrize("profile", ["sm_75", "sm_100"])
def test_the_loader_decides_as_the_node_does(comfy, monkeypatch, model_of, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    path, call, reference = model_of("listed")
    loaded = load(comfy, path, "auto", "auto")
    result, _ = counted(loaded, call)
    assert relative_error(reference, result) < 2e-3
    assert torch.equal(result, counted(with_compute(comfy, loaded, "auto"), call)[0])
    planned, *_, why = comfy.run("HalfsafeAutoPrecision", model=loaded, goal="balanced")
    assert "model: fp16_safe." in why and torch.equal(result, counted(planned, call)[0])
    text = comfy.run("HalfsafeDeviceInfo", profile=profile)[0]
    assert "fp16_safe" in text and "estimated to take" in " ".join(text.split())


def test_a_lora_that_leaves_the_range_of_fp16_makes_no_picture_black(comfy, monkeypatch, models_dir):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    path = tiny_models.wan(models_dir / "diffusion_models" / "auto_clean.safetensors", torch.float16, blocks=1)
    save_file(
        {name: 40 * tensor for name, tensor in model_files.lora(LORA, size=0.5).items()},
        str(models_dir / "loras" / "auto.safetensors"),
    )

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
