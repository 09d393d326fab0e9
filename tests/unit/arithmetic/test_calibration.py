import math

import pytest
import torch
from halfsafe.precision.arithmetic.calibration import Calibration, until_it_stands
from halfsafe.precision.arithmetic.operand_scale import OperandScale
from halfsafe.precision.base.amax import amax
from halfsafe.precision.base.dtypes import FP16_MAX
from hypothesis import given
from hypothesis import strategies as st


@given(st.floats(1e-30, 1e30), st.floats(1.0, 6e4))
def test_a_fitted_operand_has_room_to_grow_and_keeps_its_precision(size, gain):
    scale = OperandScale("layer")
    scale.calibrate(size, gain)
    scaled = size * 2.0**-scale.exponent * gain
    assert scaled * 2**16 > FP16_MAX / 2**16 and scaled <= FP16_MAX / 4
    assert scale.holds(size * 4)


def test_nothing_is_held_before_a_measurement_nor_ever_a_nan():
    scale = OperandScale("layer")
    assert not scale.holds(0.0) and not scale.holds(1.0)
    scale.calibrate(1.0)
    assert scale.holds(0.0) and scale.holds(1.0)
    assert not any(map(scale.holds, (math.nan, math.inf, FP16_MAX * 2, 1e-9)))


def test_a_layer_first_reached_at_a_later_call_is_measured():
    calibration, calls = Calibration(), []
    a, b = calibration.scale("a"), calibration.scale("b")

    def first():
        return a.calibrate(1.0)

    def later():
        calls.append(calibration.calibrating)
        b.record(torch.tensor(1.0)) if not calibration.calibrating else b.calibrate(1.0)

    calibration.run(first)
    calibration.run(later)
    assert calls == [False, True] and calibration.repeats == 1


@pytest.fixture(params=[True, False], ids=["made in inference mode", "made outside"])
def placed(request):
    """The calibration of two operations after their first call, and the scale of each."""
    calibration = Calibration()
    scales = [calibration.scale("a"), calibration.scale("b")]

    def measured():
        for scale in scales:
            scale.device = torch.device("cpu")
            scale.calibrate(1.0)

    with torch.inference_mode(request.param):
        calibration.run(measured)
    return calibration, scales


def recorded(scale, *values):
    for value in values:
        scale.record(torch.tensor(value))


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("values", [(5.0, math.nan, 7.0), (math.inf, 1.0), (math.nan, math.inf)])
def test_records_keep_the_largest_and_nan(placed, inference, values):
    calibration, (a, b) = placed
    with torch.inference_mode(inference):
        calibration.run(lambda: recorded(a, 1.0, 3.0, 2.0))
        assert a.largest == 3 and b.largest == 1 and calibration.repeats == 0
        calibration.run(lambda: recorded(b, *values) if not calibration.calibrating else None)
        assert calibration.repeats == 1


def test_only_what_ran_is_checked(placed):
    calibration, (a, b) = placed
    b.gain = None
    calibration.run(lambda: recorded(a, 1.0))
    assert calibration.repeats == 0
    calibration.run(lambda: recorded(b, 1.0))
    assert calibration.repeats == 1


def test_zeros_are_held_once_they_were_met(placed):
    """A zero may be what fp16 leaves of a small number: only a calibration sees the difference."""
    calibration, (a, _) = placed
    calibration.run(lambda: a.calibrate(0.0) if calibration.calibrating else recorded(a, 0.0))
    for magnitude, repeats in (
        (0.0, 1),
        (1.0, 1),
        (2.0**-20, 2),
    ):  # between a zero and a number that held may be what is too small
        calibration.run(lambda magnitude=magnitude: recorded(a, magnitude))
        assert calibration.repeats == repeats


def test_a_record_that_needs_no_gradient_is_kept_of_one_that_does(placed):
    calibration, (a, _) = placed
    calibration.run(lambda: a.record(amax(torch.ones(3, requires_grad=True) * 2)))
    assert a.largest == 2


def test_an_operation_that_has_moved_is_measured_there(placed):
    calibration, (a, _) = placed
    calibration.run(lambda: a.record(torch.ones((), device="meta")))
    assert calibration.repeats == 1


@pytest.mark.parametrize(("size", "repeats"), [(3.9, 0), (4.1, 1), (0.26, 0), (0.24, 1), (0.0, 0), (math.nan, 1)])
def test_an_input_that_leaves_the_measured_range_has_the_call_repeated(size, repeats):
    calibration = Calibration()
    for each in (1.0, size, size):
        calibration.run(
            lambda each=each: calibration.watch_inputs({0: torch.full((2, 3), each), "t": torch.full((2,), 1e9 * each)})
        )
    assert calibration.repeats == (2 if math.isnan(size) else repeats)


def test_a_mask_of_inf_among_the_inputs_repeats_no_call():
    calibration, mask = Calibration(), torch.tensor([[0.0, -math.inf]])
    for _ in range(3):
        calibration.run(lambda: calibration.watch_inputs({"mask": mask}))
    assert calibration.repeats == 0


def test_magnitude_of_nothing_is_zero():
    assert amax(torch.zeros(0, 3)) == 0
    assert amax(torch.tensor([1.0, -7.0], dtype=torch.bfloat16)) == 7


def raising(*errors):
    """A call that raises these errors, one for each attempt, and then returns."""
    left = list(errors)

    def call():
        if left:
            raise left.pop(0)
        return torch.ones(1)

    return call


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("of model code")])
@pytest.mark.parametrize("calibrating", [True, False])
def test_a_call_whose_error_no_other_attempt_avoids_is_made_once(error, calibrating):
    calibration = Calibration()
    if not calibrating:
        calibration.run(raising())
    with pytest.raises(RuntimeError) as raised:
        calibration.run(raising(error))
    assert raised.value is error and calibration.repeats == 0


class Look:
    """Lets the results stand, or the errors pass, that are in ``refuses`` no more; notes what it is asked."""

    def __init__(self, name, asked, refuses=0):
        self.name, self.asked, self.refuses = name, asked, refuses

    def _refused(self) -> bool:
        self.asked.append(self.name)
        self.refuses -= 1
        return self.refuses >= 0

    def stands(self, result) -> bool:
        return not self._refused()

    def goes_on_after(self, error) -> bool:
        return self._refused()

    def take_back(self) -> None: ...


@pytest.mark.parametrize("errors", [(), (RuntimeError("of an attempt"),)])
def test_a_look_that_repeats_a_call_ends_the_asking(errors):
    """Looks change as they are asked: an outer one would count a repeat for a result that an inner one refused."""
    asked = []
    looks = [Look("outer", asked), Look("inner", asked, refuses=1)]
    until_it_stands(looks, raising(*errors))
    assert asked == ["inner", "inner", "outer"]


def test_an_error_that_a_repeat_does_not_cure_is_raised():
    calibration, made = Calibration(), []
    calibration.run(raising())

    def call():
        made.append(1)
        calibration._missed.any = True
        raise RuntimeError("the backend failed")

    with pytest.raises(RuntimeError, match="the backend failed"):
        calibration.run(call)
    assert len(made) == 2


def test_an_error_of_an_operation_that_was_never_measured_has_the_call_measured():
    calibration = Calibration()
    calibration.run(raising())
    attempts = []

    def call():
        attempts.append(calibration.calibrating)
        if len(attempts) == 1:
            calibration._missed.any = True
            raise RuntimeError("it met an operation without a record")
        return torch.ones(1)

    calibration.run(call)
    assert attempts == [False, True] and calibration.repeats == 1 and not calibration.calibrating


@pytest.mark.parametrize("helps", [True, False])
def test_measuring_that_runs_out_of_memory_is_tried_again_with_less_and_once(helps):
    calibration, attempts = Calibration(), []

    def call():
        attempts.append(calibration.spares_memory)
        if not (helps and calibration.spares_memory):
            with calibration.measuring():
                raise torch.OutOfMemoryError("no memory")
        return torch.ones(1)

    if helps:
        calibration.run(call)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            calibration.run(call)
    assert attempts == [False, True] and calibration.spares_memory is helps
