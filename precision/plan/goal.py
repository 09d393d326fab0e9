"""Goals of the one node, resolved for one model on one device to an arithmetic and an accumulation."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..base.dtypes import FP8_NAMES
from ..devices.detect import Device
from .accumulation import Request
from .auto import UNQUANTIZED, smallest_storage
from .compute import SAFE, WEIGHTS_FOR, ComputePlan, plan_compute
from .facts import ModelFacts
from .rules import Rules

NO_RULES = Rules()
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


def plan_for_goal(
    facts: ModelFacts, device: Device, goal: str, storages: Mapping[str, str], rules: Rules = NO_RULES
) -> GoalPlan:
    """Resolve a goal (balanced, quality, speed, memory) for a model on a device.

    Weights stay as they are loaded: what they are stored in is the loader's choice.

    Args:
        storages: layer name -> storage name.
        rules: exceptions per layer, which come before the goal.
    """
    compute, reason = _compute_for(facts, device, goal, frozenset(storages.values()))
    plan = plan_compute(facts, device, compute, rules, storages)
    sums, sums_reason = SUMS.get(goal, (None, None))
    return GoalPlan(plan, f"{reason} {plan.choice.reason}".strip(), sums, sums_reason)


def storage_for_goal(device: Device, goal: str, stored: frozenset[str]) -> tuple[str, str]:
    """Choose the storage that a goal is best loaded with, and say why; ``auto`` where it asks for none.

    ``stored``: the storages of the weights as they are: what is quantized already is not quantized again.
    """
    can = device.capabilities
    if not stored <= {*UNQUANTIZED}:
        return "auto", ""
    if goal == "memory" or (goal == "speed" and (can["int8_matmul_gains"] or can["fp8_matmul_gains"])):
        storage, reason = smallest_storage(device)
        return ("auto", "") if storage == "as_file" else (storage, reason)
    return "auto", ""


def _compute_for(facts: ModelFacts, device: Device, goal: str, stored: frozenset[str]) -> tuple[str, str]:
    if goal == "quality":
        if device.capabilities["fp16"]:
            return SAFE, "fp16 products with fp32 sums and fp32 between layers are closer to fp32 than bf16 is."
        return "fp32", "fp16 is not fast on this device, so fp32 is used."
    if goal == "speed" and stored & {*FP8_NAMES} and device.capabilities["fp8_matmul_gains"]:
        return "fp8", "fp8 products are faster than 16-bit ones here."
    if goal == "speed" and stored & {*WEIGHTS_FOR["int8"]} and device.capabilities["int8_matmul_gains"]:
        return "auto", f"int8 products. {device.reason('int8_matmul_gains')}"
    return "auto", _advice(device, goal, stored)


def _advice(device: Device, goal: str, stored: frozenset[str]) -> str:
    """Say what the model could be loaded with to serve a goal better."""
    storage, reason = storage_for_goal(device, goal, stored)
    if storage == "auto":
        return ""
    gain = "halve its weights" if goal == "memory" else f"multiply in {storage.split('_')[0]}"
    return f"Load the model with storage {storage} to {gain}. {reason}"
