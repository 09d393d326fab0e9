"""The product of an fp8 layer: the bits of ComfyUI's QuantizedTensor, without its dispatch."""

import logging
import sys
from collections import Counter
from unittest import mock

import pytest
import torch
from halfsafe.nodes.host.run import fp8_product as product
from halfsafe.nodes.host.run.core_layers import Fp8Linear
from halfsafe.nodes.host.run.fast_accumulation import fast_accumulation
from halfsafe.precision.formats.fp8 import activation_scale
from support.dynamic_vram import dynamic_vram
from support.families import load
from support.measures import relative_error


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(logging.getLogger("comfy_kitchen.tensor.fp8"), "disabled", True)


@pytest.fixture(autouse=True)
def _products_of_a_gpu():
    """A CPU has no ``_scaled_mm_v2``, which ``torch.nn.functional.scaled_mm`` calls; on a GPU it is ``_scaled_mm``."""
    library = torch.library.Library("aten", "IMPL")
    if hasattr(torch.ops.aten, "_scaled_mm_v2"):
        library.impl("_scaled_mm_v2", scaled_mm, "CPU")
    yield
    library._destroy()


def scaled_mm(left, right, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, *others, **options):
    return torch._scaled_mm(left, right, scale_a=scale_a[0], scale_b=scale_b[0], bias=bias, out_dtype=out_dtype)


@pytest.fixture(params=["fp8_e4m3fn", "fp8_e5m2"])
def layer(request, comfy, wan):
    return load(comfy, wan, request.param, "fp8").model.diffusion_model.blocks[0].ffn[0]


def rows_of(dtype=torch.bfloat16):
    return (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_comfyuis_dispatch(layer, dtype, biased, fast):
    rows, bias = rows_of(dtype), layer.bias.to(dtype) if biased else None
    scale = activation_scale(rows, torch.float8_e4m3fn)
    if fast:
        with fast_accumulation({}):
            results = [way(rows, scale, layer.weight, bias) for way in (product.fp8_product, product._dispatched)]
    else:
        results = [way(rows, scale, layer.weight, bias) for way in (product.fp8_product, product._dispatched)]
    assert results[0].dtype == dtype and torch.equal(*results)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["transferred", "resident"])
def test_the_same_under_dynamic_vram(comfy, wan, way):
    model = load(comfy, wan, "fp8_e4m3fn", "fp8")
    block = model.model.diffusion_model.blocks[0]
    rows, layer = rows_of(), block.ffn[0]
    expected = Fp8Linear(layer)(rows)
    with dynamic_vram(model, way) as lender:
        assert torch.equal(Fp8Linear(layer)(rows), expected) and torch.equal(Fp8Linear(layer)(rows), expected)
        assert lender.lent and not lender.out, "lent, and given back"


def files_run_by(function) -> Counter:
    """How many Python functions of each file a call runs."""
    files: Counter = Counter()

    def note(frame, event, _):
        if event == "call":
            files[frame.f_code.co_filename] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files


@torch.inference_mode()
def test_a_layer_runs_no_dispatch_in_python(layer):
    rows, run = rows_of(), Fp8Linear(layer)
    run(rows)
    direct = files_run_by(lambda: run(rows))
    with mock.patch.object(product, "registry", None):
        dispatched = files_run_by(lambda: run(rows))
    for costly in ("comfy_kitchen/registry.py", "torch/_library/custom_ops.py"):
        assert count(dispatched, costly) and not count(direct, costly)
    assert count(direct, "comfy_kitchen/tensor/base.py") * 4 <= count(dispatched, "comfy_kitchen/tensor/base.py")


def count(files: Counter, ending: str) -> int:
    return sum(calls for file, calls in files.items() if file.endswith(ending))


@torch.inference_mode()
def test_the_kernel_is_chosen_once_for_a_device_and_dtype(layer, monkeypatch):
    monkeypatch.setattr(product, "_quantizers", {})
    with mock.patch.object(product.registry, "get_implementation", wraps=product.registry.get_implementation) as chosen:
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            Fp8Linear(layer)(rows_of(dtype))
    assert chosen.call_count == 2


@torch.inference_mode()
def test_what_torch_refuses_is_dequantized(layer, monkeypatch):
    rows = rows_of()
    expected = Fp8Linear(layer)(rows)

    def refuse(*args, **kwargs):
        raise RuntimeError("not here")

    monkeypatch.setattr(product, "scaled_mm_v2", refuse)
    monkeypatch.setattr("comfy_kitchen.tensor.fp8.scaled_mm_v2", refuse)
    assert relative_error(expected, Fp8Linear(layer)(rows)) < 0.01
