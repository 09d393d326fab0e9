"""Scaled FP8: one power-of-two scale per tensor, and the measures of what it costs.

A power of two is as accurate as any other scale (about 2.65 % relative error for a normal weight, whatever its spread),
and it multiplies and divides without rounding: the dequantized weight is exact in bf16 and fp16, and a weight that is
already on an fp8 grid survives being scaled again.
"""

import math
from dataclasses import dataclass

import torch

from .dtypes import FP8_DTYPES, max_of

CHUNK = 1 << 20
MIN_SCALE_EXPONENT = -24
_BITS = {8: (torch.uint8, 0x7F), 16: (torch.int16, 0x7FFF), 32: (torch.int32, 0x7FFFFFFF), 64: (torch.int64, (1 << 63) - 1)}
_FNUZ_NAN = 0x80


@dataclass(frozen=True)
class Quantized:
    """``data`` (fp8) times ``scale`` (0-dim fp32, a power of two) is the weight."""

    data: torch.Tensor
    scale: torch.Tensor


def absolute_max(tensor: torch.Tensor) -> float:
    """The largest magnitude in a floating tensor; NaN if it holds a NaN, inf if it holds an inf. Empty: 0.

    Reads the bits as integers: magnitudes order like their bit patterns, NaN above inf, so one integer maximum finds all
    three, several times faster than ``aminmax`` in bf16 and without a second copy of the tensor.
    """
    if tensor.numel() == 0:
        return 0.0
    integers, mask = _BITS[tensor.element_size() * 8]
    flat = tensor.contiguous().view(-1).view(integers)
    if tensor.dtype in FP8_DTYPES and "fnuz" in str(tensor.dtype) and (flat == _FNUZ_NAN).any():
        return math.nan
    largest = max(int((chunk & mask).max()) for chunk in flat.split(CHUNK))
    return torch.tensor([largest], dtype=integers).view(tensor.dtype).double().item()


def power_of_two_scale(amax: float, dtype: torch.dtype) -> float:
    """The smallest power of two that brings a finite ``amax`` into the range of an fp8 dtype; 1.0 for an amax of 0.

    Never below 2^-24, the smallest fp16 number: ComfyUI casts the scale to the compute dtype before it multiplies.
    """
    if amax == 0:
        return 1.0
    mantissa, exponent = math.frexp(amax / max_of(dtype))
    return math.ldexp(1.0, max(exponent - 1 if mantissa == 0.5 else exponent, MIN_SCALE_EXPONENT))


def quantize(tensor: torch.Tensor, dtype: torch.dtype, amax: float) -> Quantized:
    """Quantize a finite tensor whose :func:`absolute_max` is ``amax``.

    Works in chunks: beyond the result it needs a few MB, whatever the size. The scale is exact and keeps every value in
    range, so no clamp is needed and the result is the same on every torch version.
    """
    scale = power_of_two_scale(amax, dtype)
    data = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    source, target = tensor.contiguous().view(-1), data.view(-1)
    for part, out in zip(source.split(CHUNK), target.split(CHUNK), strict=True):
        out.copy_(_scaled(part, 1.0 / scale))
    return Quantized(data, torch.tensor(scale, dtype=torch.float32))


def _scaled(part: torch.Tensor, factor: float) -> torch.Tensor:
    # A power of two scales bf16 exactly, and fp16 too when it scales up: the product is at most 57344.
    exact = part.dtype == torch.bfloat16 or (part.dtype == torch.float16 and factor >= 1)
    return part * factor if exact else part.float() * factor


def dequantize(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``data * scale`` for one scale per tensor, multiplied in fp32 and cast to ``dtype``."""
    return (data.float() * scale).to(dtype)


def relative_error(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """``||approximation - reference|| / ||reference||`` in fp64; 0 for two zero tensors."""
    reference = reference.double()
    norm = reference.norm().item()
    error = (approximation.double() - reference).norm().item()
    return error / norm if norm else error


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal to quantization noise ratio in dB: ``-20 log10`` of :func:`relative_error`; inf when equal."""
    error = relative_error(reference, approximation)
    return math.inf if error == 0 else -20 * math.log10(error)
