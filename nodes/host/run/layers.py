"""The layers of a model in memory: which there are, and how each multiplies."""

from collections.abc import Iterator

import torch

from ....precision.dtypes import QUANTIZED_NAMES, name_of
from ....precision.formats.encoding import STORAGE_OF
from ....precision.modes import FP8, FP32, INT8
from .compute import compute_of
from .modules import is_quantized, modules_of


def activation_dtype(patcher) -> torch.dtype:
    """Return the dtype of the model's activations: its manual cast dtype, else that of its weights."""
    return patcher.get_model_object("manual_cast_dtype") or patcher.model.get_dtype()


def compute_name(patcher) -> str:
    """The compute option a model runs with."""
    compute = compute_of(patcher)
    return compute.plan.choice.used if compute else name_of(activation_dtype(patcher))


def settings_of(patcher) -> tuple:
    """What a call's arithmetic depends on beside the weights: the compute plan and the activation dtype."""
    return compute_of(patcher), name_of(activation_dtype(patcher))


def layers_of(patcher) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, module) of every module with a weight."""
    for name, module in modules_of(patcher.model).items():
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            yield name, module


def modes_of(patcher) -> dict[str, str]:
    """Layer name -> the report's mode, from the model's plan and what its calls have shown."""
    compute, activations = compute_of(patcher), name_of(activation_dtype(patcher))
    planned = compute.modes(patcher.model) if compute else {}
    exchanged = {name: mode for name, mode in planned.items() if mode != INT8.name}
    return {
        name: exchanged.get(name) or _own_mode(patcher, name, module, activations, kept=name in planned)
        for name, module in layers_of(patcher)
    }


def _own_mode(patcher, name: str, module: torch.nn.Module, activations: str, kept: bool) -> str:
    """Name the mode of a layer that no plan exchanges. ``kept``: in int8 whatever the model's compute dtype.

    Up to ComfyUI 0.33 an int8 weight whose dtype is the activation dtype is not dequantized where fp8 ones are.
    """
    if is_called_in_fp32(patcher.model.diffusion_model, name):
        return FP32.name
    storage = STORAGE_OF.get(getattr(module, "quant_format", ""), "")
    if storage not in QUANTIZED_NAMES or not is_quantized(module) or module.weight_function:
        return activations
    quantized = kept or not getattr(module, "comfy_force_cast_weights", False)
    quantized = quantized and not patcher.get_model_object(f"diffusion_model.{name}._full_precision_mm")
    if storage == INT8.name:
        return INT8.name if quantized or name_of(module.weight.dtype) == activations else activations
    return FP8.name if quantized else activations


def is_called_in_fp32(model: torch.nn.Module, name: str) -> bool:
    """Tell whether model code casts a layer's input to fp32 itself, as ``patch_embedding(x.float())`` of every Wan in
    ``comfy/ldm/wan`` does (ComfyUI 0.29 to 0.38); the layer then casts its weight to that."""
    return type(model).__module__.startswith("comfy.ldm.wan.") and "patch_embedding" in name.rpartition(".")[2]
