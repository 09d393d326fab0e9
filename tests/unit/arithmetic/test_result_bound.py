"""Results in fp16 where a bound proves them, and back to fp32 where model code makes too much of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.base.dtypes import FP16_MAX
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measures import relative_error
from support.plain_weights import plain_weights


def layers(*modules, largest=FP16_MAX, weights=plain_weights):
    calibration = Calibration()
    calibration.results.allowed = True
    named = enumerate(modules)
    return calibration, [SafeOperation(m, calibration.scale(f"blocks.0.{i}"), calibration, weights, largest_fp16=largest) for i, m in named]


def linear(inputs=64, outputs=64, bias=True, scale=1.0):
    torch.manual_seed(0)
    module = torch.nn.Linear(inputs, outputs, bias=bias)
    module.weight.data *= scale
    return module.requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
def test_a_proven_result_is_fp16_and_as_close_as_that_is(bias):
    module = linear(bias=bias)
    calibration, (operation,) = layers(module)
    x = torch.randn(5, 64)
    for _ in range(2):
        result = calibration.run(lambda: operation(x))
        assert result.dtype == torch.float16 and relative_error(module(x), result) < 1e-3
    assert operation.observed_mode == "fp16" and calibration.repeats == 0


@pytest.mark.parametrize("size", [1e3, 1e5, 1e9])
def test_a_result_that_may_not_fit_is_fp32(size):
    module = linear(scale=30.0)
    calibration, (operation,) = layers(module)
    x = torch.randn(5, 64) * size
    for _ in range(2):
        result = calibration.run(lambda: operation(x))
        assert result.dtype == torch.float32 and relative_error(module(x), result) < 1e-3
    assert operation.observed_mode in ("fp16_wide", "fp16_scaled")


@given(st.integers(1, 40), st.integers(1, 20), st.floats(1e-2, 1e4), st.floats(0, 6e4), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_no_input_inside_of_the_range_passes_fp16(inputs, outputs, size, bias, seed):
    """The worst input there is for a row of the weight, four times as large as the measured one."""
    generator = torch.Generator().manual_seed(seed)
    module = torch.nn.Linear(inputs, outputs).requires_grad_(False)
    module.weight.data, module.bias.data = torch.randn(outputs, inputs, generator=generator) * size**0.5, torch.full((outputs,), bias)
    calibration, (operation,) = layers(module)
    x = torch.randn(3, inputs, generator=generator)
    calibration.run(lambda: operation(x))
    if not operation.scale.fits_result:
        return
    row = module.weight.half().float().abs().sum(1).argmax()
    worst = module.weight[row].sign().unsqueeze(0) * 4.0 * x.abs().max()
    assert calibration.run(lambda: operation(worst)).isfinite().all()
    assert (worst.double() @ module.weight.double().T).abs().max() + 2 * bias <= FP16_MAX * 1.001


def test_a_bias_that_fp16_does_not_hold_keeps_the_result_in_fp32():
    module = linear()
    module.bias.data[3] = 1e6
    calibration, (operation,) = layers(module)
    result = calibration.run(lambda: operation(torch.ones(2, 64)))
    assert result.dtype == torch.float32 and result.isfinite().all()


def test_an_input_that_grows_out_of_the_proof_is_repeated_with_fp32_results():
    module = linear()
    calibration, (operation,) = layers(module)
    calibration.run(lambda: operation(torch.ones(4, 64)))
    assert operation.scale.fits_result
    large = torch.randn(4, 64) * 1e6
    for _ in range(2):
        result = calibration.run(lambda: operation(large))
        assert result.dtype == torch.float32 and relative_error(module(large), result) < 1e-3
    assert calibration.repeats == 1


def gated(operations, join):
    return lambda x: operations[2](join(operations[0](x), operations[1](x)))


JOINS = {
    "overflows": lambda a, b: a * b,
    "overflows and is clamped": lambda a, b: (a * b).nan_to_num(nan=0.0, posinf=65504, neginf=-65504) if a.dtype == torch.float16 else a * b,
}


@pytest.mark.parametrize("later", [False, True], ids=["at once", "at a later call"])
@pytest.mark.parametrize("join", JOINS)
def test_a_product_of_two_results_that_overflows_gives_fp16_results_up(join, later):
    """Each factor fits, as in SDXL's GEGLU; ComfyUI clamps what overflows in Z-Image."""
    modules = [linear(scale=4.0) for _ in range(3)]
    calibration, operations = layers(*modules)
    call, plain = gated(operations, JOINS[join]), gated(modules, JOINS["overflows"])
    x = torch.randn(4, 64) * 200
    if later:
        calibration.run(lambda: call(x * 1e-2))
        assert operations[0].scale.fits_result == (join == "overflows")
    for _ in range(2):
        assert relative_error(plain(x), calibration.run(lambda: call(x))) < 2e-3
    assert not any(operation.scale.fits_result for operation in operations[:2])
    assert calibration.repeats == later


def test_factors_larger_than_allowed_are_fp32_from_the_start():
    modules = [linear(scale=4.0) for _ in range(3)]
    calibration, operations = layers(*modules, largest=128.0)
    call, x = gated(operations, JOINS["overflows"]), torch.randn(4, 64) * 200
    assert relative_error(gated(modules, JOINS["overflows"])(x), calibration.run(lambda: call(x))) < 2e-3
    assert calibration.results.allowed and not operations[0].scale.fits_result


def test_model_code_that_takes_no_fp16_beside_fp32_is_given_fp32():
    """As HiDream's experts do: scatter_reduce_ of fp16 into a sum in fp32 (``comfy/ldm/hidream/model.py``)."""
    module = linear()
    calibration, (operation,) = layers(module)

    def call():
        return torch.zeros(4, 64).scatter_reduce_(0, torch.zeros(4, 64, dtype=torch.long), operation(torch.ones(4, 64)), reduce="sum")

    with pytest.raises(RuntimeError):
        torch.zeros(4, 64).scatter_reduce_(0, torch.zeros(4, 64, dtype=torch.long), torch.ones(4, 64).half(), reduce="sum")
    for _ in range(2):
        assert calibration.run(call).isfinite().all()
    assert not calibration.results.allowed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("on purpose"), RuntimeError("MPS backend out of memory (MPS allocated: 19.13 GiB)")])
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


def test_a_weight_without_room_beside_its_fp16_form_is_measured_in_that():
    """As one that is cast on the device; a weight past fp16's range is then asked for in fp32, and each once a call."""
    modules, asked = [linear(), linear(scale=1e6)], []

    def weights(module, x, dtype, bias_dtype=torch.float32):
        asked.append(dtype)
        if dtype is None:
            raise torch.OutOfMemoryError("on purpose")
        return plain_weights(module, x, dtype, bias_dtype)

    calibration, operations = layers(*modules, weights=weights)
    x = torch.randn(4, 64)
    for _ in range(2):
        results = calibration.run(lambda: [operation(x) for operation in operations])
        assert all(relative_error(module(x), result) < 2e-3 for module, result in zip(modules, results, strict=True))
    assert [dtype and dtype.itemsize for dtype in asked] == [None, 2, 2, 2, 4, 2, 4]


def test_a_shared_input_is_held_to_the_narrowest_range():
    modules = [linear(), linear(scale=500.0)]
    calibration, operations = layers(*modules)
    x = torch.randn(4, 64) * 0.1
    calibration.run(lambda: [operation(x) for operation in operations])
    assert [operation.scale.fits_result for operation in operations] == [True, True]
    results = calibration.run(lambda: [operation(x * 1e4) for operation in operations])
    assert calibration.repeats == 1 and results[1].dtype == torch.float32
    assert relative_error(modules[1](x * 1e4), results[1]) < 1e-3


def test_an_input_written_to_between_two_layers_is_cast_twice():
    modules = [linear(), linear()]
    calibration, operations = layers(*modules)

    def call(x):
        return operations[0](x), operations[1](x.mul_(2.0))

    for _ in range(2):
        x = torch.randn(4, 64)
        expected = modules[1](x * 2)
        assert relative_error(expected, calibration.run(lambda x=x: call(x.clone()))[1]) < 1e-3


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
    sdpa.dtypes.append(q.dtype)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attend(projections, x):
    calibration, operations = layers(*projections)
    attention, sdpa.dtypes = SafeAttention(calibration), []

    def call():
        attention.begin()
        return attention(Kernels(sdpa, sdpa), *(operation(x) for operation in operations), 4)

    return calibration, operations, call


def test_the_layers_before_large_scores_return_fp32():
    """q and k are then rounded once, as they are multiplied, and not twice."""
    torch.manual_seed(0)
    x = torch.randn(1, 7, 64)
    calibration, operations, call = attend([linear(scale=20.0), linear(scale=20.0), linear()], x)
    results = [calibration.run(call) for _ in range(2)]
    assert not any(operation.scale.fits_result for operation in operations) and calibration.results.allowed
    assert torch.equal(*results)


def test_an_error_that_fp16_results_do_not_cause_leaves_them_on():
    calibration, (operation,) = layers(linear())
    x = torch.randn(5, 64)
    expected = calibration.run(lambda: operation(x))

    def failing():
        operation(x)
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        calibration.run(failing)
    assert torch.equal(calibration.run(lambda: operation(x)), expected) and operation.observed_mode == "fp16"


def test_layers_that_share_an_operand_scale_it_alike_or_cast_it_themselves():
    """The first runs twice in a call, and its second input needs another scale."""
    first, second = linear(bias=False), linear(bias=False)
    calibration = Calibration()
    one, other = (SafeOperation(m, calibration.scale(name), calibration, plain_weights) for name, m in (("a", first), ("b", second)))
    x, large = torch.randn(4, 64), torch.randn(4, 64)
    large *= 30000 / large.abs().max()
    for _ in range(3):
        results = calibration.run(lambda: (one(x), other(x), one(large)))
        for result, exact in zip(results, (first(x), second(x), first(large)), strict=True):
            assert relative_error(exact, result) < 2e-3


def test_after_measuring_anew_calls_are_not_repeated():
    calibration, _, call = attend([linear() for _ in range(3)], torch.randn(1, 7, 64))
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
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), None if mask is None else mask.float()).to(q.dtype)

    calibration = Calibration()
    attention = SafeAttention(calibration)

    def call(mask):
        attention.begin()
        return attention(Kernels(masked, masked), q, k, v, 1, mask=mask)

    calibration.run(lambda: call(None))
    for _ in range(2):
        assert relative_error(masked(q, k, v, 1, mask), calibration.run(lambda: call(mask))) < 1e-2
