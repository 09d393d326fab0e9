"""The arithmetic of a loaded model, whoever loaded it: from a compute option, or from a goal of the
node *Halfsafe*, which also sets accumulation."""

from collections.abc import Mapping
from dataclasses import replace

from ..base.dtypes import FP8_NAMES
from ..base.message import Message, joined
from ..base.modes import FP16, FP32
from ..base.options import ComputeOption, Goal
from ..devices.detect import Device
from ..devices.measurements import told
from ..devices.profiles import GAINS
from ..formats.layer_plan import AS_FILE
from .accumulation import Request
from .auto import UNQUANTIZED, smallest_storage
from .choice import WithoutEffect, frozen
from .compute import MODE_OF, SAFE, WEIGHTS_FOR, ComputePlan, plan_compute
from .facts import ModelFacts
from .rules import Rules

NO_RULES = Rules()
OWN_MATMUL = "{0} has its own matmul: runs in fp32"
OWN_MATMULS = "{0} layers ({1} ...) belong to another loader, which has its own matmul: they run in fp32"
STORAGE_RULE = "the model is already loaded: connect rules on storage to a loader or to Save Model"
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


def on_loaded(
    plan: ComputePlan, facts: ModelFacts, rules: Rules, foreign: Mapping[str, str], held: Mapping[str, str],
    came_in: str = "",
) -> ComputePlan:  # fmt: skip
    """Return a plan for a model in memory, with a list of the rules too late for a loaded model.

    ``foreign``: layer name -> the Python module of its class, for layers of another loader: fp32,
    not ``fp16_safe``. ``held``: layer name -> storage name. ``came_in``: the dtype that the model
    computes in without the plan."""
    fallback = plan.fallback and on_loaded(plan.fallback, facts, rules, foreign, held, came_in)
    asked = ((layer, rules.on(facts.layers).setting("storage", layer.name, layer.cls)) for layer in facts.layers)
    unmet = [found[1] for layer, found in asked if found and found[0] not in (held.get(layer.name), AS_FILE)]
    late = (WithoutEffect(str(rule), STORAGE_RULE) for rule in rules.own if rule in unmet)
    idle = [*plan.without_effect, *rules.without_effect(facts.layers), *late]
    moved = {
        name: replace(decision, mode=FP32.name, sums="", reason=Message(OWN_MATMUL, foreign[name]))
        for name, decision in plan.decisions.items()
        if name in foreign and decision.mode == MODE_OF[SAFE]
    }
    if moved:
        why = Message(OWN_MATMULS, len(moved), next(iter(moved)))
        idle.append(WithoutEffect(f"compute={SAFE}", why))
    decisions = frozen({**plan.decisions, **moved})
    leaves_fp16 = came_in == FP16.name and plan.choice.used != FP16.compute
    instead = _instead_of_fp16(plan.choice.used, facts) if leaves_fp16 else ""
    return replace(plan, decisions=decisions, without_effect=tuple(idle), fallback=fallback, instead=instead)


def _instead_of_fp16(used: str, facts: ModelFacts) -> str:
    why = "ComfyUI does not list fp16 for this model: its activations may overflow, which gives black pictures."
    if FP16.name in facts.supported:
        why = "Above 65504 fp16 overflows, which gives black pictures."
    return joined([Message("Computed in {0}, not in the fp16 that the model was set to.", used), why])
