import math

import pytest
import torch
from halfsafe.precision.arithmetic.ranges import Ranges, Slot, magnitude
from halfsafe.precision.dtypes import FP16_MAX
from hypothesis import given
from hypothesis import strategies as st


@given(st.floats(1e-30, 1e30), st.floats(1.0, 6e4))
def test_a_fitted_operand_has_room_to_grow_and_keeps_its_precision(size, gain):
    slot = Slot("layer")
    slot.fit(size, gain)
    scaled = size * 2.0**-slot.exponent * gain
    assert scaled * 2**16 > FP16_MAX / 2**16 and scaled <= FP16_MAX / 4
    assert slot.holds(size * 4)


def test_an_operand_that_fits_is_not_scaled():
    for size in (1e-3, 1.0, 1e4):
        slot = Slot("layer")
        slot.fit(size)
        assert slot.exponent == 0


def test_nothing_is_held_before_a_measurement_nor_ever_a_nan():
    slot = Slot("layer")
    assert not slot.holds(0.0) and not slot.holds(1.0)
    slot.fit(1.0)
    assert slot.holds(0.0) and slot.holds(1.0)
    assert not any(map(slot.holds, (math.nan, math.inf, FP16_MAX * 2, 1e-9)))


def test_magnitudes_that_keep_swinging_end_in_fp32():
    slot = Slot("layer")
    for _ in range(3):
        slot.fit(1e12)
        slot.fit(1e-12)
    assert slot.full


def test_a_layer_first_reached_at_a_later_call_is_measured():
    ranges, calls = Ranges(), []

    def first():
        return ranges.slot("a").fit(1.0)

    def later():
        calls.append(ranges.measuring)
        ranges.slot("b").record(torch.tensor(1.0)) if not ranges.measuring else ranges.slot("b").fit(1.0)

    ranges.run(first)
    ranges.run(later)
    assert calls == [False, True] and ranges.repeats == 1


def test_an_error_while_measuring_measures_again():
    ranges = Ranges()
    with pytest.raises(KeyError):
        ranges.run(lambda: {}["missing"])
    assert ranges.measuring
    assert ranges.run(lambda: ranges.measuring)
    assert ranges.run(lambda: not ranges.measuring)


def test_every_measurement_changes_the_phase():
    ranges, phases = Ranges(), []
    for size in (1.0, 1e9):
        ranges.run(lambda size=size: ranges.slot("a").fit(size))
        phases.append(ranges.phase)
        ranges.slot("a").record(torch.tensor(1e9))
        assert ranges._held() is (size == 1e9)
        ranges.run(lambda: ranges.slot("a").record(torch.tensor(1e9)) if not ranges.measuring else ranges.slot("a").fit(1e9))
        phases.append(ranges.phase)
    assert phases[0] != phases[1] and phases[1] == phases[2] == phases[3]


def test_records_keep_the_largest_and_nan():
    slot = Slot("layer")
    for value in (1.0, 3.0, 2.0):
        slot.record(torch.tensor(value))
    assert slot.value == 3
    slot.record(torch.tensor(math.nan))
    slot.record(torch.tensor(5.0))
    assert slot.value.isnan()


def test_magnitude_of_nothing_is_zero():
    assert magnitude(torch.zeros(0, 3)) == 0
    assert magnitude(torch.tensor([1.0, -7.0], dtype=torch.bfloat16)) == 7
