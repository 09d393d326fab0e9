"""Mode in which each layer of a loaded model multiplies, from its plan and its calls."""

import comfy.quant_ops
import torch

from ....precision.base.dtypes import name_of
from ....precision.base.layers import kind_of
from ....precision.base.modes import FP8, FP32, INT8
from ....precision.formats.registry import FORMATS, Format
from ..comfyui.attributes import (
    FULL_PRECISION,
    bias_functions,
    dequantizes_any_format,
    is_forced_to_cast,
    quantization_format,
    weight_functions,
)
from ..comfyui.kernels import DEQUANTIZED, kernel_of_product
from ..comfyui.layers import CAST_TO_FP32, DIFFUSION_MODEL, activation_dtype, is_quantized, layers_of, own_cast
from .bound import FP8_RESULT, has_changed_weight
from .executor import compute_of


def compute_name(patcher) -> str:
    """Return the compute option in use for a model."""
    compute = compute_of(patcher)
    return compute.plan.choice.used if compute else name_of(activation_dtype(patcher))


def stream_dtype(patcher) -> torch.dtype:
    """Return the dtype between a model's layers: fp32 in ``fp16_safe``, whatever dtype the model casts to."""
    compute = compute_of(patcher)
    return torch.float32 if compute and compute.plan.is_safe else activation_dtype(patcher)


def settings_of(patcher) -> tuple:
    """Return the settings that a call's arithmetic depends on besides the weights: compute plan and activation
    dtype."""
    return compute_of(patcher), name_of(activation_dtype(patcher))


def planned_modes_of(patcher) -> dict[str, str]:
    """Return layer -> planned mode; for layers without a decision, the mode ComfyUI runs them in."""
    compute = compute_of(patcher)
    return _modes(patcher, compute.planned_modes(patcher) if compute else {})


def observed_modes_of(patcher) -> dict[str, str]:
    """Return layer -> mode for the report: as observed in calls, or as planned before any call."""
    compute = compute_of(patcher)
    return _modes(patcher, compute.observed_modes(patcher) if compute else {})


def _modes(patcher, decided: dict[str, str]) -> dict[str, str]:
    activations = name_of(stream_dtype(patcher))
    layers = layers_of(patcher)
    return {name: _mode(patcher, name, module, activations, decided.get(name, "")) for name, module in layers}


def _mode(patcher, name: str, module: torch.nn.Module, activations: str, decided: str) -> str:
    if decided == FP8.name and has_changed_weight(module):
        return FP8_RESULT if activations == FP32.name else activations
    if decided and decided != INT8.name:
        return decided
    cast = own_cast(patcher.model.diffusion_model, name)
    given = activations if not cast else FP32.name if cast == CAST_TO_FP32 else name_of(module.weight.dtype)
    row = _format(module)
    if row is None or row.mode is None or not _multiplies_as_stored(patcher, name, module, given, kept=bool(decided)):
        return given
    return row.mode.name


def layer_kernels(patcher, modes: dict[str, str]) -> dict[str, str]:
    """Return quantized layer -> kernel for the report. ``modes``: from :func:`observed_modes_of`."""
    layers = layers_of(patcher)
    return {name: _kernel(patcher, name, layer, modes[name]) for name, layer in layers if is_quantized(layer)}


def _kernel(patcher, name: str, module: torch.nn.Module, mode: str) -> str:
    row = _format(module)
    compute = compute_of(patcher)
    dtype = stream_dtype(patcher)
    if row is not None and row.mode is not None:
        as_stored = mode == row.mode.name
    else:
        exchanged = compute is not None and name in compute.plan.decisions
        as_stored = not exchanged and _multiplies_as_stored(patcher, name, module, name_of(dtype), kept=False)
    return kernel_of_product(row, module.weight.shape, dtype, patcher.load_device) if as_stored else DEQUANTIZED


def _format(module: torch.nn.Module) -> Format | None:
    return FORMATS.get(quantization_format(module)) if is_quantized(module) else None


def _multiplies_as_stored(patcher, name: str, module: torch.nn.Module, activations: str, kept: bool) -> bool:
    """True if ComfyUI's forward multiplies a quantized weight without dequantizing it. ``kept``: in any compute dtype.

    Up to ComfyUI 0.33 a weight whose input is not quantized, such as int8, is multiplied as stored in cases in which
    fp8 weights are dequantized: if its dtype is the activation dtype. Since 0.38, whose layers have
    ``can_use_quantized_matmul``, ``_full_precision_mm`` applies to all formats.
    """
    if kind_of(module) is None or weight_functions(module):
        return False
    forced = not kept and is_forced_to_cast(module)
    full_precision = patcher.get_model_object(f"{DIFFUSION_MODEL}{name}.{FULL_PRECISION}")
    if full_precision and not kept and dequantizes_any_format(module):
        return False
    if not forced and not bias_functions(module) and not full_precision:
        return True
    quantizes_input = comfy.quant_ops.QUANT_ALGOS[quantization_format(module)].get("quantize_input", True)
    return not quantizes_input and name_of(module.weight.dtype) == activations


def is_called_in_fp32(model: torch.nn.Module, name: str) -> bool:
    """True if model code itself casts a layer's input to fp32; the layer then casts its weight to fp32."""
    return own_cast(model, name) == CAST_TO_FP32
