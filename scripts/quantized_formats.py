"""Quantization formats as round trips: a weight, or rows of inputs, as a format holds it, in fp32.

Ours: fp8 and int8. Q8_0: ``quantize_row_q8_0_ref`` of ggml. mxfp8, nvfp4, w4a8: comfy-kitchen's eager functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]
Q8_BLOCK = 32


@dataclass(frozen=True)
class Format:
    """``bits`` of a weight, its scales in them for 1024 inputs. ``inputs``: what products in the format make of rows ``(n, K)``;
    None where a format only stores. ``group``: what the number of inputs has to be a multiple of."""

    bits: float
    weight: Rounding
    inputs: Rounding | None = None
    group: int = 1


def formats() -> dict[str, Format]:
    """Every format by name; those that an installed comfy-kitchen lacks are left out."""
    found = {
        "fp8_e4m3fn": Format(8.0, fp8, fp8_inputs),
        "int8, rotated": Format(8.03, int8, int8, 16),
        "int8, not rotated": Format(8.03, plain_int8, plain_int8),
        "Q8_0": Format(8.5, q8_0, None, Q8_BLOCK),
    }
    return found | _of_kitchen()


def _of_kitchen() -> dict[str, Format]:
    import comfy_kitchen.backends.eager as eager

    found = {"mxfp8": Format(8.25, mxfp8, mxfp8, 32), "nvfp4": Format(4.5, nvfp4, nvfp4, 16)}
    if hasattr(eager, "quantize_w4a8_int8_weight"):
        found["w4a8"] = Format(4.53, w4a8, int8, 16)
        found["w6a8"] = Format(6.53, partial(w4a8, bits=6), int8, 16)
    return found


def fp8(weight: torch.Tensor) -> torch.Tensor:
    """Our scaled fp8: a power of two for the tensor."""
    from halfsafe.precision.amax import host_amax
    from halfsafe.precision.formats.quantize import dequantize, quantize

    held = quantize(weight, torch.float8_e4m3fn, host_amax(weight))
    return dequantize(held.data, held.scale, torch.float32)


def fp8_inputs(rows: torch.Tensor) -> torch.Tensor:
    """Our fp8 product's dynamic scale for all rows."""
    from halfsafe.precision.formats.quantize import activation_scale

    scale = activation_scale(rows, torch.float8_e4m3fn)
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def int8(rows: torch.Tensor) -> torch.Tensor:
    """ComfyUI's rotated int8, a scale per row."""
    from halfsafe.precision.formats.int8 import dequantize_rows, quantize_rows, rotation_group

    group = rotation_group(rows.shape[1])
    return dequantize_rows(*quantize_rows(rows, group), group)


def plain_int8(rows: torch.Tensor) -> torch.Tensor:
    """int8 with a scale per row and no rotation."""
    scale = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    return (rows / scale).round() * scale


def q8_0(weight: torch.Tensor) -> torch.Tensor:
    """GGUF's Q8_0: blocks of 32, each ``round(x * 127 / amax)`` in int8 and ``amax / 127`` in fp16."""
    blocks = weight.reshape(-1, Q8_BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / 127
    codes = torch.where(step > 0, blocks / step, torch.zeros(())).round()
    return (codes * step.half().float()).view(weight.shape)


def mxfp8(rows: torch.Tensor) -> torch.Tensor:
    """e4m3 with a power of two for each 32 inputs."""
    import comfy_kitchen.backends.eager as eager

    data, scale = eager.quantize_mxfp8(rows, pad_32x=True)
    return eager.dequantize_mxfp8(data, scale, torch.float32)[: len(rows), : rows.shape[1]]


def nvfp4(rows: torch.Tensor) -> torch.Tensor:
    """e2m1 with an e4m3 scale for each 16 inputs and one for all."""
    import comfy_kitchen.backends.eager as eager

    scale = rows.abs().amax() / (448 * 6)
    data, blocks = eager.quantize_nvfp4(rows, scale, pad_16x=True)
    return eager.dequantize_nvfp4(data, scale, blocks, torch.float32)[: len(rows), : rows.shape[1]]


def w4a8(weight: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Rotated 4- or 6-bit codes with a scale for each 16 inputs; multiplied as int8."""
    import comfy_kitchen.backends.eager as eager
    from halfsafe.precision.formats.int8 import rotation_group

    group = rotation_group(weight.shape[1])
    data, relative, channel, correction, codebook = eager.quantize_w4a8_int8_weight(weight, 16, group, bits=bits)
    return eager.dequantize_w4a8_int8_weight(data, relative, channel, codebook, correction, 16, group, torch.float32)
