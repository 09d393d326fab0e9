"""Compute plans in a real ComfyUI: fp16 that cannot overflow, per-layer dtypes, and models that stay as they were."""

import json

import pytest
import torch
from support import tiny_models
from support.denoise import denoise

from halfsafe.precision.quantize import relative_error
from halfsafe.precision.rules import rules_from


@pytest.fixture(scope="module")
def overflowing(models_dir):
    return tiny_models.wan_overflowing(models_dir / "diffusion_models" / "overflowing.safetensors")


def load(comfy, path, storage="as_file", compute="fp32", rules=None):
    return comfy.run("HalfsafeLoadDiffusionModel", model_name=path.name, storage=storage, compute=compute, rules=rules)[0]


def with_compute(comfy, model, compute, rules=None):
    return comfy.run("HalfsafeComputeDtype", model=model, compute=compute, rules=rules)[0]


def report(comfy, model):
    return json.loads(comfy.run("HalfsafeReport", model=model)[1])


@pytest.fixture(scope="module")
def reference(comfy, overflowing):
    return denoise(load(comfy, overflowing, "fp32", "fp32"))


def test_plain_fp16_overflows(comfy, overflowing):
    assert not torch.isfinite(denoise(load(comfy, overflowing, "fp16", "fp16"))).all()


@pytest.mark.parametrize("storage", ["as_file", "fp16", "fp32", "fp8_e4m3fn", "auto"])
def test_fp16_safe_is_finite_and_closer_than_bf16(comfy, overflowing, reference, storage):
    model = load(comfy, overflowing, storage, "fp16_safe")
    fp32 = reference if storage != "fp8_e4m3fn" else denoise(load(comfy, overflowing, storage, "fp32"))
    bf16 = relative_error(fp32, denoise(load(comfy, overflowing, storage, "bf16")))
    for _ in range(3):
        assert relative_error(fp32, denoise(model)) < 0.6 * bf16
