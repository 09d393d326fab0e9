"""fp8 products by comfy-kitchen's kernels, called directly.

Its ``QuantizedTensor`` and the custom operator that picks a kernel take longer on the host than a small product on a
GPU. A graph that is compiled has them, which cost nothing there.
"""

from __future__ import annotations

from collections.abc import Callable

import comfy.quant_ops
import torch
import torch.nn.functional as F

try:
    from comfy_kitchen.registry import registry
    from comfy_kitchen.scaled_mm_v2 import scaled_mm_v2
except ImportError:
    registry = None

from .fast_accumulation import fast_product

ACTIVATION_LAYOUT = "TensorCoreFP8E4M3Layout"
_quantizers: dict[tuple[torch.device, torch.dtype], Callable[..., torch.Tensor]] = {}


def fp8_product(
    rows: torch.Tensor, scale: torch.Tensor, weight: comfy.quant_ops.QuantizedTensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply ``rows`` (M, K), quantized to e4m3, by an fp8 ``weight`` (N, K); return it in the dtype of ``rows``.

    Args:
        rows: the activations, in 16 bit.
        scale: theirs, 0-dim fp32.
        weight: as ComfyUI holds it.
        bias: in the dtype of ``rows``.
    """
    if registry is None or torch.compiler.is_compiling():
        return _dispatched(rows, scale, weight, bias)
    values, weight_scale = weight.layout_cls.get_plain_tensors(weight)
    operands = _quantized(rows, scale), values.t(), scale, weight_scale, bias, rows.dtype
    product = fast_product(*operands)
    if product is not None:
        return product
    try:
        return scaled_mm_v2(*operands)
    except (RuntimeError, TypeError):  # what torch refuses is dequantized there, with a word about it
        return _dispatched(rows, scale, weight, bias)


def _quantized(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize by the kernel that comfy-kitchen picks for this device and dtype, which it is asked for once."""
    dtype = torch.float8_e4m3fn
    quantize = _quantizers.get((rows.device, rows.dtype))
    if quantize is None:
        call = {"x": rows, "scale": scale, "output_type": dtype}
        quantize = registry.get_implementation("quantize_per_tensor_fp8", kwargs=call)
        _quantizers[rows.device, rows.dtype] = quantize
    return quantize(rows, scale, dtype)


def _dispatched(rows, scale, weight, bias) -> torch.Tensor:
    """Multiply by way of ComfyUI's ``QuantizedTensor``."""
    quantized = comfy.quant_ops.QuantizedTensor.from_float(rows, ACTIVATION_LAYOUT, scale=scale)
    return F.linear(quantized, weight.to(rows.dtype), bias)
