"""Products of fp8 and fp16 on a CPU in the time of fp32's: torch's own take six to three hundred times as long.

The numbers are the same: each is multiplied and summed in fp32 and rounded once, as a CUDA device does. The unit tier runs
on torch's own kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch._C import DispatchKey, DispatchKeySet

CPU = DispatchKeySet(DispatchKey.CPU)
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
CONVOLUTIONS = ("_slow_conv2d_forward", "slow_conv3d_forward")


def make_fast() -> torch.library.Library:
    """Multiply fp8 and fp16 in fp32 on a CPU, for as long as the library that is returned lives."""
    library = torch.library.Library("aten", "IMPL")
    kernels = {"_scaled_mm": _scaled_mm(_own("_scaled_mm")), **{name: _convolution(_own(name)) for name in CONVOLUTIONS}}
    kernels |= {name: _product(_own(name)) for name in PRODUCTS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an operator that has a kernel already
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
    return library


def _own(name: str) -> Callable:
    """Return torch's own kernel of an operation."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    return lambda *args, **kwargs: kernel.call_boxed(CPU, *args, **kwargs)


def _scaled_mm(own: Callable) -> Callable:
    """torch's kernel is given one row of every product, so that it refuses what it always refuses."""

    def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
        row = own(a[:1], b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
        result = (a.float() @ b.float()) * (scale_a * scale_b)
        return (result if bias is None else result + bias.float()).to(row.dtype)

    return scaled_mm


def _product(own: Callable) -> Callable:
    def product(*tensors, **factors):
        if any(tensor.dtype != torch.float16 for tensor in tensors):
            return own(*tensors, **factors)
        return own(*(tensor.float() for tensor in tensors), **factors).half()

    return product


def _convolution(own: Callable) -> Callable:
    def convolution(x, weight, kernel_size, bias=None, stride=1, padding=0):
        if x.dtype != torch.float16:
            return own(x, weight, kernel_size, bias, stride, padding)
        dims = len(kernel_size)
        wide = (None if tensor is None else tensor.float() for tensor in (x, weight, bias))
        return torch.convolution(*wide, stride, padding, [1] * dims, False, [0] * dims, 1).half()

    return convolution
