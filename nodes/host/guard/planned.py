"""Put a compute plan on a clone of a model, whoever loaded it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from comfy.model_patcher import ModelPatcher
from comfy.sd import CLIP, VAE

from ....precision.base.dtypes import dtype_named, name_of
from ....precision.base.message import Message
from ....precision.base.options import ComputeOption, Goal
from ....precision.plan.compute import ComputePlan, plan_compute
from ....precision.plan.facts import ModelFacts
from ....precision.plan.goal import SUMS, plan_for_goal
from ....precision.plan.rules import Rules
from ..accumulation.executor import with_accumulation
from ..comfyui.layers import activation_dtype, layers_of
from ..comfyui.model_facts import model_facts, storages
from ..comfyui.weights import only_multiplies
from ..compute.executor import compute_of, set_compute
from ..load.devices import current_device
from ..load.encoders import vae_in
from ..lora.patcher import keep_low_rank_unmerged
from .encoders import MISSING, is_missing, unguarded
from .model import look_at_results


def with_compute(patcher: ModelPatcher, compute: ComputeOption, rules: Rules) -> ModelPatcher:
    """Return a clone of the model with a compute plan for ``compute`` and ``rules``."""
    facts = model_facts(patcher)
    plan = plan_compute(facts, current_device(), compute, rules, storages(patcher))
    plan = _on_loaded(patcher, plan, facts, rules)
    return _planned(patcher, plan if compute == "auto" else replace(plan, instead=""))


def with_goal(
    patcher: ModelPatcher, goal: Goal, clip: CLIP | None, vae: VAE | None, rules: Rules, connected: Collection[str] = ()
) -> tuple[ModelPatcher, VAE | None, str]:
    """Return (model, VAE, reasons) for a goal of the node *Halfsafe*. ``connected``: which of "clip" and "vae" have a
    link."""
    device, facts = current_device(), model_facts(patcher)
    found, reason = plan_for_goal(facts, device, goal, storages(patcher), rules)
    plan = _on_loaded(patcher, found, facts, rules)
    model = _planned(patcher, plan)
    lines = [f"{device.label}, goal {goal}", f"model: {_runs_in(model, plan, reason)}"]
    lines += [Message("without effect: {0}: {1}", idle.setting, idle.reason) for idle in plan.without_effect]
    if not is_missing(clip):
        lines.append("text encoder: unchanged; ComfyUI runs it with fp32 activations, once per prompt")
    elif "clip" in connected:
        lines.append(Message("text encoder: {0}", Message(MISSING, "text encoder")))
    if is_missing(vae):
        lines += [f"VAE: {Message(MISSING, 'VAE')}"] if "vae" in connected else []
    elif goal == "quality":
        vae = vae_in(unguarded(vae), torch.float32)
        lines.append("VAE: fp32")
    else:
        lines.append(f"VAE: unchanged, {str(vae.vae_dtype).removeprefix('torch.')}")
    if goal in SUMS:
        model = with_accumulation(model, SUMS[goal][0])
        lines.append(Message("sums: {0}; the report lists which took effect", SUMS[goal][1]))
    return model, vae, "\n".join(lines)


def _runs_in(model: ModelPatcher, plan: ComputePlan, reason: str) -> str:
    """Return the dtype that a planned model runs in and the reason: the plan's, or that of its fallback in use."""
    acting = compute_of(model)
    if acting is None or acting.plan is plan:
        return Message("{0}. {1} {2}", plan.choice.used, reason, plan.instead)
    return Message("{0}. {1}", acting.plan.choice.used, acting.plan.choice.reason)


def _on_loaded(patcher: ModelPatcher, plan: ComputePlan, facts: ModelFacts, rules: Rules) -> ComputePlan:
    foreign = {name: type(module).__module__ for name, module in layers_of(patcher) if not only_multiplies(module)}
    return plan.on_loaded(facts, rules, foreign, storages(patcher), name_of(activation_dtype(patcher)))


def _planned(patcher: ModelPatcher, plan: ComputePlan) -> ModelPatcher:
    clone, activations = patcher.clone(), dtype_named(plan.activation_dtype)
    if activation_dtype(patcher) != activations:
        clone.set_model_compute_dtype(activations)
    set_compute(clone, plan)
    look_at_results(clone)
    keep_low_rank_unmerged(clone)
    return clone
