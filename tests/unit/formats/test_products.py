"""Products of formats on plain tensors, with kernels of torch alone: bound once, and right whatever the call brings."""

import logging

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.formats import fp8, int8
from halfsafe.precision.formats.fp8 import E4M3, E5M2, fast_accumulation
from halfsafe.precision.formats.registry import FORMATS
from support.measures import relative_error
from support.storing import normal_weight

INT8 = FORMATS["int8_tensorwise"]
MOST = {"fp8_e4m3fn": 0.05, "fp8_e5m2": 0.08, "int8": 0.02}
"""Largest relative error of a product: what its operands are rounded by, fp8 by 2.7 % (e5m2: 5.4 %) and int8 by 0.7 %."""


def quantize_per_tensor_fp8(x, scale, output_type):
    return (x.float() / scale).clamp(-448, 448).to(output_type)


def dequantize_per_tensor_fp8(data, scale, output_type):
    return (data.float() * scale).to(output_type)


def int8_linear(x, weight, scale, bias, dtype, convrot, group):
    rows = int8.rotated(x.float().reshape(-1, x.shape[-1]), group) if convrot else x.float().reshape(-1, x.shape[-1])
    of_rows = rows.abs().amax(1, keepdim=True) / 127
    result = ((rows / of_rows).round() @ weight.float().T) * of_rows * scale.reshape(1, -1)
    return (result if bias is None else result + bias.float()).view(*x.shape[:-1], -1).to(dtype)


def dequantize_int8_convrot_weight_dtype(data, scale, group, code):
    return int8.dequantize_rows(data, scale, group).to(int8.INT8_RESULTS[code])


class Kernels:
    """Finds the functions of this file, and notes what was asked for."""

    def __init__(self, **replaced):
        self.asked, self.replaced = [], replaced

    def __call__(self, name, **arguments):
        self.asked.append(name)
        return self.replaced.get(name) or globals()[name]


def stored(format, columns=64):
    """Data, scale and rotation of a weight of 32 rows in a format, and its numbers."""
    weight = normal_weight((32, columns))
    group = int8.rotation_group(columns) if format is INT8 else 0
    if format is INT8:
        data, scale = int8.quantize_rows(weight, group)
        return (data, scale, group), int8.dequantize_rows(data, scale, group)
    data, scale = fp8.quantize(weight, format.dtype, weight.abs().max().item())
    return (data, scale, group), data.float() * scale


def product(format, find, x, data, scale, group, bias=None):
    return format.apply(format.kernels_for(find, x, data, scale, group), x, data, scale, bias)


@pytest.mark.parametrize("shape", [(5, 64), (2, 5, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", [E4M3, E5M2, INT8], ids=lambda format: format.storage)
def test_a_product_is_that_of_the_unpacked_weight_but_for_the_rounding_of_its_operands(format, dtype, shape):
    (data, scale, group), weight = stored(format)
    x, bias, find = torch.randn(shape).to(dtype), torch.randn(32), Kernels()
    expected = F.linear(x.double(), weight.double(), bias.double())
    result = product(format, find, x, data, scale, group, bias)
    assert (result.dtype, result.shape) == (dtype, expected.shape)
    assert relative_error(expected, result) < MOST[format.storage]
    unpacked = format.unpacking(find, data, scale, dtype, group)
    assert relative_error(weight, format.numbers(unpacked, data, scale)) < 0.005
    assert relative_error(expected, format.apply_unpacked(unpacked, x, data, scale, bias)) < 0.01


@pytest.mark.parametrize("format", [E4M3, INT8], ids=lambda format: format.storage)
def test_what_is_bound_keeps_nothing_of_the_weight_and_looks_nothing_up_in_a_call(format):
    """ComfyUI moves weights and changes them in place: the numbers are those of each call."""
    (data, scale, group), _ = stored(format)
    x, find = torch.randn(3, 64).bfloat16(), Kernels()
    bound = format.kernels_for(find, x, data, scale, group)
    asked = len(find.asked)
    before, after = (format.apply(bound, x, data, factor * scale, None) for factor in (1, 2))
    assert torch.equal(2 * before, after) and len(find.asked) == asked
    assert not any(torch.is_tensor(each) for each in bound)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_input_that_is_not_finite_is_seen_in_an_fp8_product(bad):
    (data, scale, group), _ = stored(E4M3)
    x = torch.randn(3, 64).bfloat16()
    x[1, 2] = bad
    assert not product(E4M3, Kernels(), x, data, scale, group)[1].isfinite().any()


def test_an_fp8_product_that_torch_refuses_unpacks_the_weight_and_says_so_once(monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise RuntimeError("no such product\nat all")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    fp8._tell_once.cache_clear()
    caplog.set_level(logging.WARNING)
    (data, scale, group), weight = stored(E4M3)
    x, refused = torch.randn(3, 64), {}
    with fast_accumulation(refused):
        results = [product(E4M3, Kernels(), x, data, scale, group) for _ in range(2)]
    assert all(relative_error(F.linear(x, weight), result) < 1e-6 for result in results)
    assert refused == {(32, 64): "no such product"}
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["no such product"]


def test_an_fp8_product_that_lacks_memory_raises(monkeypatch):
    def lack(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "_scaled_mm", lack)
    (data, scale, group), _ = stored(E4M3)
    with pytest.raises(torch.OutOfMemoryError):
        product(E4M3, Kernels(), torch.randn(3, 64), data, scale, group)
