"""The loader and saver nodes in a real ComfyUI: what they load, what it computes, what stock nodes make of it."""

import pytest
from halfsafe.precision.quantize import relative_error
from support import tiny_models
from support.denoise import denoise


@pytest.fixture(scope="module")
def wan(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "wan.safetensors")


@pytest.fixture(scope="module")
def reference(comfy, wan):
    (model,) = comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="fp32", compute="fp32")
    return denoise(model)


@pytest.mark.parametrize(
    ("storage", "compute", "bound"),
    [
        ("fp32", "fp32", 1e-6),
        ("auto", "auto", 0.02),
        ("as_file", "bf16", 0.02),
        ("fp16", "fp16", 0.005),
        ("fp8_e4m3fn", "fp32", 0.06),
        ("fp8_e4m3fn", "bf16", 0.06),
        ("fp8_e5m2", "bf16", 0.12),
    ],
)
def test_every_storage_gives_the_picture(comfy, wan, reference, storage, compute, bound):
    (model,) = comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage=storage, compute=compute)
    assert relative_error(reference, denoise(model)) < bound
