"""What a loaded model really is: the dtype of each weight it holds and how each layer will run."""

from collections.abc import Iterator

import comfy.quant_ops
import torch

from ...precision.dtypes import name_of
from ...precision.record import LoadRecord
from ...precision.report import KeptHigh, LayerReport, ModelReport, Report, WithoutEffect, device_section, flag_reports
from .devices import current_device
from .models import ATTACHMENT

_FP8_FORMATS = {"float8_e4m3fn": "fp8_e4m3fn", "float8_e5m2": "fp8_e5m2"}


def load_record(patcher) -> LoadRecord | None:
    """What Halfsafe decided when it loaded this model; None where another loader did."""
    return patcher.attachments.get(ATTACHMENT)


def report_of(patcher) -> Report:
    """The report of a model, read from its modules."""
    record = load_record(patcher)
    layers = [_layer_report(patcher, name, module, record) for name, module in _layers(patcher)]
    report = Report(device_section(current_device()), _model_report(patcher), layers, flag_reports())
    if record:
        report.kept_high = [KeptHigh(name, reason) for name, reason in record.kept.items()]
        report.without_effect = [WithoutEffect(*entry) for entry in (*record.without_effect, *_unmet(record, layers))]
    return report


def compute_dtype(patcher) -> torch.dtype:
    """The dtype the model's activations have: its manual cast dtype, else that of its weights."""
    return patcher.get_model_object("manual_cast_dtype") or patcher.model.get_dtype()


def _layers(patcher) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in patcher.model.diffusion_model.named_modules():
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            yield name, module


def _layer_report(patcher, name: str, module: torch.nn.Module, record: LoadRecord | None) -> LayerReport:
    compute = name_of(compute_dtype(patcher))
    mode = "fp8" if _multiplies_in_fp8(patcher, name, module) else compute
    reason = record.reasons.get(name, "") if record else ""
    return LayerReport(name, type(module).__name__, storage_of(module.weight), mode, _accumulation(mode), compute, reason)


def _multiplies_in_fp8(patcher, name: str, module: torch.nn.Module) -> bool:
    if getattr(module, "quant_format", None) not in _FP8_FORMATS or getattr(module, "comfy_force_cast_weights", False):
        return False
    return not patcher.get_model_object(f"diffusion_model.{name}._full_precision_mm")


def _accumulation(mode: str) -> str:
    switched = getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
    return "fp16" if mode == "fp16" and switched and torch.cuda.is_available() else "fp32"


def storage_of(tensor: torch.Tensor) -> str:
    """The storage name of a weight, quantized or not; the format's own name where it is no fp8."""
    if isinstance(tensor, comfy.quant_ops.QuantizedTensor):
        return name_of(tensor._qdata.dtype) if tensor._qdata.is_floating_point() else tensor._layout_cls
    return name_of(tensor.dtype)


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
