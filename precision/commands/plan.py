"""What loading a file would come to on a device, without loading it: the command ``plan``."""

import os
from dataclasses import replace
from pathlib import Path

from ..base.options import Goal
from ..devices.detect import Device
from ..files.safetensors_file import open_checkpoint
from ..formats.checkpoint import dialect_text, read_checkpoint
from ..formats.families import family_of
from ..formats.registry import FORMAT_OF_STORAGE
from ..plan.facts import LayerSpec, facts_of, layer_specs
from ..plan.goal import plan_for_goal, storage_for_goal
from ..plan.memory import plan_model
from ..plan.rules import rules_from
from ..plan.storage import LoadPlan, plan_load
from ..report.schema import KeptHigh, LayerReport, ModelReport, Report, device_section


def plan_file(
    path: str | os.PathLike, device: Device, goal: Goal = "balanced", device_memory: int | None = None
) -> Report:
    """Plan a file for a device, and return the report the loaded model would give, each layer with its reason.

    Args:
        goal: as in the Halfsafe node; ``memory`` and ``speed`` also choose the storage that serves them.
        device_memory: bytes free on the device; None leaves it out of the decision.

    Raises:
        CheckpointError: the file cannot be read.
    """
    file = open_checkpoint(path)
    checkpoint = read_checkpoint(file, file.metadata, path)
    checkpoint.refuse_lora()
    prefix = checkpoint.prefix
    family = family_of(checkpoint.model_shapes)
    facts = facts_of(checkpoint, prefix, layer_specs(checkpoint, prefix), family.supported)
    storage, why = storage_for_goal(device, goal, frozenset({facts.file_dtype}))
    plan = plan_load(facts, device, storage, "auto", rules_from(), device_memory, fitted=True)
    names = {f"{prefix}{layer.name}.weight": layer.name for layer in facts.layers}
    memory = plan_model(checkpoint, plan, names, prefix, FORMAT_OF_STORAGE, read=False)
    storages = {layer: memory.storage_of(checkpoint.weights[name]) for name, layer in names.items()}
    compute, reason = plan_for_goal(facts, device, goal, storages)
    choice = replace(plan.storage, reason=f"{why} {plan.storage.reason}".strip())
    plan = replace(plan, compute=compute, storage=choice)
    model = ModelReport(family.name, facts.parameters, memory.bytes)
    report = Report(device_section(device), model)
    report.layers = [_layer(layer, storages[layer.name], plan) for layer in facts.layers]
    report.kept_high = [KeptHigh(name, decision.reason) for name, decision in plan.decisions.items() if decision.kept]
    report.without_effect = [*plan.without_effect, *plan.compute.without_effect]
    report.decisions = {
        "file": f"{Path(checkpoint.path).name}, {dialect_text(checkpoint.dialects)}",
        "storage": str(plan.storage),
        "compute": f"{plan.compute.choice.used}: {reason}",
    }
    report.notes = [*checkpoint.notes, *memory.notes, *plan.compute.notes]
    return report


def _layer(layer: LayerSpec, storage: str, plan: LoadPlan) -> LayerReport:
    decision = plan.compute.decisions.get(layer.name)
    stream = plan.compute.activation_dtype
    reasons = [plan.decisions[layer.name].reason, decision.reason if decision else ""]
    reason = "; ".join(dict.fromkeys(filter(None, reasons)))
    return LayerReport(layer.name, layer.cls, storage, decision.mode if decision else stream, "fp32", stream, reason)
