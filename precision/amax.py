"""The largest magnitude of a tensor, on every device: NaN where it holds one, else inf where it holds one, 0 where empty.

:func:`amax` leaves the number on the device; :func:`amax_value` waits for the device; :func:`host_amax` reads host memory.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from .dtypes import FP8_DTYPES

CHUNK = 1 << 18


def amax(tensor: torch.Tensor) -> torch.Tensor:
    """Find the largest magnitude of an fp16, bf16 or fp32 tensor, 0-dim fp32 on its device, without a synchronisation."""
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float32)
    if norm_loses_nan(tensor.device):
        return tensor.abs().amax().float()
    return torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32)


def norm_loses_nan(device: torch.device) -> bool:
    """Tell whether the infinity norm of a device passes over NaN, as Metal's ``max`` does in torch's kernel of it.

    That kernel (``norm`` in aten/src/ATen/native/mps/kernels/ReduceOps.metal) also reduces a whole tensor in one thread
    group. ``amax`` there is MPSGraph's reduction that propagates NaN (aten/src/ATen/native/mps/operations/ReduceOps.mm).
    Elsewhere the norm takes one pass and ``abs().amax()`` two.
    """
    return device.type == "mps"


def amax_value(tensor: torch.Tensor) -> float:
    """Read back the largest magnitude of any tensor, which waits for its device; 0 where it holds no floats or no data."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0 or tensor.device.type == "meta":
        return 0.0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.float64:
        return tensor.abs().amax().item()
    return amax(tensor.float() if tensor.dtype.itemsize == 1 else tensor).item()


def host_amax(tensor: torch.Tensor) -> float:
    """Find the largest magnitude of a floating tensor in host memory: NaN if it holds a NaN, inf if an inf. Empty: 0.

    Reads the bits as integers: magnitudes order like their bit patterns, NaN above inf. As signed integers the largest
    is that of the positive numbers, as unsigned ones that of the negative. No copy, and no start of torch's threads,
    which on a busy CPU costs more than a million elements do.
    """
    if tensor.numel() == 0:
        return 0.0
    signed, unsigned = (bits_of(tensor, sign) for sign in "iu")
    sign_bit = 1 << (tensor.element_size() * 8 - 1)
    if tensor.dtype in FP8_DTYPES and "fnuz" in str(tensor.dtype) and (unsigned == sign_bit).any():
        return math.nan

    def largest_in(share: slice) -> int:
        return max(max(int(signed[part].max()), int(unsigned[part].max()) - sign_bit) for part in chunks(share, CHUNK))

    largest = max(in_parallel(largest_in, tensor.numel()))
    return torch.from_numpy(np.array([max(largest, 0)], signed.dtype)).view(tensor.dtype).double().item()


def bits_of(tensor: torch.Tensor, kind: str) -> np.ndarray:
    """Give the bits of a tensor as flat integers, signed (``i``) or not (``u``); not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().view(f"{kind}{tensor.element_size()}")


def chunks(share: slice, size: int) -> Iterator[slice]:
    """Cut a slice into slices of up to ``size`` elements."""
    return (slice(start, min(start + size, share.stop)) for start in range(share.start, share.stop, size))


def in_parallel(work: Callable[[slice], object], count: int) -> list:
    """Do ``work`` on one slice of ``count`` elements for each thread that torch would use; on few elements, here."""
    share = max(CHUNK, -(-count // torch.get_num_threads()))
    parts = [slice(start, min(start + share, count)) for start in range(0, count, share)]
    return [work(parts[0])] if len(parts) == 1 else list(_threads().map(work, parts))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "halfsafe")
