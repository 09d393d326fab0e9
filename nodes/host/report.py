"""Read what a loaded model really is: the dtype of each weight it holds and how each layer runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...precision.devices.detect import why_int8_is_slow
from ...precision.dtypes import name_of
from ...precision.formats.checkpoint import dialect_text
from ...precision.guard.verdicts import CURED
from ...precision.modes import FP16_ACC16, FP32, INT8
from ...precision.plan.accumulation import EXACT_SUMS
from ...precision.plan.choice import ATTACHMENT, LoadRecord
from ...precision.report.report_rules import CALLED_IN_FP32
from ...precision.report.schema import (
    ControlReport,
    EncoderReport,
    KeptHigh,
    LayerReport,
    ModelReport,
    Report,
    WithoutEffect,
    device_section,
)
from .facts.kernels import DEQUANTIZED
from .facts.layers import activation_dtype, layers_of
from .facts.model_facts import bytes_by_storage, parameter_count, storage_of
from .guard.model import Guard, guard_of
from .load.control_runs import LoadedControl, controls_of
from .load.devices import current_device
from .lora.low_rank import LowRankModel
from .lora.patcher import low_rank_reasons
from .page import messages_in, running_prompt, running_prompt_id
from .run.accumulation import flags_of, layer_accumulation, remarks_of
from .run.compute import Compute, compute_of
from .run.layer_modes import is_called_in_fp32, kernels_of, observed_modes_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

PATCHED_BY = (
    "A model patch ({}) runs inside of this model's calls: they are checked and repeated with it, its own layers are in no plan."
)
LISTED = 3
ENCODER_GUARDS = {"HalfsafeGuardVAE": "VAE", "HalfsafeGuardCLIP": "text encoder"}


def report_of(patcher: ModelPatcher) -> Report:
    """Report on a model, from its modules and from what its plan found in the calls made so far."""
    record, compute, layers = patcher.attachments.get(ATTACHMENT), compute_of(patcher), _layers(patcher)
    _add_patches(layers, low_rank_reasons(patcher))
    sizes = bytes_by_storage(patcher)
    model = ModelReport(type(patcher.model).__name__, parameter_count(patcher), sum(sizes.values()), sizes)
    report = Report(device_section(current_device()), model, layers, flags_of(patcher))
    if guard := guard_of(patcher):
        report.guard = guard.report(patcher)
        report.ranges = guard.ranges(patcher)
        _escalate(layers, guard.modes(patcher))
        report.notes += guard.remarks(patcher)
    if record:
        _add_record(report, record)
    if compute:
        _add_plan(report, compute, patcher)
        report.ranges |= compute.ranges(patcher)
    else:
        report.decisions["compute"] = f"{name_of(activation_dtype(patcher))}: as its loader chose"
    without_effect, decisions, notes = remarks_of(patcher)
    report.without_effect += [WithoutEffect(*entry) for entry in without_effect]
    report.decisions |= decisions
    report.notes += [*notes, *_int8_notes(layers)]
    report.notes += [PATCHED_BY.format(type(model.model).__name__) for model in patcher.model_patches_models() if not isinstance(model.model, LowRankModel)]
    report.notes += _modes_elsewhere(patcher, {layer.name: layer.mode for layer in layers}, compute, guard)
    report.encoders = encoder_reports()
    report.control_nets = [control_report(control) for control in controls_of(patcher.model)]
    names = {layer.name for layer in layers}
    report.ranges = {name: largest for name, largest in report.ranges.items() if name in names}
    return report


def _modes_elsewhere(patcher: ModelPatcher, here: dict[str, str], *settings: Compute | Guard | None) -> list[str]:
    """Name the layers that run in another mode on other devices (MultiGPU): each finds by its own calls what does not fit fp16."""
    modes: dict[str, dict[str, str]] = {}
    for setting in (setting for setting in settings if setting):
        for device, found in setting.modes_by_device(patcher).items():
            modes[device] = modes.get(device, here) | found
    modes.pop(str(patcher.load_device), None)
    differing = {device: {name: mode for name, mode in found.items() if here.get(name) != mode} for device, found in modes.items()}
    return [f"On {device} {_listed(found)}: each device widens what its own calls need." for device, found in differing.items() if found]


def _listed(modes: dict[str, str]) -> str:
    first = ", ".join(f"{name} runs in {mode}" for name, mode in list(modes.items())[:LISTED])
    return first + (f" and {len(modes) - LISTED} more layers in another mode than here" if len(modes) > LISTED else "")


def _layers(patcher: ModelPatcher) -> list[LayerReport]:
    record, compute, modes = patcher.attachments.get(ATTACHMENT), compute_of(patcher), observed_modes_of(patcher)
    kernels, sums = kernels_of(patcher, modes), layer_accumulation(patcher)
    layers = [_layer_report(patcher, name, module, record, compute, modes, sums) for name, module in layers_of(patcher)]
    for layer in layers:
        layer.kernel = kernels.get(layer.name, "")
    return layers


def _add_record(report: Report | ControlReport, record: LoadRecord) -> None:
    """Add what was decided when the file was loaded."""
    report.kept_high = [KeptHigh(name, reason) for name, reason in record.kept.items()]
    report.without_effect = [WithoutEffect(*entry) for entry in (*record.without_effect, *_unmet(record, report.layers))]
    report.decisions = {"file": f"{Path(record.file).name}, {dialect_text(record.dialects)}", "storage": str(record.storage)}
    report.notes += record.notes


def control_report(control: LoadedControl) -> ControlReport:
    """Report on a ControlNet that was loaded here, and on the calls that were made of it or of its copies."""
    record, planned = control.record, control.planned
    report = ControlReport(Path(record.file).name, control.cls)
    if planned is None:
        _add_record(report, record)
        return report
    patcher, report.calls = planned.current_patcher, planned.calls
    report.cls, report.layers = type(planned.diffusion_model).__name__, _layers(patcher)
    _add_record(report, record)
    _add_plan(report, planned.compute, patcher)
    report.notes += _int8_notes(report.layers)
    return report


def encoder_reports() -> list[EncoderReport]:
    """Report what the Guard VAE and Guard CLIP nodes of the running prompt have sent so far."""
    sent = messages_in(running_prompt_id())
    guards = ((node_id, ENCODER_GUARDS.get(node["class_type"])) for node_id, node in running_prompt().items())
    return [_encoder_report(node_id, kind, [m for m in sent if m["node_id"] == node_id]) for node_id, kind in guards if kind]


def _encoder_report(node_id: str, kind: str, messages: list[dict]) -> EncoderReport:
    """The first verdict that is no recovery stands, else the last one."""
    report = EncoderReport(node_id, kind, messages=[message["message"] for message in messages])
    for message in messages:
        if report.verdict in CURED:
            report.verdict, report.advice = message["verdict"], message["advice"]
    return report


def _int8_notes(layers: list[LayerReport]) -> list[str]:
    why = why_int8_is_slow(current_device())
    return [f"Layers that multiply in int8 gain no speed here: {why}"] if why and any(layer.mode == INT8.name for layer in layers) else []


def _add_plan(report: Report | ControlReport, compute: Compute, patcher: ModelPatcher) -> None:
    report.without_effect += [WithoutEffect(*entry) for entry in compute.plan.without_effect]
    report.decisions["compute"] = str(compute.plan.choice)
    if share := compute.fp16_share_text(patcher):
        report.decisions["work"] = share
    report.notes += compute.plan.notes


def _add_patches(layers: list[LayerReport], reasons: dict[str, str]) -> None:
    """Say of each layer what was done with its LoRAs."""
    for layer in layers:
        layer.reason = "; ".join(filter(None, [layer.reason, reasons.get(layer.name)]))


def _escalate(layers: list[LayerReport], modes: dict[str, str]) -> None:
    """Set the modes that the guard runs layers in now."""
    for layer in layers:
        if layer.name in modes:
            layer.mode, layer.accumulation, layer.stream = modes[layer.name], "fp32", "fp32"
            stays_int8 = layer.mode == INT8.name
            reasons = [reason for reason in layer.reason.split("; ") if stays_int8 or reason != EXACT_SUMS]
            layer.reason = "; ".join(filter(None, [*reasons, "widened by the guard"]))
            layer.kernel = layer.kernel if stays_int8 else layer.kernel and DEQUANTIZED


def _layer_report(patcher, name: str, module, record, compute, modes: dict[str, str], sums: dict) -> LayerReport:
    stream, mode = name_of(activation_dtype(patcher)), modes[name]
    decision = compute.plan.decisions.get(name) if compute else None
    accumulation, why = sums.get(name, ("fp32", ""))
    reasons = [record.reasons.get(name, "") if record else "", decision.reason if decision else "", why]
    if decision is None and mode == FP32.name and is_called_in_fp32(patcher.model.diffusion_model, name):
        reasons.append(CALLED_IN_FP32)
    if decision and decision.stream == "fp32":
        stream = "fp32"
    reason = "; ".join(dict.fromkeys(filter(None, reasons)))
    mode = FP16_ACC16.name if accumulation == "fp16" else mode
    return LayerReport(name, type(module).__name__, storage_of(module.weight), mode, accumulation, stream, reason)


def _unmet(record: LoadRecord, layers: list[LayerReport]) -> Iterator[tuple[str, str]]:
    """Yield the storages that rules asked for and that ComfyUI did not keep."""
    unmet: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        asked = record.asked.get(layer.name, layer.storage)
        if asked != layer.storage:
            unmet.setdefault((asked, layer.storage), []).append(layer.name)
    for (asked, held), names in unmet.items():
        why = f"{len(names)} layers ({names[0]} ...) are in {held}: ComfyUI holds what is not quantized in one dtype"
        yield f"storage={asked}", why
