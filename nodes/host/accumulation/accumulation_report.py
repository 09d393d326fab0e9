"""How the report words accumulation: sums of each layer and why, torch's flags, settings without
effect."""

import torch

from ....precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION, Fp16Sums
from ....precision.base import flags
from ....precision.base.message import Message, joined
from ....precision.base.modes import FP8, INT8
from ....precision.base.text import listed
from ....precision.formats.fp8 import Refused
from ....precision.plan.accumulation import (
    EXACT_SUMS,
    NO_SWITCH,
    PARTS,
    AccumulationPlan,
    Request,
    flag_report,
)
from ....precision.plan.choice import WithoutEffect
from ....precision.report.schema import Sums
from ..comfyui.execution import switches_by_layer
from ..comfyui.layers import modules_of
from ..compute.executor import compute_of
from ..compute.layer_modes import states_of
from ..compute.planned_model import fp32_sums_of
from .executor import Accumulation, AccumulationRun, asked_by_rule, multiplies_in_fp16

HELD_OFF = "Kept off while this model runs: its fp16 products return fp32, which fp16 sums cannot produce."
NO_FP8_OF_OURS = "ComfyUI runs these fp8 products itself: set compute=fp8 in Compute Dtype (Halfsafe)"
AS_ASKED = "fp16 sums as requested, without a check of the result"
CHECKED = "fp16 sums: the call is repeated if they overflow"
OVERFLOWED = "fp32 sums: by fp16 sums the result was Inf or NaN"
NOT_TRIED = "fp32 sums until a call has tried fp16 sums"


def _described(operation: Fp16Sums) -> tuple[Sums, str]:
    """Return (accumulation, reason) of a layer."""
    if operation.weights is None:
        why = Message("{0} has its own matmul", type(operation.module).__name__)
        return "fp32", Message("fp32 sums: {0}", why)
    if operation.in_fp16:
        return "fp16", CHECKED
    return "fp32", OVERFLOWED if operation.overflowed else NOT_TRIED


def _sums_of(run: AccumulationRun) -> dict[str, tuple[Sums, str]]:
    """Return layer -> (accumulation, reason) of a run's fp16 layers."""
    return {name: _described(operation) for name, operation in run.operations.items()}


def _state_text(run: AccumulationRun) -> str:
    """Return in one line how many layers accumulate in fp16, of those that met fp16 inputs or whose
    weight is out of reach; empty before the first call."""
    if run.calibration.calibrating:
        return ""
    used = [operation for operation in run.operations.values() if operation.ran or not operation.weights]
    in_fp16 = sum(operation.in_fp16 for operation in used)
    share = Message("{0} of {1} fp16 layers sum in fp16", in_fp16, len(used))
    return joined([share, Message("{0} calls were repeated.", run.calibration.repeats)], "; ")


def _inert_rules(patcher) -> list[WithoutEffect]:
    """Return the rules on accumulation of a model whose layers cannot differ in it."""
    asked = {} if switches_by_layer(patcher) else asked_by_rule(patcher)
    layers = {sums: [name for name in asked if asked[name] == sums] for sums in asked.values()}
    return [WithoutEffect(f"accumulation={sums}", f"{NO_SWITCH}: {listed(names)}") for sums, names in layers.items()]


def layer_accumulation(patcher) -> dict[str, tuple[Sums, str]]:
    """Return layer -> (accumulation, reason) of the layers whose products can sum in anything but
    fp32, and of int8 layers: exact int32 sums, scaled in fp32, are listed as fp32."""
    return _planned_accumulation(patcher) | _sums_by_rule(patcher)


def _sums_by_rule(patcher) -> dict[str, tuple[Sums, str]]:
    """Return layer -> (accumulation, reason) of the layers that a rule of the compute plan
    decides."""
    asked = asked_by_rule(patcher) if switches_by_layer(patcher) else {}
    return {name: (sums, Message("{0} sums by rule", sums)) for name, sums in asked.items()}


def _planned_accumulation(patcher) -> dict[str, tuple[Sums, str]]:
    accumulation, modules = Accumulation.on(patcher), modules_of(patcher.model)
    states = states_of(patcher)
    run = accumulation.runs.last_of(patcher) if accumulation else None
    plan = accumulation.plan_for(patcher) if accumulation else AccumulationPlan(Request())
    in_int8 = (name for name, state in states.items() if state.planned == INT8.name)
    sums: dict[str, tuple[Sums, str]] = dict.fromkeys(in_int8, ("fp32", EXACT_SUMS))
    if run and run.operations:
        sums |= _sums_of(run)
    elif plan.flags.get(FP16_ACCUMULATION) or _is_fp16_by_default(patcher, plan):
        half = (name for name, state in states.items() if multiplies_in_fp16(modules[name], state))
        sums |= dict.fromkeys(half, ("fp16", AS_ASKED if plan.flags else ""))
    refused = run.refused_fp8 if run else {}
    return sums | {name: _fp8_fast(modules[name], refused) for name in _fp8_layers(patcher) if plan.fp8_fast}


def _fp8_layers(patcher) -> list[str]:
    """Name the layers whose fp8 products are ours, as a compute plan asks for."""
    decisions = compute.plan.decisions if (compute := compute_of(patcher)) else {}
    return [name for name, state in states_of(patcher).items() if state.planned == FP8.name and name in decisions]


def _fp8_fast(module: torch.nn.Module, refused: Refused) -> tuple[Sums, str]:
    problem = refused.get(tuple(module.weight.shape))
    return ("fp32", Message("torch refuses fast accumulation here: {0}", problem)) if problem else ("fp8_fast", "")


def _is_fp16_by_default(patcher, plan: AccumulationPlan) -> bool:
    """True if ComfyUI was started with fp16 accumulation and nothing of ours holds it off."""
    if FP16_ACCUMULATION in plan.flags or torch.version.hip or _held_off(patcher):
        return False
    return torch.cuda.is_available() and bool(flags.outside(FP16_ACCUMULATION))


def _held_off(patcher) -> bool:
    compute = compute_of(patcher)
    return compute is not None and fp32_sums_of(compute.plan)(patcher)


def flags_of(patcher) -> dict[str, dict]:
    """Make the report's ``flags``: each setting as requested, inside and outside of the model's
    calls."""
    accumulation = Accumulation.on(patcher)
    if accumulation is None:
        found = {setting: flag_report(setting) for setting in PARTS}
        if _held_off(patcher):
            found[FP16_ACCUMULATION] = flag_report(FP16_ACCUMULATION, reason=HELD_OFF, in_scope=False)
        return found
    plan, run = accumulation.plan_for(patcher), accumulation.runs.last_of(patcher)
    inside = {name: plan.flags[parts[0]] for name, parts in PARTS.items() if plan.flags.keys() & set(parts)}
    reasons = dict(plan.reasons)
    if plan.trying:
        sums = _sums_of(run).values() if run else ()
        inside[FP16_ACCUMULATION] = any(accumulates == "fp16" for accumulates, _ in sums)
        reasons[FP16_ACCUMULATION] = (_state_text(run) if run else "") or plan.reasons[FP16_ACCUMULATION]
    if _held_off(patcher):
        inside[FP16_ACCUMULATION] = False
    inside["fp8_fast_accumulation"] = plan.fp8_fast and bool(_fp8_layers(patcher))
    return {name: flag_report(name, getattr(plan.request, name), reasons[name], inside.get(name)) for name in PARTS}


def remarks_of(patcher) -> tuple[list[WithoutEffect], dict[str, str]]:
    """Return the entries of the report for a request: settings without effect, and decisions."""
    accumulation = Accumulation.on(patcher)
    if accumulation is None:
        return _inert_rules(patcher), {}
    plan, run = accumulation.plan_for(patcher), accumulation.runs.last_of(patcher)
    without_effect = [*plan.without_effect, *_inert_rules(patcher)]
    if plan.fp8_fast and not _fp8_layers(patcher):
        without_effect.append(WithoutEffect("fp8_fast_accumulation=on", NO_FP8_OF_OURS))
    summary = run.attention_text() if run else ""
    decisions: dict[str, str] = {"attention": Message("{0}: {1}", plan.request.attention, summary)} if summary else {}
    return without_effect, decisions
