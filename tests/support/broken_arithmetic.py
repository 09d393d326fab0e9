"""Arithmetic as on devices that do it otherwise than a CPU: sums in fp16, products that are zero, norms without NaN."""

from __future__ import annotations

import math

import torch
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from halfsafe.precision.base import flags
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class SumsInFp16(TorchFunctionMode):
    """fp16 products whose running sum passes fp16's range become inf while torch's flag for fp16 sums is on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and args[0].dtype == torch.float16 and flags.is_on(FP16_ACCUMULATION):
            positive = args[0].float().clamp(min=0) @ args[1].float().clamp(min=0).t()
            result = result * torch.exp((positive > 65504).to(result.dtype) * 1e4)
        return result


class HalfProductsAreZero(TorchFunctionMode):
    """As on devices whose fp16 GEMM returns zeros."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        products = (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm)
        return result * 0 if func in products and result.dtype == torch.float16 else result


class NormsLoseNaN(TorchDispatchMode):
    """Infinity norms as of torch's Metal kernel, whose ``max`` gives the operand that is a number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.linalg_vector_norm.default and args[1:2] == (math.inf,):
            args = (torch.where(args[0].isnan(), 0, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
