"""The arithmetic of a model that is loaded already, whoever loaded it."""

from collections.abc import Mapping
from dataclasses import replace

from ..devices.detect import Device
from .choice import frozen
from .compute import MODE_OF, SAFE, ComputeDecision, ComputePlan, plan_compute, rules_without_effect
from .facts import ModelFacts
from .rules import Rules

STORAGE_RULE = "the model is loaded already: give rules on storage to a loader or to Save Model"


def plan_loaded(
    facts: ModelFacts,
    device: Device,
    compute: str,
    rules: Rules,
    storages: Mapping[str, str],
    foreign: Mapping[str, str],
) -> ComputePlan:
    """Resolve ``compute`` for a model in memory, and list the rules that cannot act on it.

    Args:
        storages: layer name -> storage name.
        foreign: as for :func:`with_foreign_layers`.
    """
    plan = with_idle_rules(plan_compute(facts, device, compute, rules, storages), facts, rules)
    return with_foreign_layers(plan, foreign)


def with_idle_rules(plan: ComputePlan, facts: ModelFacts, rules: Rules) -> ComputePlan:
    """List the rules that cannot act on a model in memory as such in its plan."""
    late = ((str(rule), STORAGE_RULE) for rule in rules.own if "storage" in dict(rule.settings))
    idle = (*rules_without_effect(facts.layers, rules), *late)
    fallback = plan.fallback and with_idle_rules(plan.fallback, facts, rules)
    return replace(plan, without_effect=(*plan.without_effect, *idle), fallback=fallback)


def with_foreign_layers(plan: ComputePlan, foreign: Mapping[str, str]) -> ComputePlan:
    """Give the layers that another loader's classes multiply by themselves fp32 in place of ``fp16_safe``.

    Args:
        foreign: layer name -> the Python module of its class.
    """
    plan = replace(plan, fallback=plan.fallback and with_foreign_layers(plan.fallback, foreign))
    safe = {name: decision for name, decision in plan.decisions.items() if decision.mode == MODE_OF[SAFE]}
    moved = {
        name: ComputeDecision("fp32", decision.stream, f"{foreign[name]} multiplies in its own way: run in fp32")
        for name, decision in safe.items()
        if name in foreign
    }
    if not moved:
        return plan
    first = next(iter(moved))
    why = f"{len(moved)} layers ({first} ...) belong to another loader, which multiplies in its own way: run in fp32"
    without_effect = (*plan.without_effect, (f"compute={SAFE}", why))
    return replace(plan, decisions=frozen({**plan.decisions, **moved}), without_effect=without_effect)
