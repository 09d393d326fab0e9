"""Sums in fp16 of the layers of a model: tried in the first call, looked at in the later ones, given up where they overflow."""

from functools import partial

import pytest
import torch
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION, Fp16Sums
from halfsafe.precision.base import flags
from support.broken_arithmetic import SumsInFp16
from support.plain_weights import plain_weights

LOUD = 600.0
"""What an input is multiplied by so that half of a sum of 64 products by ``cancelling`` passes fp16's range."""


@pytest.fixture(autouse=True)
def as_in_a_call():
    with torch.inference_mode(), flags.flags_set({FP16_ACCUMULATION: False}):
        yield


def cancelling(outputs=4):
    """A layer whose terms cancel each other for an input of equal numbers."""
    return half_linear(torch.tensor([4.0, -4.0]).repeat(outputs, 32))


def half_linear(weight, bias=None):
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight = torch.nn.Parameter(weight.half(), requires_grad=False)
    if bias is not None:
        module.bias = torch.nn.Parameter(bias.half(), requires_grad=False)
    return module


def summed(*modules):
    """The forwards of layers with fp16 sums, what decides about each, and their calibration."""
    calibration = Calibration()
    calibration.in_fp16 = True
    sums = [calibration.add(Fp16Sums(f"{i}", each, calibration, plain_weights)) for i, each in enumerate(modules)]
    return [partial(each, module.forward) for each, module in zip(sums, modules, strict=True)], sums, calibration


def noting(module, seen):
    forward = module.forward

    def run(x):
        seen.append(flags.is_on(FP16_ACCUMULATION))
        return forward(x)

    module.forward = run
    return module


@pytest.mark.parametrize("size", [1.0, LOUD])
def test_a_layer_sums_in_fp16_after_a_first_call_in_which_that_did_not_overflow(size):
    seen: list[bool] = []
    (layer,), (sums,), calibration = summed(noting(cancelling(), seen))
    x = torch.full((2, 64), size).half()
    with SumsInFp16():
        for _ in range(3):
            assert torch.equal(calibration.run(lambda: layer(x)), torch.zeros(2, 4).half())
    assert seen == [size == 1.0] * 2, "the first call multiplies by itself the weight that it tried"
    assert calibration.repeats == 0 and sums.in_fp16 is (size == 1.0)
    assert not flags.is_on(FP16_ACCUMULATION)


def test_sums_that_overflow_later_are_repeated_once_and_that_layer_alone_stays_in_fp32():
    (first, second), (of_first, of_second), calibration = summed(half_linear(torch.eye(64)), cancelling())
    quiet, loud = (torch.full((2, 64), size).half() for size in (1.0, LOUD))
    with SumsInFp16():
        for x, repeats in ((quiet, 0), (quiet, 0), (loud, 1), (loud, 1), (quiet, 1)):
            result = calibration.run(lambda x=x: second(first(x)))
            assert torch.equal(result, torch.zeros(2, 4).half()) and calibration.repeats == repeats
    assert of_first.in_fp16 and of_second.overflowed
    calibration.recalibrate()
    assert not (of_first.in_fp16 or of_second.overflowed), "other weights: tried anew"


@pytest.mark.parametrize(
    "hide", [torch.relu, torch.tanh, torch.nan_to_num, lambda x: x.clamp(-9, 9), lambda x: 1 / (x + 1)]
)
def test_one_sum_that_overflows_later_is_seen_behind_what_hides_it(hide):
    module = cancelling()
    module.weight[:3] = 0.0
    (layer,), (sums,), calibration = summed(module)
    module.weight[3, 0] = 5.0
    with SumsInFp16():
        for size, repeats in ((1.0, 0), (LOUD, 1), (LOUD, 1)):
            x = torch.full((2, 64), size).half()
            result = calibration.run(lambda x=x: hide(layer(x)))
            assert torch.equal(result, hide(torch.nn.functional.linear(x.float(), module.weight.float()).half()))
            assert calibration.repeats == repeats
    assert sums.overflowed


def test_where_nothing_hides_an_overflow_no_result_of_a_layer_is_reduced():
    (layer,), (sums,), calibration = summed(cancelling())
    calibration.run(lambda: layer(torch.ones(2, 64).half()))
    assert sums.device is None and sums.in_fp16


def test_a_layer_whose_result_is_inf_by_design_does_not_repeat_each_call():
    (layer,), _, calibration = summed(half_linear(torch.full((4, 64), 6e4)))
    x = torch.full((2, 64), 6e4).half()
    for _ in range(3):
        assert (calibration.run(lambda: layer(x).nan_to_num()) == 65504).all()
    assert calibration.repeats == 0


@pytest.mark.parametrize("first", [True, False])
def test_an_input_that_is_not_finite_teaches_nothing(first):
    (layer,), (sums,), calibration = summed(cancelling())
    for size in (*[1.0] * (not first), torch.nan, torch.inf):
        calibration.run(lambda size=size: layer(torch.full((2, 64), size).half()))
    assert not sums.overflowed and sums.in_fp16 is not first


def test_a_layer_that_did_not_run_in_the_first_call_sums_in_fp32():
    seen: list[bool] = []
    (layer,), _, calibration = summed(noting(cancelling(), seen))
    x = torch.ones(2, 64).half()
    calibration.run(lambda: x)
    calibration.run(lambda: layer(x))
    assert seen == [False] and calibration.repeats == 0


def test_the_weight_of_a_layer_is_asked_for_once_in_the_first_call():
    asked = []

    def weights(*args, **kwargs):
        asked.append(args)
        return plain_weights(*args, **kwargs)

    calibration = Calibration()
    module = half_linear(torch.randn(4, 64), torch.randn(4))
    layer = Fp16Sums("layer", module, calibration, weights)
    x = torch.randn(2, 64).half()
    assert torch.equal(calibration.run(lambda: layer(module.forward, x)), module(x)) and len(asked) == 1


def test_a_layer_takes_an_input_without_rows():
    """An expert that no token reaches."""
    (layer,), (sums,), calibration = summed(half_linear(torch.ones(4, 512), torch.zeros(4)))
    for rows in (0, 2, 0):
        assert calibration.run(lambda rows=rows: layer(torch.ones(rows, 512).half())).shape == (rows, 4)
    assert sums.in_fp16


def test_an_error_inside_a_layer_leaves_the_flag_off():
    _, (sums,), calibration = summed(cancelling())
    x = torch.ones(2, 64).half()
    calibration.run(lambda: sums(lambda x: x, x))

    def fail(x):
        assert flags.is_on(FP16_ACCUMULATION) is True
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sums(fail, x)
    assert flags.is_on(FP16_ACCUMULATION) is False


def test_inputs_that_are_not_fp16_are_left_alone():
    (layer,), (sums,), calibration = summed(torch.nn.Linear(8, 4))
    for _ in range(2):
        calibration.run(lambda: layer(torch.ones(2, 8)))
    assert not sums.ran
