"""Weights quantized on a real device as a model is loaded: where it ran, what a CPU makes of the same, and that nothing stays there."""

from contextlib import nullcontext

import pytest
import torch
from halfsafe.nodes.host.load import tensors as loading
from halfsafe.precision.devices import on_device, pinned
from support import families, tiny_models
from support.mapped_loading import tensors_of
from support.quantizing import Quantizing, assert_near, assert_same

MATRICES = 20


@pytest.fixture(scope="module")
def wan(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "gpu_loading.safetensors")


@pytest.fixture(params=[100_000, pinned.PART])
def here(request, device, monkeypatch):
    """Where weights are to be quantized, in parts of this size."""
    if device.type != "cuda":
        pytest.skip("a CPU has no memory of its own to pin for")
    monkeypatch.setattr(on_device, "SMALL", 1)
    monkeypatch.setattr(pinned, "PART", request.param)
    return device


def loaded(comfy, wan, storage) -> list[torch.Tensor]:
    return [part.cpu() for part in tensors_of(families.load(comfy, wan, storage, "fp32").model.diffusion_model)]


@pytest.mark.parametrize(("storage", "operation"), [("fp8_e4m3fn", "mul"), ("fp8_e5m2", "mul"), ("int8", "mm")])
def test_what_is_quantized_there_is_as_the_cpus(comfy, wan, here, storage, operation, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    before = torch.cuda.memory_allocated()
    with Quantizing() as spy:
        found = loaded(comfy, wan, storage)
    assert set(spy.where[operation]) == {"cuda"} and len(spy.where[operation]) >= MATRICES and not any(spy.tf32)
    assert torch.cuda.memory_allocated() <= before
    with monkeypatch.context() as patch, Quantizing() as spy:
        patch.setattr(loading, "quantizing_device", nullcontext)
        expected = loaded(comfy, wan, storage)
    assert set(spy.where[operation]) == {"cpu"}
    (assert_near if storage == "int8" else assert_same)(found, expected)
