"""Put a compute plan on a clone of a model, whoever loaded it."""

import torch

from ...precision.dtypes import dtype_named
from ...precision.plan.accumulation import Request
from ...precision.plan.compute import MODE_OF, SAFE, ComputeDecision, ComputePlan, plan_compute, plan_for_goal
from ...precision.plan.rules import Rules
from ...precision.plan.storage import rules_without_effect
from .guard.encoders import vae_in
from .load.devices import current_device
from .report import model_facts, storages
from .run.accumulation import with_accumulation
from .run.compute import set_compute
from .run.layers import stream_dtype
from .run.modules import modules_of, only_multiplies

SUMS = {
    "quality": Request(fp16_accumulation="off", reduced_precision_reduction="off", tf32="off"),
    "speed": Request(fp16_accumulation="auto", tf32="on"),
}
SUMS_WHY = {
    "quality": "fp32 throughout, no TF32",
    "speed": "fp16 where it is proven not to overflow, TF32 for fp32 products",
}
STORAGE_RULE = "the model is loaded already: give rules on storage to a loader or to Save Model"


def with_compute(patcher, compute: str, rules: Rules):
    """A clone of the model that computes as asked."""
    facts = model_facts(patcher)
    plan = plan_compute(facts, current_device(), compute, rules, storages(patcher))
    plan.without_effect.extend(rules_without_effect(facts.layers, rules))
    plan.without_effect.extend((str(rule), STORAGE_RULE) for rule in rules.own if "storage" in dict(rule.settings))
    return _planned(patcher, plan)


def with_goal(patcher, goal: str, clip, vae):
    """(model, VAE, why) for a goal of Auto Precision."""
    device = current_device()
    plan, reason = plan_for_goal(model_facts(patcher), device, goal, storages(patcher))
    lines = [f"{device.label}, goal {goal}", f"model: {plan.choice.used}. {reason}"]
    lines += [f"without effect: {setting}: {why}" for setting, why in plan.without_effect]
    if clip is not None:
        lines.append("text encoder: unchanged; ComfyUI runs it with fp32 activations, once per prompt")
    if vae is not None and goal == "quality":
        vae = vae_in(vae, torch.float32)
        lines.append("VAE: fp32")
    elif vae is not None:
        lines.append(f"VAE: unchanged, {str(vae.vae_dtype).removeprefix('torch.')}")
    model = _planned(patcher, plan)
    if goal in SUMS:
        model = with_accumulation(model, SUMS[goal])
        lines.append(f"sums: {SUMS_WHY[goal]}; the report tells which could act")
    return model, vae, "\n".join(lines)


def _planned(patcher, plan: ComputePlan):
    clone = patcher.clone()
    _leave_to_their_loader(clone, plan)
    stream = dtype_named(plan.stream_dtype)
    if stream_dtype(patcher) != stream:
        clone.set_model_compute_dtype(stream)
    set_compute(clone, plan)
    return clone


def _leave_to_their_loader(patcher, plan: ComputePlan) -> None:
    """Plan fp32 for layers that another loader's classes multiply in their own way, and say so."""
    modules = modules_of(patcher.model)
    safe = (name for name, decision in plan.decisions.items() if decision.mode == MODE_OF[SAFE])
    foreign = [name for name in safe if not only_multiplies(modules[name])]
    for name in foreign:
        reason = f"{type(modules[name]).__module__} multiplies in its own way: run in fp32"
        plan.decisions[name] = ComputeDecision("fp32", plan.decisions[name].stream, reason)
    if foreign:
        why = f"{len(foreign)} layers ({foreign[0]} ...) belong to another loader, which multiplies in its own way: run in fp32"
        plan.without_effect.append((f"compute={SAFE}", why))
