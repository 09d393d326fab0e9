"""What Metal refuses and a CPU does not, raised on a CPU with torch's own words for it (torch 2.8 to 2.12).

Sees every element-wise operation of two operands that writes to a tensor it is given. CPU tensors count as Metal's, and so do
fake tensors of device ``mps``. Does not see kernels that are missing for one dtype, nor what a kernel computes.
"""

from __future__ import annotations

import torch
from support.leaf_operations import LeafOperations

BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "fmax", "fmin", "atan2", "copysign", "hypot", "remainder", "fmod", "pow")
NO_KERNEL = "Failed to create function state object for: {}_dense_{}_{}"
SHORT = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}


def binary_with_another_result(name: str, out: torch.Tensor, a: torch.Tensor, b) -> None:
    """exec_binary_kernel, aten/src/ATen/native/mps/OperationUtils.mm: kernels exist for operands and results of one dtype, and
    TensorIterator converts a result on a CPU only (PyTorch #152515, #178709)."""
    common = torch.result_type(a, b)
    if out.dtype != common:
        raise RuntimeError(NO_KERNEL.format(name, *(SHORT.get(dtype, str(dtype)) for dtype in (out.dtype, common))))


class MetalRules(LeafOperations):
    """Raises what torch raises on an Apple GPU, before the operation runs."""

    def leaf(self, func, args, kwargs):
        name = func.name().split("::")[1].split(".")[0]
        written = kwargs.get("out", args[0] if name.endswith("_") else None)
        if name.rstrip("_") in BINARY and written is not None:
            binary_with_another_result(name.rstrip("_"), written, *args[:2])
        return func(*args, **kwargs)
