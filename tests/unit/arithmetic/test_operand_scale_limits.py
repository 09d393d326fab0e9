"""Operands that no exponent fits: one that keeps swinging, and one whose weight needs too large a gain."""

import pytest
import torch
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.arithmetic.operand_scale import MAX_FALLS, MAX_GAIN, OperandScale
from support.measures import relative_error
from support.plain_weights import plain_weights

SIZES = (1e7, 1e-3)
"""Magnitudes of an operand that are farther apart than one exponent serves."""


def test_a_layer_whose_operand_keeps_swinging_ends_in_fp32():
    torch.manual_seed(0)
    layer, x, calibration = torch.nn.Linear(64, 64), torch.randn(8, 64), Calibration()
    operation = SafeOperation(layer, calibration.scale("layer"), calibration, plain_weights)
    repeats = []
    with torch.inference_mode():
        for call in range(12):
            given = x * SIZES[call % 2]
            result = calibration.run(lambda given=given: operation(given))
            repeats.append(calibration.repeats)
            assert relative_error(layer(given), result) < 2e-3, f"call {call}, operand of {SIZES[call % 2]}"
    assert operation.mode == "fp32", f"repeats after each call: {repeats}"
    assert repeats[-1] == repeats[2 * MAX_FALLS + 2], f"repeats after each call: {repeats}"


@pytest.mark.parametrize(("gain", "in_fp32"), [(MAX_GAIN, False), (MAX_GAIN * 1.01, True)])
def test_a_gain_that_costs_the_operand_its_precision_goes_to_fp32(gain, in_fp32):
    scale = OperandScale("layer")
    scale.calibrate(1.0, gain)
    assert scale.in_fp32 is in_fp32, f"gain {gain}, exponent {scale.exponent}"
