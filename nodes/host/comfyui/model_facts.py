"""What a plan needs to know of a model in memory: its layers, its weights and what they are stored
in."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Container
from functools import cache
from typing import Any

import comfy.quant_ops
import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.dtypes import name_of
from ....precision.formats.registry import FORMAT_OF_STORAGE, FORMATS, Format, format_of
from ....precision.plan.choice import ATTACHMENT
from ....precision.plan.facts import LayerSpec, ModelFacts, most
from ....precision.plan.load import ModelPlan
from .attributes import FILE_ASKS_FULL_PRECISION, quantization_format
from .layers import layers_of

PACKED = "packed"
"""The storage of weights that another loader keeps as bytes in a format of its own."""


def model_facts(patcher: ModelPatcher) -> ModelFacts:
    """Collect what a compute plan needs to know of a model in memory."""
    layers = tuple(
        LayerSpec(name, type(module).__name__, tuple(module.weight.shape)) for name, module in layers_of(patcher)
    )
    supported = tuple(name_of(dtype) for dtype in patcher.model.model_config.supported_inference_dtypes)
    held = most(bytes_by_storage(patcher))
    return ModelFacts(layers, parameter_count(patcher), held, supported, _native_fp8(patcher))


def record_of(patcher: ModelPatcher) -> ModelPlan | None:
    """Return the record of the load of a patcher's weights; None where another loader loaded
    them."""
    return patcher.attachments.get(ATTACHMENT)


def keep_record(patcher: ModelPatcher, record: ModelPlan) -> None:
    """Keep the record of the load of a patcher's weights, for its clones too."""
    patcher.set_attachments(ATTACHMENT, record)


def _native_fp8(patcher: ModelPatcher) -> Container[str]:
    """Return the layers whose weights ComfyUI multiplies in fp8, by the file that this package
    loaded, or by itself."""
    if record := record_of(patcher):
        return record.native_fp8
    layers = ((name, module) for name, module in layers_of(patcher) if quantization_format(module).startswith("float8"))
    return frozenset(name for name, module in layers if not getattr(module, FILE_ASKS_FULL_PRECISION, False))


def storages(patcher: ModelPatcher) -> dict[str, str]:
    """Return the storage of each layer's weight by layer name, without bytes in a custom format of
    another loader."""
    weights = {name: module.weight for name, module in layers_of(patcher)}
    return {name: storage_of(weight) for name, weight in weights.items() if _is_known(weight)}


def foreign_layers(patcher: ModelPatcher) -> dict[str, str]:
    """Return the class of each layer's weight, by layer name, that another loader keeps in a format
    of its own."""
    weights = {name: module.weight for name, module in layers_of(patcher)}
    return {name: type(weight).__name__ for name, weight in weights.items() if not _is_known(weight)}


def _is_known(weight: torch.Tensor) -> bool:
    return isinstance(weight, comfy.quant_ops.QuantizedTensor) or weight.is_floating_point()


def storage_of(tensor: torch.Tensor) -> str:
    """Name the storage of a weight, quantized or not."""
    if not _is_known(tensor):
        # ComfyUI-GGUF's GGMLTensor (its ops.py) has GGML's type, an enum of the package gguf.
        kind = getattr(tensor, "tensor_type", None)
        return PACKED if kind is None else f"gguf {kind.name}"
    if not isinstance(tensor, comfy.quant_ops.QuantizedTensor):
        return name_of(tensor.dtype)
    name = _name_of_layout(tensor.layout_cls)
    return format_of(name, tensor.nbytes, tensor.numel()).storage if name in FORMATS else name


@cache
def _name_of_layout(layout: type) -> str:
    return next((name for name in comfy.quant_ops.QUANT_ALGOS if _layout(name) is layout), "quantized")


def held_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a weight in memory, of a quantized one with its scales."""
    if not isinstance(tensor, comfy.quant_ops.QuantizedTensor):
        return tensor.nbytes
    return sum(map(operator.attrgetter("nbytes"), tensor.state_dict().values()))


def held_storages() -> frozenset[str]:
    """Return the quantized storages of this ComfyUI, by their names in options."""
    return frozenset(format.storage for format in FORMAT_OF_STORAGE.values() if _holds(format))


def _holds(format: Format) -> bool:
    if format.name not in comfy.quant_ops.QUANT_ALGOS:
        return False
    return not format.asks or format.asks in inspect.signature(_layout(format.name).quantize).parameters


def _layout(name: str) -> Any:
    return comfy.quant_ops.get_layout_class(comfy.quant_ops.QUANT_ALGOS[name]["comfy_tensor_layout"])


def parameter_count(patcher: ModelPatcher) -> int:
    """Count the parameters of a model."""
    return sum(parameter.numel() for parameter in patcher.model.diffusion_model.parameters())


def bytes_by_storage(patcher: ModelPatcher) -> dict[str, int]:
    """Count the bytes of a model's weights in each storage, as loaded."""
    sizes: dict[str, int] = {}
    for parameter in patcher.model.diffusion_model.parameters():
        storage = storage_of(parameter)
        sizes[storage] = sizes.get(storage, 0) + parameter.nbytes  # of a quantized one without its scales
    return sizes
