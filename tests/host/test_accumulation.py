"""How a model's products are summed, in a real ComfyUI: set inside its calls, exactly as before outside of them."""

import pytest
import torch
from support import families, tiny_models
from support.families import load, report, with_compute

from halfsafe.nodes.host.accumulation import accumulation_of
from halfsafe.precision import flags
from halfsafe.precision.quantize import relative_error

UNCHANGED = {
    "fp16_accumulation": "unchanged", "reduced_precision_reduction": "unchanged", "tf32": "unchanged",
    "fp8_fast_accumulation": "unchanged", "attention": "unchanged",
}  # fmt: skip


def accumulation(comfy, model, **settings):
    return comfy.run("HalfsafeAccumulation", model=model, **{**UNCHANGED, **settings})[0]


@pytest.fixture(scope="module")
def wan(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "summed.safetensors")


@pytest.fixture(scope="module")
def call(comfy, wan):
    return families.capture(load(comfy, wan), "wan")


def test_smoke(comfy, wan, call, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    model = load(comfy, wan, "fp16", "fp16")
    plain = families.replay(model, call)
    ours = accumulation(comfy, model, fp16_accumulation="auto", attention="auto")
    for _ in range(3):
        out = families.replay(ours, call)
        print(relative_error(plain, out))
    print(comfy.run("HalfsafeReport", model=ours)[0])
    assert 0
