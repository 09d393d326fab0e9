"""How each layer of a loaded model runs: the one answer to which mode it multiplies in."""

import functools
from typing import NamedTuple

import comfy.quant_ops
import torch

from ....precision.base.dtypes import name_of
from ....precision.base.layers import kind_of
from ....precision.base.modes import FP8, FP32, INT8
from ....precision.formats.layer_plan import LayerPlan
from ....precision.formats.registry import FORMATS
from ..comfyui.attributes import FORCED_TO_CAST, FULL_PRECISION, WEIGHT_FUNCTIONS, quantization_format
from ..comfyui.kernels import DEQUANTIZED, kernel_of_product
from ..comfyui.layers import CAST_TO_FP32, DIFFUSION_MODEL, activation_dtype, is_quantized, layers_of, own_cast
from ..comfyui.weights import multiplies_in_fp8
from ..replay.seen import own_products
from .bound import has_changed_weight
from .core_layers import PlannedLayers
from .executor import compute_of

CALLED_IN_FP32 = "the model's own code casts its input to fp32"
WIDENED = "widened by the guard"
STREAM_WIDENED = "its activations were widened to fp32 by the guard"
_FAST_FP8 = "float8_e4m3fn"
NOT_CALLED = "not called: this layer did not run in the calibrating call, so its mode is planned, not observed"


class LayerState(NamedTuple):
    """How a layer runs.

    Attributes:
        mode: what it multiplies in, as observed in the calls so far; as planned before any call.
        planned: what it is planned to multiply in, the same before and after any call.
        stream: the dtype between the layer and the next.
        kernel: what multiplies a quantized weight (``comfyui/kernels.py``); "" for another weight.
        called_in_fp32: model code casts its input to fp32, and no plan decides about it.
        widened: the guard runs it in more precision than planned.
        why: the reasons for its mode.
    """

    mode: str
    planned: str
    stream: str
    kernel: str = ""
    called_in_fp32: bool = False
    widened: bool = False
    why: tuple[str, ...] = ()

    @property
    def as_stored(self) -> bool:
        """True if the layer multiplies by a quantized weight as it is stored, also in a format
        without a mode, whose ``mode`` is then the dtype of its input."""
        return self.kernel not in ("", DEQUANTIZED)

    def in_fp32_stream(self, mode: str, called: bool) -> "LayerState":
        """Return the state of a layer that the guard runs in ``mode`` between fp32 activations.
        ``called``: it ran in the call that measured it."""
        if (self.mode, self.stream) == (mode, FP32.name):
            return self
        why = STREAM_WIDENED if self.mode == mode else WIDENED
        reasons = (*self.why, why) if called else (*self.why, why, NOT_CALLED)
        kernel = self.kernel if mode == INT8.name else self.kernel and DEQUANTIZED
        return self._replace(mode=mode, stream=FP32.name, kernel=kernel, widened=True, why=reasons)


def compute_name(patcher) -> str:
    """Return the compute option in use for a model."""
    compute = compute_of(patcher)
    return compute.plan.choice.used if compute else name_of(activation_dtype(patcher))


def stream_dtype(patcher) -> torch.dtype:
    """Return the dtype between a model's layers: fp32 in ``fp16_safe``, whatever dtype the model
    casts to."""
    compute = compute_of(patcher)
    return torch.float32 if compute and compute.plan.is_safe else activation_dtype(patcher)


def settings_of(patcher) -> tuple:
    """Return the settings that a call's arithmetic depends on besides the weights: compute plan and
    activation dtype."""
    return compute_of(patcher), name_of(activation_dtype(patcher))


def states_of(patcher) -> dict[str, LayerState]:
    """Return layer -> how it runs, of every layer with a weight."""
    compute, dtype = compute_of(patcher), stream_dtype(patcher)
    decisions = compute.plan.decisions if compute else {}
    standing = compute.standing(patcher) if compute else {}
    idle = compute.not_called(patcher) if compute else frozenset()
    kernel = functools.cache(lambda row, shape: kernel_of_product(row, shape, dtype, patcher.load_device))
    seen = own_products(patcher, compute)
    states = {}
    for name, module in layers_of(patcher):
        decision, forward = decisions.get(name), standing.get(name)
        row = FORMATS.get(quantization_format(module)) if is_quantized(module) else None
        row = FORMATS[_FAST_FP8] if multiplies_in_fp8(module) else row
        of_format = row.mode.name if row and row.mode else ""
        if compute and decision and not (decision.mode == INT8.name and is_quantized(module)):
            product, own = PlannedLayers.products(name, module, compute.plan)
            stored = product == FP8.name and not has_changed_weight(module)
            given = name_of(own) if product in ("", FP8.name) else product
        else:
            given, stored = _by_comfyui(patcher, name, module, name_of(dtype), decision)
        mode = planned = of_format if stored and of_format else given
        if forward and (stored or forward.mode != FP8.name):  # else its weight has changed since it was put on
            mode = forward.mode
            stored = mode == of_format
        elif name in seen:
            operand, stored = seen[name]
            mode = of_format if stored and of_format else operand
        by_code = decision is None and mode == FP32.name
        by_code = by_code and (dtype != torch.float32 or own_cast(patcher.model.diffusion_model, name) == CAST_TO_FP32)
        reasons = NOT_CALLED if name in idle else decision.reason if decision else "", CALLED_IN_FP32 if by_code else ""
        states[name] = LayerState(
            mode,
            planned,
            FP32.name if decision and decision.stream == FP32.name else name_of(dtype),
            kernel(row, module.weight.shape) if stored else DEQUANTIZED if is_quantized(module) else "",
            by_code,
            why=tuple(filter(None, reasons)),
        )
    return states


def _by_comfyui(
    patcher, name: str, module: torch.nn.Module, activations: str, decision: LayerPlan | None
) -> tuple[str, bool]:
    """Return what ComfyUI's own code is expected to multiply a layer in if it unpacks the weight,
    and whether it is expected to multiply by the quantized weight as stored. A call shows what it
    does (``replay/seen.py``)."""
    cast = own_cast(patcher.model.diffusion_model, name)
    given = activations if not cast else FP32.name if cast == CAST_TO_FP32 else name_of(module.weight.dtype)
    if multiplies_in_fp8(module) and not has_changed_weight(module):
        return given, True
    if not is_quantized(module) or kind_of(module) is None or getattr(module, WEIGHT_FUNCTIONS):
        return given, False
    full_precision = patcher.get_model_object(f"{DIFFUSION_MODEL}{name}.{FULL_PRECISION}")
    if decision or not (full_precision or getattr(module, FORCED_TO_CAST, False)):
        return given, True
    # Up to ComfyUI 0.33 a weight whose input is not quantized, such as int8, is left as it is in its own dtype.
    quantizes_input = comfy.quant_ops.QUANT_ALGOS.get(quantization_format(module), {}).get("quantize_input", True)
    return given, not quantizes_input and name_of(module.weight.dtype) == given
