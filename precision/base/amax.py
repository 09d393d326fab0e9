"""Read tensors that other code made: largest magnitude and finiteness, for each dtype, layout and device of torch.

The magnitude is NaN where a tensor holds one, else inf where it holds one, 0 where it is empty. Integers, bools and
quantized codes are finite, with a magnitude of 0. Of a complex number, both parts count.

:func:`amax` leaves the number on the device; :func:`amax_value` waits for the device.
"""

import math

import numpy as np
import torch

from .dtypes import FP8_DTYPES, looked_up

KEEP_NAN = ("cpu", "cuda", "meta")
_HOST = ("cpu",)
_REDUCED = frozenset((torch.float16, torch.bfloat16, torch.float32))
"""The dtypes that torch's infinity norm reduces to fp32 in one kernel."""
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
"""Two numbers in a byte, none of which can be NaN or Inf; torch 2.8 has no arithmetic for it."""
_FP32_MAX = torch.finfo(torch.float32).max
_loses_nan: dict[str, bool] = {}


def amax(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Find the largest magnitude of a tensor, 0-dim fp32 on its device, without a synchronisation.

    A float64 magnitude that is finite and beyond fp32's range counts as fp32's largest number. ``out``: the 0-dim fp32
    tensor to write to.
    """
    if (
        tensor.dtype in _REDUCED
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.numel()
        and (tensor.device.type in KEEP_NAN or not _norm_loses_nan(tensor.device))
    ):
        return torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32, out=out)
    largest = _largest(floats(tensor))
    if largest.dtype == torch.float64:
        largest = torch.where(largest.isinf(), largest, largest.clamp(max=_FP32_MAX))
    return largest.float() if out is None else out.copy_(largest)


def amax_value(tensor: torch.Tensor) -> float:
    """Read back the largest magnitude of a tensor, which waits for its device; 0 for a tensor without data."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
        return 0.0
    in_host_memory = tensor.device.type in _HOST and tensor.numel() > 0
    if in_host_memory and tensor.dtype in FP8_DTYPES:
        return _fp8_amax(tensor)
    numbers = floats(tensor)
    if not in_host_memory:
        return _largest(numbers).item()
    lowest, largest = torch.aminmax(numbers)  # a tenth of the norm's time on a CPU
    return max(-lowest.item(), largest.item())


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mask of the finite values of a tensor, of its shape and on its device."""
    mask = torch.isfinite(floats(tensor))
    return mask.all(-1) if tensor.is_complex() else mask


def floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as dense fp16, bf16, fp32 or fp64 of the same first dimension.

    fp8 becomes fp32, complex numbers become pairs, and tensors without floating-point numbers become zeros.
    """
    if tensor.is_nested:
        tensor = tensor.to_padded_tensor(0.0)
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.dtype is _PACKED:
        return torch.zeros((), device=tensor.device).expand(tensor.shape)
    if tensor.dtype in FP8_DTYPES and tensor.device.type == "mps":
        return looked_up(tensor, torch.float32)
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _largest(numbers: torch.Tensor) -> torch.Tensor:
    if not numbers.numel():
        return numbers.new_zeros((), dtype=torch.float32)
    if _norm_loses_nan(numbers.device):
        return numbers.abs().amax()
    return torch.linalg.vector_norm(numbers, math.inf)


def _norm_loses_nan(device: torch.device) -> bool:
    """True if the infinity norm of a device passes over NaN, as Metal's ``max`` does in torch's kernel of it.

    That kernel (``norm`` in aten/src/ATen/native/mps/kernels/ReduceOps.metal) also reduces a whole tensor in one thread
    group. ``amax`` there is MPSGraph's reduction that propagates NaN
    (aten/src/ATen/native/mps/operations/ReduceOps.mm). Where the norm keeps NaN it takes one pass and ``abs().amax()``
    two. Devices other than a CPU and CUDA are probed once; a graph compiled before the probe takes two passes.
    """
    if device.type in KEEP_NAN:
        return False
    if device.type not in _loses_nan and not torch.compiler.is_compiling():
        _loses_nan[device.type] = _drops_nan(device)
    return _loses_nan.get(device.type, True)


def _drops_nan(device: torch.device) -> bool:
    numbers = torch.tensor([1.0, math.nan], dtype=torch.float32, device=device)
    return not torch.linalg.vector_norm(numbers, math.inf).isnan().item()


def _fp8_amax(tensor: torch.Tensor) -> float:
    """Read the codes as integers: magnitudes order like them, NaN above inf.
    Signed ones order the positive, unsigned the negative."""
    codes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    if "fnuz" in str(tensor.dtype) and (codes == 0x80).any():
        return math.nan
    largest = max(int(codes.view(np.int8).max()), int(codes.max()) - 0x80, 0)
    return torch.tensor(largest, dtype=torch.uint8).view(tensor.dtype).item()


def decibels(noise: float, signal: float) -> float:
    """Compute ``10 log10(signal / noise)``: inf without noise,
    -inf for noise that is not finite or without a signal."""
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or signal == 0:
        return -math.inf
    return 10 * (math.log10(signal) - math.log10(noise))
