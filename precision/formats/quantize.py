"""Scaled FP8: one power-of-two scale per tensor.

A power of two is as accurate as any other scale (about 2.65 % relative error for a normal weight, whatever its spread),
and it multiplies and divides without rounding: the dequantized weight is exact in bf16 and fp16, and a weight that is
already on an fp8 grid survives being scaled again.
"""

import math
from dataclasses import dataclass

import torch

from ..amax import amax
from ..dtypes import max_of
from .scratch import empty, scratch

PART = 1 << 22
MIN_SCALE_EXPONENT = -24
SMALLEST_ACTIVATION_SCALE = {torch.float16: 2.0**-15}


@dataclass(frozen=True)
class Quantized:
    """``data`` (fp8) times ``scale`` (0-dim fp32, a power of two) is the weight."""

    data: torch.Tensor
    scale: torch.Tensor


def power_of_two_scale(largest: float, dtype: torch.dtype) -> float:
    """Return the smallest power of two that brings a finite ``largest`` into the range of an fp8 dtype; 1.0 for zeros.

    Never below 2^-24, the smallest fp16 number.
    """
    if largest == 0:
        return 1.0
    mantissa, exponent = math.frexp(largest / max_of(dtype))
    # ComfyUI casts the scale to the compute dtype before it multiplies: in fp16 a smaller one would be 0.
    return math.ldexp(1.0, max(exponent - 1 if mantissa == 0.5 else exponent, MIN_SCALE_EXPONENT))


@torch.no_grad()
def quantize(tensor: torch.Tensor, dtype: torch.dtype, largest: float) -> Quantized:
    """Quantize a finite tensor whose :func:`~halfsafe.precision.amax.host_amax` is ``largest``.

    Works in chunks: beyond the result it needs 32 MB at most, whatever the size. The scale is exact and keeps every
    value in range, so no clamp is needed and the result is the same on every torch version.
    """
    scale = power_of_two_scale(largest, dtype)
    data = empty(tensor.shape, dtype, tensor.device)
    source, target = tensor.contiguous().view(-1), data.view(-1)
    exact = _scales_exactly(tensor.dtype, 1.0 / scale)
    (scaled,) = scratch(1, PART, tensor.dtype if exact else torch.float32, tensor.device)
    for part, out in zip(source.split(PART), target.split(PART), strict=True):
        out.copy_(torch.mul(part if exact else part.float(), 1.0 / scale, out=scaled[: part.numel()]))
    return Quantized(data, torch.tensor(scale, dtype=torch.float32))


def _scales_exactly(dtype: torch.dtype, factor: float) -> bool:
    """Tell whether ``dtype`` holds the product with a power of two: bf16 always, fp16 when it scales up (to 57344 at
    most).
    """
    return dtype == torch.bfloat16 or (dtype == torch.float16 and factor >= 1)


def activation_scale(tensor: torch.Tensor, dtype: torch.dtype, by_inverse: bool = False) -> torch.Tensor:
    """Return the 0-dim fp32 scale that brings a tensor into the range of an fp8 dtype, computed on its device.

    Never so small that ``1 / scale`` passes the range of the tensor's own dtype, in which comfy-kitchen's eager kernel
    multiplies by it (``quantize_per_tensor_fp8``): inf times 0 is NaN. The smallest scale is 2^-15 for fp16, because
    2^15 is the largest power of two that fp16 holds (2^16 passes 65504), and 2^-126, the smallest normal number, for
    bf16 and fp32. A scale is raised to it only where amax is below 448 * 2^-15 = 0.0137; the largest value is a normal
    number of e4m3fn, whose smallest is 2^-6, for every amax from 2^-21 on.

    NaN or inf where the tensor holds one, so that the product shows it: an fp8 cast would turn inf into the largest
    number.

    Args:
        tensor: the activations.
        dtype: the fp8 dtype.
        by_inverse: the kernel multiplies by the inverse in the tensor's dtype. Rounded to bf16 that is off by up to
            2^-9, all of a layer one way; a scale whose inverse bf16 holds is not. Four more kernels for one number.
    """
    scale = amax(tensor) / max_of(dtype)
    scale = scale.clamp(min=SMALLEST_ACTIVATION_SCALE.get(tensor.dtype, 2.0**-126))
    return scale.reciprocal().to(tensor.dtype).float().reciprocal() if by_inverse else scale


def dequantize(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``data * scale`` for one scale per tensor, multiplied in fp32 and cast to ``dtype``."""
    return (data.float() * scale).to(dtype)
