"""Scaled FP8: one power-of-two scale per tensor, and the measures of what it costs.

A power of two is as accurate as any other scale (about 2.65 % relative error for a normal weight, whatever its spread),
and it multiplies and divides without rounding: the dequantized weight is exact in bf16 and fp16, and a weight that is
already on an fp8 grid survives being scaled again.
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from ..dtypes import FP8_DTYPES, max_of

CHUNK = 1 << 18
PART = 1 << 20
MIN_SCALE_EXPONENT = -24
SMALLEST_ACTIVATION_SCALE = {torch.float16: 2.0**-15}


@dataclass(frozen=True)
class Quantized:
    """``data`` (fp8) times ``scale`` (0-dim fp32, a power of two) is the weight."""

    data: torch.Tensor
    scale: torch.Tensor


def absolute_max(tensor: torch.Tensor) -> float:
    """The largest magnitude in a floating tensor in host memory; NaN if it holds a NaN, inf if an inf. Empty: 0.

    Reads the bits as integers: magnitudes order like their bit patterns, NaN above inf. As signed integers the largest
    is that of the positive numbers, as unsigned ones that of the negative. No copy, and no start of torch's threads,
    which on a busy CPU costs more than a million elements do.
    """
    if tensor.numel() == 0:
        return 0.0
    signed, unsigned = (_bits(tensor, sign) for sign in "iu")
    sign_bit = 1 << (tensor.element_size() * 8 - 1)
    if tensor.dtype in FP8_DTYPES and "fnuz" in str(tensor.dtype) and (unsigned == sign_bit).any():
        return math.nan

    def largest_in(share: slice) -> int:
        parts = (slice(start, min(start + CHUNK, share.stop)) for start in range(share.start, share.stop, CHUNK))
        return max(max(int(signed[part].max()), int(unsigned[part].max()) - sign_bit) for part in parts)

    largest = max(_in_parallel(largest_in, tensor.numel()))
    return torch.from_numpy(np.array([max(largest, 0)], signed.dtype)).view(tensor.dtype).double().item()


def _bits(tensor: torch.Tensor, kind: str) -> np.ndarray:
    """The bits of a tensor as flat integers, signed (``i``) or not (``u``); not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().view(f"{kind}{tensor.element_size()}")


def _in_parallel(work: Callable[[slice], object], count: int) -> list:
    """``work`` on one slice of ``count`` elements for each thread that torch would use; on few elements, here."""
    share = max(CHUNK, -(-count // torch.get_num_threads()))
    parts = [slice(start, min(start + share, count)) for start in range(0, count, share)]
    return [work(parts[0])] if len(parts) == 1 else list(_threads().map(work, parts))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "halfsafe")


def power_of_two_scale(amax: float, dtype: torch.dtype) -> float:
    """The smallest power of two that brings a finite ``amax`` into the range of an fp8 dtype; 1.0 for an amax of 0.

    Never below 2^-24, the smallest fp16 number: ComfyUI casts the scale to the compute dtype before it multiplies.
    """
    if amax == 0:
        return 1.0
    mantissa, exponent = math.frexp(amax / max_of(dtype))
    return math.ldexp(1.0, max(exponent - 1 if mantissa == 0.5 else exponent, MIN_SCALE_EXPONENT))


@torch.no_grad()
def quantize(tensor: torch.Tensor, dtype: torch.dtype, amax: float) -> Quantized:
    """Quantize a finite tensor whose :func:`absolute_max` is ``amax``.

    Works in chunks: beyond the result it needs 8 MB at most, whatever the size. The scale is exact and keeps every value in
    range, so no clamp is needed and the result is the same on every torch version.
    """
    scale = power_of_two_scale(amax, dtype)
    data = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    source, target = tensor.contiguous().view(-1), data.view(-1)
    exact = _scales_exactly(tensor.dtype, 1.0 / scale)
    scaled = _scratch(tensor.dtype if exact else torch.float32, tensor.device)
    for part, out in zip(source.split(PART), target.split(PART), strict=True):
        out.copy_(torch.mul(part if exact else part.float(), 1.0 / scale, out=scaled[: part.numel()]))
    return Quantized(data, torch.tensor(scale, dtype=torch.float32))


_scratches = threading.local()


def _scratch(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``PART`` elements to compute in, the same each time in a thread: fresh memory's page faults would take as long as the
    multiplication. Made outside of inference mode, or it could not be written to there later."""
    held = getattr(_scratches, "held", None)
    if held is None or (held.dtype, held.device) != (dtype, device):
        with torch.inference_mode(False):
            _scratches.held = held = torch.empty(PART, dtype=dtype, device=device)
    return held


def _scales_exactly(dtype: torch.dtype, factor: float) -> bool:
    """Whether ``dtype`` holds the product with a power of two: bf16 always, fp16 when it scales up (to 57344 at most)."""
    return dtype == torch.bfloat16 or (dtype == torch.float16 and factor >= 1)


def activation_scale(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The 0-dim fp32 scale that brings a tensor into the range of an fp8 dtype, computed on its device.

    Never so small that ``1 / scale`` passes the range of the tensor's own dtype, in which comfy-kitchen's eager kernel
    multiplies by it (``quantize_per_tensor_fp8``): inf times 0 is NaN. The smallest scale is 2^-15 for fp16, because 2^15
    is the largest power of two that fp16 holds (2^16 passes 65504), and 2^-126, the smallest normal number, for bf16 and
    fp32. A scale is raised to it only where amax is below 448 * 2^-15 = 0.0137; the largest value is a normal number of
    e4m3fn, whose smallest is 2^-6, for every amax from 2^-21 on.

    NaN or inf where the tensor holds one, so that the product shows it: an fp8 cast would turn inf into the largest number.
    """
    scale = torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32) / max_of(dtype)
    return scale.clamp(min=SMALLEST_ACTIVATION_SCALE.get(tensor.dtype, 2.0**-126))


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
