"""What loading a file would come to on a device, without loading it: the command ``plan``."""

import os
from dataclasses import replace
from pathlib import Path

from ..devices.detect import Device
from ..files.safetensors_file import open_checkpoint
from ..formats.checkpoint import Checkpoint, dialect_text, read_checkpoint
from ..formats.comfy_state import model_prefix, model_shapes, refuse_lora
from ..formats.families import family_of, model_name
from ..formats.registry import FORMATS
from ..plan.facts import ModelFacts, facts_of, layer_specs, packed_types
from ..plan.goal import plan_for_goal, storage_for_goal
from ..plan.rules import rules_from
from ..plan.storage import LoadPlan, plan_load
from ..plan.weights import plan_model, unpacked_dtype
from ..report.schema import KeptHigh, LayerReport, ModelReport, Report, WithoutEffect, device_section


def plan_file(
    path: str | os.PathLike, device: Device, goal: str = "balanced", device_memory: int | None = None
) -> Report:
    """Plan a file for a device, and return the report the loaded model would give, each layer with its reason.

    Args:
        goal: as in Auto Precision; ``memory`` and ``speed`` also choose the storage that serves them.
        device_memory: bytes free on the device; None leaves it out of the decision.

    Raises:
        CheckpointError: the file cannot be read.
    """
    file = open_checkpoint(path)
    checkpoint = read_checkpoint(file, file.metadata, path)
    refuse_lora(checkpoint)
    prefix = model_prefix(checkpoint)
    family = family_of(model_shapes(checkpoint))
    facts = facts_of(checkpoint, prefix, layer_specs(checkpoint, prefix), family.supported)
    storage, why = storage_for_goal(device, goal, frozenset({facts.file_dtype}))
    plan = plan_load(facts, device, storage, "auto", rules_from(), device_memory)
    storages = {name: _storage_in(plan, checkpoint, prefix, name) for name in plan.decisions}
    found = plan_for_goal(facts, device, goal, storages)
    plan = replace(plan, compute=found.compute, storage=replace(plan.storage, reason=plan.storage.reason or why))
    return _report(checkpoint, prefix, facts, device, plan, storages, found.reason)


def _storage_in(plan: LoadPlan, checkpoint: Checkpoint, prefix: str, layer: str) -> str:
    storage = plan.decisions[layer].storage
    weight = checkpoint.weights[f"{prefix}{layer}.weight"]
    if storage == "as_file" and weight.packed is not None:
        return unpacked_dtype(plan)
    return weight.storage if storage == "as_file" else storage


def _report(
    checkpoint: Checkpoint,
    prefix: str,
    facts: ModelFacts,
    device: Device,
    plan: LoadPlan,
    storages: dict[str, str],
    reason: str,
) -> Report:
    layers = {f"{prefix}{layer.name}.weight": layer.name for layer in facts.layers}
    size = plan_model(checkpoint, plan, layers, prefix, FORMATS, read=False).bytes
    report = Report(device_section(device), ModelReport(model_name(model_shapes(checkpoint)), facts.parameters, size))
    types = packed_types(checkpoint, layers)
    report.layers = [
        _layer(layer.name, layer.cls, storages[layer.name], plan, types.get(layer.name, "")) for layer in facts.layers
    ]
    report.kept_high = [KeptHigh(name, decision.reason) for name, decision in plan.decisions.items() if decision.kept]
    problems = [*plan.without_effect, *plan.compute.without_effect]
    report.without_effect = [WithoutEffect(setting, why) for setting, why in problems]
    report.decisions = {
        "file": f"{Path(checkpoint.path).name}, {dialect_text(checkpoint.dialects)}",
        "storage": str(plan.storage),
        "compute": f"{plan.compute.choice.used}: {reason}",
    }
    report.notes = [*checkpoint.notes, *plan.compute.notes]
    return report


def _layer(name: str, cls: str, storage: str, plan: LoadPlan, source: str) -> LayerReport:
    decision = plan.compute.decisions.get(name)
    stream = plan.compute.activation_dtype
    reasons = [source, plan.decisions[name].reason, decision.reason if decision else ""]
    reason = "; ".join(dict.fromkeys(filter(None, reasons)))
    return LayerReport(name, cls, storage, decision.mode if decision else stream, "fp32", stream, reason)
