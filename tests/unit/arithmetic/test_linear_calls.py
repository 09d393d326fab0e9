"""Calls of layers in ``fp16_safe``: operands that grow, layers that run twice, memory that runs out, measuring anew."""

import math

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from support.measures import relative_error
from support.plain_weights import plain_weights


def layers(*modules, weights=plain_weights):
    calibration = Calibration()
    return calibration, [
        SafeOperation(m, calibration.scale(f"blocks.0.{i}"), calibration, weights) for i, m in enumerate(modules)
    ]


def linear(inputs=64, outputs=64, bias=True, scale=1.0):
    torch.manual_seed(0)
    module = torch.nn.Linear(inputs, outputs, bias=bias)
    module.weight.data *= scale
    return module.requires_grad_(False)


@pytest.mark.parametrize("size", [1e3, 1e5, 1e9])
def test_a_result_that_fp16_does_not_hold_is_right(size):
    module = linear(scale=30.0)
    calibration, (operation,) = layers(module)
    x = torch.randn(5, 64) * size
    for _ in range(2):
        result = calibration.run(lambda: operation(x))
        assert result.dtype == torch.float32 and relative_error(module(x), result) < 1e-3
    assert operation.mode in ("fp16_wide", "fp16_scaled")


def test_an_input_that_grows_out_of_the_range_is_scaled_in_a_repeat():
    module = linear()
    calibration, (operation,) = layers(module)
    calibration.run(lambda: operation(torch.ones(4, 64)))
    large = torch.randn(4, 64) * 1e6
    for _ in range(2):
        result = calibration.run(lambda: operation(large))
        assert result.dtype == torch.float32 and relative_error(module(large), result) < 1e-3
    assert calibration.repeats == 1


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("on purpose"), RuntimeError("MPS backend out of memory (MPS allocated: 19.13 GiB)")],
)
def test_running_out_of_memory_is_no_reason_to_try_again(error):
    module, calls = linear(), []
    calibration, (operation,) = layers(module)

    def call():
        operation(torch.ones(2, 64))
        calls.append(1)
        raise error

    with pytest.raises(RuntimeError) as raised:
        calibration.run(call)
    assert raised.value is error
    assert len(calls) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_layer_that_runs_twice_in_a_call_overflows_in_either(place):
    module = linear()
    calibration, (operation,) = layers(module)
    small, large = torch.randn(2, 64), torch.randn(2, 64) * 1e6
    calibration.run(lambda: [operation(small), operation(small)])
    given = [large, small] if place == 0 else [small, large]
    results = calibration.run(lambda: [operation(x) for x in given])
    assert calibration.repeats == 1 and relative_error(module(large), results[place]) < 1e-3


def sdpa(q, k, v, heads, **kwargs):
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attend(projections, x):
    calibration, operations = layers(*projections)
    attention = SafeAttention(calibration)

    def call():
        attention.begin()
        return attention(Kernels(sdpa, sdpa), *(operation(x) for operation in operations), 4)

    return calibration, call


def test_a_layer_whose_second_input_needs_another_scale_is_right_for_both():
    first, second = linear(bias=False), linear(bias=False)
    calibration = Calibration()
    one, other = (
        SafeOperation(m, calibration.scale(name), calibration, plain_weights)
        for name, m in (("a", first), ("b", second))
    )
    x, large = torch.randn(4, 64), torch.randn(4, 64)
    large *= 30000 / large.abs().max()
    for _ in range(3):
        results = calibration.run(lambda: (one(x), other(x), one(large)))
        for result, exact in zip(results, (first(x), second(x), first(large)), strict=True):
            assert relative_error(exact, result) < 2e-3


def test_after_measuring_anew_calls_are_not_repeated():
    calibration, call = attend([linear() for _ in range(3)], torch.randn(1, 7, 64))
    results = [calibration.run(call) for _ in range(2)]
    calibration.recalibrate()
    results += [calibration.run(call) for _ in range(3)]
    assert calibration.repeats == 0 and all(torch.equal(results[1], result) for result in results[2:])


def test_a_mask_that_comes_after_the_measured_call_bounds_the_scores_too():
    """A masked score stays below all others: -32752 in fp16, which a score of 24000 beside one of -24000 would pass."""
    torch.manual_seed(0)
    q = torch.nn.functional.normalize(torch.randn(1, 8, 64), dim=-1) * 400
    k = -q[:, :1].expand(1, 8, 64) * 1.2
    k = torch.cat([k[:, :-1], q[:, :1] * 1.2], 1)
    v, mask = torch.randn(1, 8, 64), torch.zeros(8, 8)
    mask[:, -1] = -math.inf

    def masked(q, k, v, heads, mask=None, **kwargs):
        return F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), None if mask is None else mask.float()
        ).to(q.dtype)

    calibration = Calibration()
    attention = SafeAttention(calibration)

    def call(mask):
        attention.begin()
        return attention(Kernels(masked, masked), q, k, v, 1, mask=mask)

    calibration.run(lambda: call(None))
    for _ in range(2):
        assert relative_error(masked(q, k, v, 1, mask), calibration.run(lambda: call(mask))) < 1e-2
