"""The largest magnitude of a tensor, on every device: NaN where it holds one, else inf where it holds one,
0 where empty.

:func:`amax` leaves the number on the device; :func:`amax_value` waits for the device;
:func:`host_amax` reads host memory.
"""

import math

import numpy as np
import torch

from .dtypes import FP8_DTYPES

KEEP_NAN = ("cpu", "cuda", "meta")
_loses_nan: dict[str, bool] = {}


def amax(tensor: torch.Tensor) -> torch.Tensor:
    """Find the largest magnitude of an fp16, bf16 or fp32 tensor, 0-dim fp32 on its device,
    without a synchronisation."""
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float32)
    if norm_loses_nan(tensor.device):
        return tensor.abs().amax().float()
    return torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32)


def norm_loses_nan(device: torch.device) -> bool:
    """True if the infinity norm of a device passes over NaN, as Metal's ``max`` does in torch's kernel of it.

    That kernel (``norm`` in aten/src/ATen/native/mps/kernels/ReduceOps.metal) also reduces a whole tensor in one thread
    group. ``amax`` there is MPSGraph's reduction that propagates NaN
    (aten/src/ATen/native/mps/operations/ReduceOps.mm). Where the norm keeps NaN it takes one pass and ``abs().amax()``
    two. Other devices than a CPU and CUDA are asked once; a graph that is compiled before that takes the two.
    """
    if device.type in KEEP_NAN:
        return False
    if device.type not in _loses_nan and not torch.compiler.is_compiling():
        _loses_nan[device.type] = _drops_nan(device)
    return _loses_nan.get(device.type, True)


def _drops_nan(device: torch.device) -> bool:
    numbers = torch.tensor([1.0, math.nan], dtype=torch.float32, device=device)
    return not torch.linalg.vector_norm(numbers, math.inf).isnan().item()


def amax_value(tensor: torch.Tensor) -> float:
    """Read back the largest magnitude of any tensor, which waits for its device;
    0 where it holds no floats or no data."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0 or tensor.device.type == "meta":
        return 0.0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.float64:
        return tensor.abs().amax().item()
    return amax(tensor.float() if tensor.dtype.itemsize == 1 else tensor).item()


def host_amax(tensor: torch.Tensor) -> float:
    """Find the largest magnitude of a floating tensor in host memory: NaN if it holds a NaN, inf if an inf.
    Empty: 0."""
    if tensor.numel() == 0:
        return 0.0
    if tensor.dtype in FP8_DTYPES:
        return _fp8_amax(tensor)
    lowest, largest = torch.aminmax(tensor)
    return max(-lowest.item(), largest.item())


def _fp8_amax(tensor: torch.Tensor) -> float:
    """Read the codes as integers: magnitudes order like them, NaN above inf.
    Signed ones order the positive, unsigned the negative."""
    codes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
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
