"""fp8 codes computed on the bits of 16-bit weights: those of torch's multiplication and cast, value by value."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
import torch
from halfsafe.precision import amax as amax_module
from halfsafe.precision.amax import host_amax
from halfsafe.precision.errors import NonFiniteWeight
from halfsafe.precision.formats import fp8_cast
from halfsafe.precision.formats import quantize as quantize_module
from halfsafe.precision.formats.comfy_format import plan_weight, tensors_of
from halfsafe.precision.formats.quantize import power_of_two_scale, quantize
from halfsafe.precision.formats.stored_weight import StoredWeight

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SOURCES = (torch.bfloat16, torch.float16)
EXPONENTS = (-8, 0, 1, 12, 24)
CASES = [*((torch.float16, exponent) for exponent in EXPONENTS), *((torch.bfloat16, exponent) for exponent in (-120, -113, *EXPONENTS))]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    return values[values.isfinite()]


def codes_of_torch(values: torch.Tensor, dtype: torch.dtype, exponent: int) -> torch.Tensor:
    return (values.double() * 2.0**exponent).float().to(dtype).view(torch.uint8)


def codes(values: torch.Tensor, dtype: torch.dtype, exponent: int) -> torch.Tensor:
    target = torch.empty(values.shape, dtype=dtype)
    fp8_cast.cast_scaled(values, target, exponent)
    return target.view(torch.uint8)


def in_range(source: torch.dtype, target: torch.dtype, exponent: int) -> torch.Tensor:
    values = every_value(source)
    return values[values.double().abs() * 2.0**exponent <= torch.finfo(target).max]


def normal(values: torch.Tensor, target: torch.dtype, exponent: int) -> torch.Tensor:
    return values[values.double().abs() * 2.0**exponent >= torch.finfo(target).smallest_normal]


def weight_of(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.02).to(dtype)


@pytest.mark.parametrize(("source", "exponent"), CASES)
@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_every_value_gets_the_code_of_torchs_cast(source, target, exponent):
    values = in_range(source, target, exponent)
    assert torch.equal(codes(values, target, exponent), codes_of_torch(values, target, exponent))


@pytest.mark.parametrize(("source", "exponent"), CASES)
@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_so_does_every_value_whose_code_is_computed(monkeypatch, source, target, exponent):
    """The table holds nothing but 0xFF."""
    values = normal(in_range(source, target, exponent), target, exponent)
    values = values[values.abs() >= torch.finfo(source).smallest_normal]
    values = values[: values.numel() // fp8_cast.LANES * fp8_cast.LANES]
    monkeypatch.setattr(fp8_cast, "_table", lambda *_: torch.full((1 << 16,), 0xFF, dtype=torch.uint8).numpy())
    fp8_cast._cast.cache_clear()
    try:
        assert torch.equal(codes(values, target, exponent), codes_of_torch(values, target, exponent))
    finally:
        fp8_cast._cast.cache_clear()


@pytest.mark.parametrize("small", [0.0, -0.0, 1e-7, 2.0**-20, -(2.0**-21)])
@pytest.mark.parametrize("source", SOURCES)
def test_a_few_small_values_among_many_are_looked_up(source, small):
    values = weight_of(5000, source)
    values[[0, 777, 4999]] = small
    assert torch.equal(codes(values, E4M3, 11), codes_of_torch(values, E4M3, 11))


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (3, 5, 7), (1, 4097), (0, 4)])
@pytest.mark.parametrize("source", SOURCES)
def test_odd_sizes(source, shape):
    values = weight_of(torch.Size(shape).numel(), source).view(shape)
    assert torch.equal(codes(values, E4M3, 10), codes_of_torch(values, E4M3, 10))


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:, 1:], lambda w: w[::3, ::2], lambda w: w[:1].expand(9, -1)])
def test_strided_weights(view):
    values = view(weight_of(120 * 70).view(120, 70))
    result = quantize(values, E4M3, host_amax(values))
    scale = power_of_two_scale(values.abs().max().item(), E4M3)
    assert not values.is_contiguous() and result.scale == scale
    assert torch.equal(result.data.view(torch.uint8), (values / scale).float().to(E4M3).view(torch.uint8))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 13])
def test_every_thread_writes_its_share_and_every_chunk(monkeypatch, threads, extra):
    shares = []
    monkeypatch.setattr(amax_module, "CHUNK", 256)
    monkeypatch.setattr(fp8_cast, "CHUNK", 64)
    monkeypatch.setattr(fp8_cast, "_scratches", threading.local())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    run = fp8_cast.in_parallel
    monkeypatch.setattr(fp8_cast, "in_parallel", lambda work, n: run(lambda share: shares.append(share) or work(share), n))
    values = weight_of(6144 + extra)
    assert torch.equal(codes(values, E4M3, 11), codes_of_torch(values, E4M3, 11))
    assert len(shares) == threads and sum(share.stop - share.start for share in shares) == values.numel()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
def test_a_weight_that_is_not_finite_is_named(bad, source, storage):
    for place in (0, 1500, 3332):
        weight = weight_of(49 * 68, source).view(49, 68)
        weight.view(-1)[place - 1] = bad
        stored = StoredWeight("blocks.0.ffn.0.weight", weight)
        plan = plan_weight(StoredWeight("blocks.0.ffn.0.weight", torch.ones(2, 2)), storage, "model")
        with pytest.raises(NonFiniteWeight, match=r"blocks\.0\.ffn\.0\.weight"):
            tensors_of(stored, plan, "model")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_the_largest_magnitude_of_a_scale_is_not_saturated_and_the_next_takes_the_next_scale(source, target):
    fits = torch.tensor([torch.finfo(target).max / 64], dtype=source)
    assert quantize(fits, target, host_amax(fits)).data.float() == torch.finfo(target).max
    beyond = torch.nextafter(fits, torch.tensor([float("inf")], dtype=source))
    result = quantize(beyond, target, host_amax(beyond))
    assert result.scale == 2 * power_of_two_scale(fits.item(), target) and result.data.float().isfinite().all()
    assert torch.equal(result.data.view(torch.uint8), codes_of_torch(beyond, target, 5))


def test_it_takes_less_than_a_megabyte_beside_the_result(monkeypatch):
    monkeypatch.setattr(quantize_module, "_multiply", None)
    weight = weight_of(1 << 22)
    largest = host_amax(weight)
    tracemalloc.start()
    try:
        result = quantize(weight, E4M3, largest)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert result.data.untyped_storage().nbytes() == weight.numel()
