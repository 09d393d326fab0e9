"""Read what a loaded model really is: the dtype of each weight it holds and how each layer runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from comfy.model_patcher import ModelPatcher

from ....precision.base.dtypes import name_of
from ....precision.base.message import Message, joined
from ....precision.base.modes import FP8, FP16_ACC16, INT8
from ....precision.formats.checkpoint import dialect_text
from ....precision.plan.auto import missing_kernels, why_int8_is_slow
from ....precision.plan.compute import LEAVES_QUANTIZED, WEIGHTS_FOR
from ....precision.plan.load import ModelPlan
from ....precision.report.schema import (
    ControlReport,
    EncoderReport,
    KeptHigh,
    LayerReport,
    ModelReport,
    Report,
    WithoutEffect,
    device_section,
)
from ..accumulation.accumulation_report import flags_of, layer_accumulation, remarks_of
from ..check.attention import UnaskedChecks
from ..comfyui.attributes import kernel_of_file
from ..comfyui.gate import UNEQUAL, met_in
from ..comfyui.layers import activation_dtype, layers_of, matrix_layers, modules_of
from ..comfyui.model_facts import bytes_by_storage, foreign_layers, parameter_count, record_of, storage_of
from ..comfyui.weights import multiplies_in_fp8
from ..compute.attention import ATTENTIONS, KITCHEN
from ..compute.executor import Compute, compute_of, quantized_attention
from ..compute.layer_modes import states_of
from ..guard.model import Guard
from ..load.controlnet import LoadedControl
from ..load.devices import current_device
from ..lora.low_rank import LowRankModel
from ..lora.patcher import low_rank_reasons

PATCHED_BY = (
    "A model patch ({0}) runs inside this model's calls. It is checked and repeated with them, but its own layers are "
    "in no compute plan."
)
MULTIPLIED_IN_FP8 = (
    "ComfyUI multiplies {0} layers in fp8 itself, with inputs clamped to 448, because the model was loaded with "
    "fp8_e4m3fn_fast or --fast fp8_matrix_mult. Choose another weight_dtype in its loader."
)
PACKED = "{0} layers are packed in another loader's format ({1}); Save Model cannot read them."
OF_FILE = "attention of the file"
KERNEL_RUNS = "{0} in {1} attentions"
KERNEL_REPLACED = "the file requests {0} in {1} attentions; this compute dtype runs ComfyUI's own instead"
NO_KERNEL = "the file requests {0} in {1} attentions, which this device does not support: ComfyUI's own runs instead"
QUANTIZES = (
    "{0} attention is chosen for this model; attention that Halfsafe runs in fp32 does not use it. Its operands are "
    "quantized: its errors are finite. A guard compares it with fp32 on AMD and above 100,000 tokens."
)
MASKED = (
    "With a mask of more than 64 tokens it gave broken pictures (comfy-kitchen up to 0.2.36, "
    "Comfy-Org/comfy-kitchen#226)."
)
COMPARE = "To compare a step with fp32, set check to first step in NaN Guard or Halfsafe."
Reasons = dict[str, list[str]]
"""Layer name -> why it is as it is, a text each; they are joined when the report is made."""


def report_of(patcher: ModelPatcher, encoders: Sequence[EncoderReport] = ()) -> Report:
    """Report on a model, from its modules and from what its plan found in the calls made so far.

    ``encoders``: what the guards of VAEs and text encoders have reported in the same prompt.
    """
    record, compute = record_of(patcher), compute_of(patcher)
    layers, reasons = _layers(patcher)
    for name, reason in low_rank_reasons(patcher).items():
        reasons.setdefault(name, []).append(reason)
    sizes = bytes_by_storage(patcher)
    model = ModelReport(type(patcher.model).__name__, parameter_count(patcher), sum(sizes.values()), sizes)
    report = Report(device_section(current_device()), model, layers, flags_of(patcher))
    if guard := Guard.on(patcher):
        report.guard = guard.report(patcher)
        report.ranges = guard.ranges(patcher)
        report.notes += guard.remarks(patcher)
    if record:
        _add_record(report, record)
    if compute:
        _add_plan(report, compute, patcher)
        report.ranges |= compute.ranges(patcher)
        report.attention_in_fp32 = compute.attention_in_fp32(patcher)
    else:
        report.decisions["compute"] = Message("{0}: chosen by its loader", name_of(activation_dtype(patcher)))
    _add_attention(report, patcher, compute)
    without_effect, decisions = remarks_of(patcher)
    report.without_effect += without_effect
    report.decisions |= decisions
    foreign = Counter(foreign_layers(patcher).values())
    packed = (Message(PACKED, count, cls) for cls, count in foreign.items())
    met = met_in(patcher.model).values()
    report.notes += [*UNEQUAL.values(), *met, *_int8_notes(layers), *packed]
    patches = (type(patch.model) for patch in patcher.model_patches_models())
    report.notes += [Message(PATCHED_BY, cls.__name__) for cls in patches if not issubclass(cls, LowRankModel)]
    report.encoders = list(encoders)
    report.control_nets = [control_report(control) for control in LoadedControl.used_with(patcher.model)]
    names = {layer.name for layer in layers}
    report.ranges = {name: largest for name, largest in report.ranges.items() if name in names}
    _write_reasons(layers, reasons)
    return report


def _layers(patcher: ModelPatcher) -> tuple[list[LayerReport], Reasons]:
    """Report on each layer, and list the reasons of its storage, mode and sums; a choice without one gives no text."""
    record, sums, guard = record_of(patcher), layer_accumulation(patcher), Guard.on(patcher)
    states = guard.states_of(patcher) if guard else states_of(patcher)
    layers: list[LayerReport] = []
    reasons: Reasons = {}
    for name, module in layers_of(patcher):
        state = states[name]
        accumulation, why = sums.get(name, ("fp32", ""))
        if state.widened:
            accumulation, why = "fp32", why if state.mode == INT8.name else ""
        layer = LayerReport(
            name,
            type(module).__name__,
            storage_of(module.weight),
            FP16_ACC16.name if accumulation == "fp16" else state.mode,
            accumulation,
            state.stream,
            called_in_fp32=state.called_in_fp32,
            kernel=state.kernel,
        )
        layers.append(layer)
        reasons[name] = [record.reasons.get(name, "") if record else "", *state.why, why]
    return layers, reasons


def _write_reasons(layers: list[LayerReport], reasons: Reasons) -> None:
    for layer in layers:
        layer.reason = joined(dict.fromkeys(reasons[layer.name]), "; ")


def _add_record(report: Report | ControlReport, record: ModelPlan) -> None:
    report.kept_high = [KeptHigh(name, reason) for name, reason in record.kept.items()]
    report.without_effect = [*record.without_effect, *_unmet(record, report.layers)]
    report.file = Path(record.file).name
    report.decisions = {
        "file": Message("{0}, {1}", report.file, dialect_text(record.dialects)),
        "storage": str(record.storage),
    }
    report.notes += [*record.costs, *record.notes]


def control_report(control: LoadedControl) -> ControlReport:
    """Report on a ControlNet of the Load ControlNet node, and on the calls of the ControlNet and its copies."""
    record, planned = control.record, control.planned
    report = ControlReport(Path(record.file).name, control.kind)
    if planned:
        report.calls = planned.calls[0]
        report.layers, reasons = _layers(planned.current_patcher)
        _write_reasons(report.layers, reasons)
    _add_record(report, record)
    if planned:
        _add_plan(report, planned.compute, planned.current_patcher)
        met = met_in(planned.current_patcher.model).values()
        report.notes += [*met, *_int8_notes(report.layers)]
    return report


def _int8_notes(layers: list[LayerReport]) -> list[str]:
    missing, why = missing_kernels(current_device()), why_int8_is_slow(current_device())
    if missing and any(layer.storage in WEIGHTS_FOR[INT8.compute] for layer in layers):
        return [missing]
    if not why or not any(layer.mode == INT8.name for layer in layers):
        return []
    return [Message("Layers that multiply in int8 are not known to be faster here: {0}", why)]


def _add_plan(report: Report | ControlReport, compute: Compute, patcher: ModelPatcher) -> None:
    report.without_effect += [*compute.plan.without_effect, *compute.idle_attention_rules(patcher)]
    ruled, total = Counter(compute.plan.ruled), sum(1 for _ in matrix_layers(patcher.model))
    ruled_in = "{0} in {1} of {2} layers by rules"
    by_rules = [Message(ruled_in, mode, count, total) for mode, count in ruled.most_common()]
    choice = str(compute.plan.choice)
    all_others = Message("all other layers: {0}", choice)
    report.decisions["compute"] = joined([*by_rules, all_others], "; ") if by_rules else choice
    asked, modes = compute.plan.choice.requested, {layer.name: layer.mode for layer in report.layers}
    fast = {name for name, module in matrix_layers(patcher.model) if multiplies_in_fp8(module)} - {
        *compute.plan.decisions
    }
    if asked not in LEAVES_QUANTIZED and (left := sum(modes[name] == FP8.name for name in fast)):
        report.without_effect.append(WithoutEffect(f"compute={asked}", Message(MULTIPLIED_IN_FP8, left)))
    if compute.plan.instead:
        report.decisions["instead"] = compute.plan.instead
    if blocks := compute.attention_in_fp32(patcher):
        report.decisions["attention by rule"] = Message("fp32 in {0}", ", ".join(blocks))
    if share := compute.fp16_share_text(patcher):
        report.decisions["work"] = share
    report.notes += compute.plan.notes


def _add_attention(report: Report, patcher: ModelPatcher, compute: Compute | None) -> None:
    """Report on the attention kernels that the model's file asks for (``ComfyAttention``, since ComfyUI 0.38)."""
    asked = Counter(filter(None, map(kernel_of_file, modules_of(patcher.model).values())))
    for (kernel, is_there), count in asked.items():
        if not is_there:
            report.without_effect.append(WithoutEffect(OF_FILE, Message(NO_KERNEL, kernel, count)))
        elif compute and compute.overrides_attention:
            report.without_effect.append(WithoutEffect(OF_FILE, Message(KERNEL_REPLACED, kernel, count)))
        else:
            report.decisions[OF_FILE] = Message(KERNEL_RUNS, kernel, count)
    if name := quantized_attention(patcher):
        guard, masked = Guard.on(patcher), MASKED if name == ATTENTIONS[KITCHEN] else ""
        compare = COMPARE if guard is None or isinstance(guard.check, UnaskedChecks | None) else ""
        report.notes.append(joined([Message(QUANTIZES, name), masked, compare]))


def _unmet(record: ModelPlan, layers: list[LayerReport]) -> Iterator[WithoutEffect]:
    asked = Counter((record.asked.get(layer.name, layer.storage), layer.storage) for layer in layers)
    for (wanted, held), count in asked.items():
        if wanted != held:
            why = Message("{0} layers are in {1}: ComfyUI keeps unquantized weights in one dtype", count, held)
            yield WithoutEffect(f"storage={wanted}", why)
