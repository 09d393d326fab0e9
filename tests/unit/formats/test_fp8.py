"""Scaled fp8: one power-of-two scale per weight, and the scales of activations."""

import math
from unittest import mock

import pytest
import torch
from halfsafe.precision.base.amax import amax_value
from halfsafe.precision.base.dtypes import looked_up
from halfsafe.precision.formats import fp8 as q
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.leaf_operations import LeafOperations
from support.measures import relative_error

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def round_trip(weight, dtype, out=torch.float32):
    data, scale = q.quantize(weight, dtype, amax_value(weight))
    return (data.float() * scale).to(out)


@pytest.mark.parametrize("std", [1e4, 0.02, 1e-6])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "bound"), [(E4M3, 0.0275), (E5M2, 0.054)])
def test_error_is_the_formats_own_at_every_spread(std, source, dtype, bound):
    weight = (torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) * std).to(source)
    assert relative_error(weight, round_trip(weight, dtype)) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [torch.tensor(0.01), torch.tensor([3.0])], ids=["scalar", "vector"])
def test_a_table_unpacks_as_a_cast_and_a_product_do(fp8, dtype, scale):
    """Every byte, NaN and Inf among them, and a weight whose rows do not lie one after another."""
    data = torch.arange(256, dtype=torch.uint8).view(16, 16).view(fp8)
    for each in (data, data.t(), data[:, ::2]):
        found = looked_up(each, dtype, scale)
        torch.testing.assert_close(found, each.to(dtype) * scale.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert found.is_contiguous() and found.dtype == dtype


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=64),
    dtype=st.sampled_from([E4M3, E5M2, torch.float8_e4m3fnuz]),
    source=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=100, deadline=None)
def test_never_nan_and_never_beyond_the_largest_value(values, dtype, source):
    weight = torch.tensor(values).to(source)
    data, scale = q.quantize(weight, dtype, amax_value(weight))
    assert torch.isfinite(data.float()).all()
    assert math.frexp(scale.item())[0] == 0.5, "the scale is no power of two"
    largest = (1 + torch.finfo(dtype).eps / 2) * weight.double().abs().max()
    assert (data.double() * scale).abs().max() <= largest + 2.0**-30


@given(st.floats(1e-20, 1e35), st.sampled_from([E4M3, E5M2]))
@example(448.0, E4M3)
@example(2.0 * 57344.0, E5M2)
def test_scale_is_the_smallest_power_of_two_that_fits(amax, dtype):
    format = q.E4M3 if dtype == E4M3 else q.E5M2
    scale = format.scale_for(amax)["weight_scale"].item()
    largest = torch.finfo(dtype).max
    assert amax / scale <= largest
    assert scale == 2.0**-24 or amax / (scale / 2) > largest


@pytest.mark.parametrize(("source", "dtype"), [(torch.bfloat16, E4M3), (torch.bfloat16, E5M2), (torch.float16, E4M3)])
def test_every_number_becomes_the_fp8_number_of_its_quotient_in_fp32(source, dtype):
    """At each scale, and at one that makes numbers smaller: so what is on an fp8 grid stays, and a zero keeps its sign."""
    numbers = torch.arange(1 << 16).to(torch.int16).view(source)
    for expected in [2.0**exponent for exponent in range(-24, 2)]:
        held = numbers[numbers.abs().float() <= expected * torch.finfo(dtype).max]
        data, scale = q.quantize(held, dtype, amax_value(held))
        assert scale == expected and torch.equal(
            data.view(torch.uint8), (held.float() / scale).to(dtype).view(torch.uint8)
        )
    assert q.quantize(torch.zeros(4, 4), dtype, 0.0)[1] == 1


def test_every_part_of_a_strided_weight_is_written_in_any_grad_mode(monkeypatch):
    monkeypatch.setattr(q, "PART", 16)
    weight = torch.randn(32, 16).t()
    with torch.inference_mode():
        expected = round_trip(weight, E4M3)
    assert relative_error(weight, expected) < 0.03
    assert torch.equal(round_trip(weight.requires_grad_(), E4M3), expected)


@pytest.mark.parametrize(
    ("dtype", "amaxes"),
    [(torch.float16, (0.0, 6e-8, 1e-3, 5e-3, 1.0, 6e4)), (torch.bfloat16, (0.0, 1e-38, 1e-3, 1e38))],
)
def test_an_activation_scale_has_a_finite_reciprocal_in_the_activations_dtype(dtype, amaxes):
    for amax in amaxes:
        x = torch.tensor([amax, 0.0, -amax / 2]).to(dtype)
        scale = q.activation_scale(x, E4M3)
        assert torch.isfinite((1.0 / scale).to(dtype)), amax
        assert (x.float() / scale).abs().max() <= 448.0 * 1.001
    assert q.activation_scale(torch.tensor([448.0 * 2**-15], dtype=dtype), E4M3) == 2.0**-15
    assert all(q.activation_scale(torch.tensor([bad, 1.0], dtype=dtype), E4M3).isinf() for bad in (math.nan, math.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_activation_scale_is_the_smallest_power_of_two_that_fits(dtype):
    """Every number of a dtype as amax, where its scale is neither raised nor past fp32."""
    every = torch.arange(1, 0x7F80 if dtype == torch.bfloat16 else 0x7C00, dtype=torch.int16).view(dtype).float()
    every = every[every >= 448.0 * (2.0**-126 if dtype == torch.bfloat16 else 2.0**-15)]
    with mock.patch.object(q, "amax", lambda x: x.float()):
        scales = q.activation_scale(every.to(dtype), E4M3)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert (every / scales <= 448).all() and (every / scales > 224).all()


class Kernels(LeafOperations):
    """Counts the operations that launch a kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def leaf(self, func, args, kwargs):
        self.count += not func.is_view
        return func(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_for_a_kernel_that_divides_in_fp32_takes_two_launches_and_fits_every_amax(dtype):
    for largest in (0.0, 6e-8, 1e-3, 1.0, 6e4):
        x = torch.tensor([largest, 0.0, -largest / 2]).to(dtype)
        with Kernels() as kernels:
            scale = q.activation_scale(x, E4M3, divided_in_fp32=True)
        quotients = x.float() / scale
        assert kernels.count == 2 and scale.dtype == torch.float32 and scale.dim() == 0
        assert quotients.isfinite().all() and abs(quotients.abs().max() - 448 * (largest > 0)) < 0.01, largest
    for bad in (math.nan, math.inf):
        assert not q.activation_scale(torch.tensor([bad, 1.0], dtype=dtype), E4M3, True).isfinite()
