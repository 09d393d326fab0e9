"""In what a failed call is repeated, and in which order."""

import pytest
import torch
from halfsafe.precision.base.dtypes import name_of
from halfsafe.precision.guard.rungs import encoder_rungs, model_rungs
from halfsafe.precision.plan.in_use import PlanInUse

TWO = PlanInUse({"blocks.0.up": "fp16", "blocks.0.down": "fp16"}, "fp16")
FP8 = PlanInUse({"up": "fp8"}, "bf16")
EXACT = PlanInUse({"up": "fp32"}, "fp32")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (TWO, [TWO.safe(), TWO.fp32()]),
        (TWO.wider({}, stream=True), [TWO.safe(), TWO.fp32()]),
        (TWO.safe(), [TWO.fp32()]),
        (TWO.fp32(), []),
        (FP8, [FP8.fp32()]),
        (EXACT, [EXACT.fp32()]),
    ],
)
def test_a_model_is_repeated_safely_in_fp16_then_in_fp32(plan, steps):
    assert [rung.arithmetic for rung in model_rungs(plan)] == steps


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
    assert len(rungs) - len(unpacked) == (dtype != F16) and [rung.is_fp32 for rung in rungs] == [
        rung is rungs[-1] for rung in rungs
    ]
    assert [rung.name for rung in rungs if rung.later] == [f"{name_of(dtype)} with dequantized weights"], (
        "it says what cured the encoder"
    )
