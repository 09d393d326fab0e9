"""Goals of Auto Precision, resolved for one model on one device to an arithmetic and an accumulation."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..devices.detect import Device
from ..dtypes import FP8_NAMES
from .accumulation import Request
from .compute import SAFE, ComputePlan, plan_compute
from .facts import ModelFacts
from .rules import Rules

GOALS = ("balanced", "quality", "speed", "memory")
SUMS = {
    "quality": (
        Request(fp16_accumulation="off", reduced_precision_reduction="off", tf32="off"),
        "fp32 throughout, no TF32",
    ),
    "speed": (
        Request(fp16_accumulation="auto", tf32="on"),
        "fp16 where it is proven not to overflow, TF32 for fp32 products",
    ),
}


@dataclass(frozen=True)
class GoalPlan:
    """A goal resolved: the arithmetic and its reason; the accumulation that belongs to it and its reason, or None."""

    compute: ComputePlan
    reason: str
    sums: Request | None = None
    sums_reason: str | None = None


def plan_for_goal(facts: ModelFacts, device: Device, goal: str, storages: Mapping[str, str]) -> GoalPlan:
    """Resolve a goal (balanced, quality, speed, memory) for a model on a device.

    Weights stay as they are loaded: what they are stored in is the loader's choice.

    Args:
        storages: layer name -> storage name.
    """
    compute, reason = _compute_for(device, goal, any(storage in FP8_NAMES for storage in storages.values()))
    plan = plan_compute(facts, device, compute, Rules(), storages)
    sums, sums_reason = SUMS.get(goal, (None, None))
    return GoalPlan(plan, f"{reason} {plan.choice.reason}".strip(), sums, sums_reason)


def _compute_for(device: Device, goal: str, has_fp8: bool) -> tuple[str, str]:
    if goal == "quality":
        if device.capabilities["fp16"]:
            return SAFE, "fp16 products with fp32 sums and fp32 between layers are closer to fp32 than bf16 is."
        return "fp32", "fp16 is not fast on this device, so fp32 is used."
    if goal == "speed" and device.capabilities["fp8_matmul_gains"]:
        if has_fp8:
            return "fp8", "fp8 products are the fastest here."
        return "auto", "No weight is stored in fp8; load with storage fp8_e4m3fn to multiply in fp8, the fastest here."
    if goal == "memory":
        halve = not has_fp8 and device.capabilities["fp8_storage"]
        return "auto", "Load the model with storage fp8_e4m3fn to halve its weights." if halve else ""
    return "auto", ""
