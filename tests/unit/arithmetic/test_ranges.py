import math

import pytest
import torch
from halfsafe.precision.amax import amax
from halfsafe.precision.arithmetic.ranges import Ranges
from halfsafe.precision.arithmetic.slot import Slot
from halfsafe.precision.dtypes import FP16_MAX
from hypothesis import given
from hypothesis import strategies as st


@given(st.floats(1e-30, 1e30), st.floats(1.0, 6e4))
def test_a_fitted_operand_has_room_to_grow_and_keeps_its_precision(size, gain):
    slot = Slot("layer")
    slot.calibrate(size, gain)
    scaled = size * 2.0**-slot.exponent * gain
    assert scaled * 2**16 > FP16_MAX / 2**16 and scaled <= FP16_MAX / 4
    assert slot.holds(size * 4)


def test_an_operand_that_fits_is_not_scaled():
    for size in (1e-3, 1.0, 1e4):
        slot = Slot("layer")
        slot.calibrate(size)
        assert slot.exponent == 0


def test_nothing_is_held_before_a_measurement_nor_ever_a_nan():
    slot = Slot("layer")
    assert not slot.holds(0.0) and not slot.holds(1.0)
    slot.calibrate(1.0)
    assert slot.holds(0.0) and slot.holds(1.0)
    assert not any(map(slot.holds, (math.nan, math.inf, FP16_MAX * 2, 1e-9)))


def test_magnitudes_that_keep_swinging_end_in_fp32():
    slot = Slot("layer")
    for _ in range(3):
        slot.calibrate(1e12)
        slot.calibrate(1e-12)
    assert slot.in_fp32


def test_a_layer_first_reached_at_a_later_call_is_measured():
    ranges, calls = Ranges(), []

    def first():
        return ranges.slot("a").calibrate(1.0)

    def later():
        calls.append(ranges.calibrating)
        ranges.slot("b").record(torch.tensor(1.0)) if not ranges.calibrating else ranges.slot("b").calibrate(1.0)

    ranges.run(first)
    ranges.run(later)
    assert calls == [False, True] and ranges.repeats == 1


def test_an_error_while_measuring_measures_again():
    ranges = Ranges()
    with pytest.raises(KeyError):
        ranges.run(lambda: {}["missing"])
    assert ranges.calibrating
    assert ranges.run(lambda: ranges.calibrating)
    assert ranges.run(lambda: not ranges.calibrating)


@pytest.fixture(params=[True, False], ids=["made in inference mode", "made outside"])
def placed(request):
    """The ranges of two operations after their first call, and a slot of each."""
    ranges = Ranges()
    slots = [ranges.slot("a"), ranges.slot("b")]

    def measured():
        for slot in slots:
            slot.device = torch.device("cpu")
            slot.calibrate(1.0)

    with torch.inference_mode(request.param):
        ranges.run(measured)
    return ranges, slots


def recorded(slot, *values):
    for value in values:
        slot.record(torch.tensor(value))


@pytest.mark.parametrize("inference", [True, False])
def test_records_keep_the_largest_and_nan(placed, inference):
    ranges, (a, b) = placed
    with torch.inference_mode(inference):
        ranges.run(lambda: recorded(a, 1.0, 3.0, 2.0))
        assert a.largest == 3 and b.largest == 1 and ranges.repeats == 0
        for values in ((5.0, math.nan, 7.0), (math.inf, 1.0), (math.nan, math.inf)):
            ranges._recorded(lambda values=values: recorded(b, *values))
            assert not ranges._held()
        assert b.cell.view.isnan()


def test_only_what_ran_is_checked(placed):
    ranges, (a, b) = placed
    b.gain = None
    ranges.run(lambda: recorded(a, 1.0))
    assert ranges.repeats == 0
    ranges._recorded(lambda: recorded(b, 1.0))
    assert not ranges._held()


def test_zeros_are_held_once_they_were_met(placed):
    """A zero may be what fp16 leaves of a small number: only a calibration sees the difference."""
    ranges, (a, _) = placed
    ranges._recorded(lambda: recorded(a, 0.0))
    assert not ranges._held()
    a.calibrate(0.0)
    ranges._recorded(lambda: recorded(a, 0.0))
    assert ranges._held()


def test_a_record_that_needs_no_gradient_is_kept_of_one_that_does(placed):
    ranges, (a, _) = placed
    ranges.run(lambda: a.record(amax(torch.ones(3, requires_grad=True) * 2)))
    assert a.largest == 2


def test_an_operation_that_has_moved_is_measured_there(placed):
    ranges, (a, _) = placed
    ranges._recorded(lambda: a.record(torch.ones((), device="meta")))
    assert not ranges._held()


def test_slots_keep_their_addresses_until_there_is_a_new_one(placed):
    ranges, (a, b) = placed
    before = a.cell.cells.records.data_ptr()
    ranges._calibrated(lambda: a.calibrate(1e9))
    assert a.cell.cells.records.data_ptr() == before and a.cell.scale()[1] == 2.0**a.exponent
    new = ranges.slot("c")
    new.device = torch.device("cpu")
    ranges._calibrated(lambda: new.calibrate(1.0))
    ranges.run(lambda: [recorded(slot, float(size)) for size, slot in enumerate((a, b, new), 5)])
    assert [slot.largest for slot in (a, b, new)] == [1e9, 6, 7]


def test_magnitude_of_nothing_is_zero():
    assert amax(torch.zeros(0, 3)) == 0
    assert amax(torch.tensor([1.0, -7.0], dtype=torch.bfloat16)) == 7
