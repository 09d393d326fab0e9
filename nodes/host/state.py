"""What a loaded model really is: the dtype of each weight it holds and how each layer will run."""

from collections.abc import Iterator

import comfy.quant_ops
import torch

from ...precision.compute_plan import Layer, ModelFacts
from ...precision.dtypes import name_of
from ...precision.record import LoadRecord
from ...precision.report import KeptHigh, LayerReport, ModelReport, Report, WithoutEffect, device_section, flag_reports
from .compute import compute_of
from .devices import current_device
from .models import ATTACHMENT

_FP8_FORMATS = ("float8_e4m3fn", "float8_e5m2")


def load_record(patcher) -> LoadRecord | None:
    """What Halfsafe decided when it loaded this model; None where another loader did."""
    return patcher.attachments.get(ATTACHMENT)


def report_of(patcher) -> Report:
    """The report of a model, read from its modules and from what its plan found in the calls made so far."""
    record, compute = load_record(patcher), compute_of(patcher)
    modes = compute.modes(patcher.model) if compute else {}
    layers = [_layer_report(patcher, name, module, record, compute, modes) for name, module in _layers(patcher)]
    report = Report(device_section(current_device()), _model_report(patcher), layers, flag_reports())
    if record:
        report.kept_high = [KeptHigh(name, reason) for name, reason in record.kept.items()]
        report.without_effect = [WithoutEffect(*entry) for entry in (*record.without_effect, *_unmet(record, layers))]
        report.decisions = {"file": f"{record.file}, {record.dialect}", "storage": str(record.storage)}
        report.notes = list(record.notes)
    if compute:
        report.without_effect += [WithoutEffect(*entry) for entry in compute.plan.without_effect]
        report.decisions["compute"] = str(compute.plan.choice)
        report.decisions |= {"work": work} if (work := compute.work(patcher.model)) else {}
        report.notes += compute.plan.notes
    return report


def stream_dtype(patcher) -> torch.dtype:
    """The dtype the model's activations have: its manual cast dtype, else that of its weights."""
    return patcher.get_model_object("manual_cast_dtype") or patcher.model.get_dtype()


def model_facts(patcher) -> ModelFacts:
    """What a compute plan needs to know of a model in memory."""
    layers = [Layer(name, type(module).__name__, tuple(module.weight.shape)) for name, module in _layers(patcher)]
    sizes = _model_report(patcher)
    largest = max(sizes.bytes_by_storage, key=sizes.bytes_by_storage.__getitem__)
    supported = tuple(name_of(dtype) for dtype in patcher.model.model_config.supported_inference_dtypes)
    return ModelFacts(layers, sizes.parameters, largest, supported)


def storages(patcher) -> dict[str, str]:
    """Layer name -> what its weight is stored in."""
    return {name: storage_of(module.weight) for name, module in _layers(patcher)}


def _layers(patcher) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in patcher.model.diffusion_model.named_modules():
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            yield name, module


def _layer_report(patcher, name: str, module, record, compute, modes: dict[str, str]) -> LayerReport:
    stream = name_of(stream_dtype(patcher))
    mode = modes.get(name) or ("fp8" if _multiplies_in_fp8(patcher, name, module) else stream)
    decision = compute.plan.decisions.get(name) if compute else None
    reasons = [record.reasons.get(name, "") if record else "", decision.reason if decision else ""]
    if decision and decision.stream == "fp32":
        stream = "fp32"
    reason = "; ".join(dict.fromkeys(filter(None, reasons)))
    return LayerReport(name, type(module).__name__, storage_of(module.weight), mode, _accumulation(mode), stream, reason)


def _multiplies_in_fp8(patcher, name: str, module: torch.nn.Module) -> bool:
    if getattr(module, "quant_format", None) not in _FP8_FORMATS or getattr(module, "comfy_force_cast_weights", False):
        return False
    return not patcher.get_model_object(f"diffusion_model.{name}._full_precision_mm")


def _accumulation(mode: str) -> str:
    switched = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return "fp16" if mode == "fp16" and switched and torch.cuda.is_available() else "fp32"


def storage_of(tensor: torch.Tensor) -> str:
    """The storage name of a weight, quantized or not; the format's own name where it is no fp8."""
    if not isinstance(tensor, comfy.quant_ops.QuantizedTensor):
        return name_of(tensor.dtype)
    formats = comfy.quant_ops.QUANT_ALGOS.items()
    held = next((name for name, algorithm in formats if algorithm["comfy_tensor_layout"] == tensor._layout_cls), "quantized")
    return held.replace("float8_", "fp8_")


def _model_report(patcher) -> ModelReport:
    report = ModelReport(cls=type(patcher.model).__name__)
    for parameter in patcher.model.diffusion_model.parameters():
        quantized = isinstance(parameter, comfy.quant_ops.QuantizedTensor)
        size = (parameter._qdata if quantized else parameter).nbytes
        storage = storage_of(parameter)
        report.parameters += parameter.numel()
        report.weight_bytes += size
        report.bytes_by_storage[storage] = report.bytes_by_storage.get(storage, 0) + size
    return report


def _unmet(record: LoadRecord, layers: list[LayerReport]) -> Iterator[tuple[str, str]]:
    """The storages that rules asked for and ComfyUI does not hold."""
    unmet: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        asked = record.asked.get(layer.name, layer.storage)
        if asked != layer.storage:
            unmet.setdefault((asked, layer.storage), []).append(layer.name)
    for (asked, held), names in unmet.items():
        why = f"{len(names)} layers ({names[0]} ...) are in {held}: ComfyUI holds what is not quantized in one dtype"
        yield f"storage={asked}", why
