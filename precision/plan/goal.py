"""The arithmetic of a loaded model by a goal of the node *Halfsafe*, which also sets accumulation."""

from collections.abc import Mapping

from ..base.dtypes import FP8_NAMES
from ..base.message import Message, joined
from ..base.options import ComputeOption, Goal
from ..devices.detect import Device
from ..devices.measurements import told
from ..devices.profiles import GAINS
from .accumulation import Request
from .auto import UNQUANTIZED, smallest_storage
from .compute import SAFE, WEIGHTS_FOR, ComputePlan, plan_compute
from .facts import ModelFacts
from .rules import Rules

NO_RULES = Rules()
SUMS: dict[Goal, tuple[Request, str]] = {
    "quality": (
        Request(fp16_accumulation="off", reduced_precision_reduction="off", tf32="off"),
        "fp32 throughout, no TF32",
    ),
    "speed": (
        Request(fp16_accumulation="auto", tf32="on"),
        "fp16 sums in layers where they do not overflow, TF32 for fp32 products",
    ),
}
"""Goal -> its accumulation, and a description of it."""


def plan_for_goal(
    facts: ModelFacts, device: Device, goal: Goal, storages: Mapping[str, str], rules: Rules = NO_RULES
) -> tuple[ComputePlan, str]:
    """Resolve a goal for a model whose weights stay as loaded: plan and reason. ``memory`` is the
    same as ``balanced``.

    ``storages``: layer name -> storage name.
    """
    compute, reason = _compute_for(facts, device, goal, frozenset(storages.values()))
    plan = plan_compute(facts, device, compute, rules, storages)
    return plan, Message("{0} {1}", reason, plan.choice.reason)


def _compute_for(facts: ModelFacts, device: Device, goal: Goal, stored: frozenset[str]) -> tuple[ComputeOption, str]:
    if goal == "quality":
        if device.capabilities["fp16"]:
            return SAFE, "fp16 products with fp32 sums and fp32 between layers are closer to fp32 than bf16 is."
        return "fp32", "fp16 is not fast on this device, so fp32 is used."
    if goal == "speed" and stored & {*FP8_NAMES} and device.capabilities["fp8_matmul_gains"]:
        return "fp8", Message("fp8 products. {0}", device.reason("fp8_matmul_gains"))
    if goal == "speed" and stored & {*WEIGHTS_FOR["int8"]} and device.capabilities["int8_matmul_gains"]:
        return "auto", Message("int8 products. {0}", device.reason("int8_matmul_gains"))
    return "auto", _advice(device) if goal == "speed" and stored <= {*UNQUANTIZED} else ""


def _advice(device: Device) -> str:
    """Return the advice which storage is faster than 16 bit, or that 8 bits are not; empty if
    nothing is known."""
    if not (device.capabilities["int8_matmul_gains"] or device.capabilities["fp8_matmul_gains"]):
        figures = [device.reason(name) for name, setting in GAINS.items() if told(device.profile.name, setting)]
        return Message("Weights in 8 bits are not known to be faster here. {0}", joined(figures)) if figures else ""
    storage, reason = smallest_storage(device)
    return Message("Set storage to {0}, here or in the loader, to multiply in 8 bits. {1}", storage, reason)
