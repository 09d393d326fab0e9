"""In what a failed call is repeated, and in which order."""

import pytest
import torch
from halfsafe.precision.base.dtypes import name_of
from halfsafe.precision.guard.policy import ALL_IN_FP32, Escalation, safe_escalation
from halfsafe.precision.guard.rungs import encoder_rungs, model_rungs

TWO = {"blocks.0.up": "fp16", "blocks.0.down": "fp16"}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("modes", "stream", "present", "steps"),
    [
        (TWO, "fp16", Escalation(), [safe_escalation(TWO), ALL_IN_FP32]),
        (TWO, "fp16", Escalation(stream=True), [safe_escalation(TWO), ALL_IN_FP32]),
        (TWO, "fp16", ALL_IN_FP32, []),
        ({"up": "fp8"}, "bf16", Escalation(), [ALL_IN_FP32]),
        ({"up": "fp32"}, "fp32", Escalation(), [ALL_IN_FP32]),
    ],
)
def test_a_model_is_repeated_safely_in_fp16_then_in_fp32(modes, stream, present, steps):
    assert [rung.arithmetic for rung in model_rungs(modes, stream, present)] == steps


@pytest.mark.parametrize(
    ("dtype", "has_bf16", "steps"),
    [(F16, True, [BF16, F32]), (F16, False, [F32]), (BF16, True, [BF16, F32]), (F32, True, [F32])],
)
def test_an_encoder_is_repeated_as_it_is_unless_it_overflows_again(dtype, has_bf16, steps):
    rungs = encoder_rungs(dtype, has_bf16)
    assert [rung.name for rung in rungs] == [name_of(step) for step in steps]
    assert [rung.as_it_was for rung in rungs] == [step == dtype for step in steps]
    assert [rung.is_fp32 for rung in rungs] == [step == F32 for step in steps]


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_an_encoder_with_quantized_weights_is_repeated_with_them_dequantized_before_it_is_wider(dtype):
    rungs = encoder_rungs(dtype, True, quantized=True)
    unpacked = [rung.arithmetic for rung in rungs if not rung.as_it_was]
    assert all(step.unpacked for step in unpacked) and (unpacked[0].dtype, unpacked[-1].dtype) == (dtype, F32)
    assert len(rungs) - len(unpacked) == (dtype != F16) and [rung.is_fp32 for rung in rungs] == [rung is rungs[-1] for rung in rungs]
    assert [rung.name for rung in rungs if rung.later] == [f"{name_of(dtype)} with dequantized weights"], "it says what cured the encoder"
