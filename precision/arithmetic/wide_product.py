"""The product of two fp16 matrices with an fp32 result on CUDA, in a compiled graph of any torch that has it."""

import torch
from torch import Tensor

HAS_WIDE_PRODUCT = hasattr(torch.ops.aten.mm, "dtype")
"""torch has ``mm(out_dtype=...)``, from 2.8 on (PyTorch #150812)."""

def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``x`` (M, K) by ``weight`` (K, N), both fp16 on CUDA, into fp32."""
    if torch.compiler.is_compiling() and not can_be_traced():
        return _opaque(x, weight)
    # Never ``addmm`` or ``baddbmm`` in a graph: with ``out_dtype`` they cannot be traced (PyTorch #163880).
    return torch.mm(x, weight, out_dtype=torch.float32)


# torch 2.8 and 2.9 break the graph at each product: "meta_mm() takes 2 positional arguments but 3 were given" (PyTorch
# #163275). A custom operator is one node to the compiler, and the same product.
@torch.library.custom_op("halfsafe::wide_product", mutates_args=())
def _opaque(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight, out_dtype=torch.float32)


@_opaque.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[1], dtype=torch.float32)


@torch.compiler.assume_constant_result
def can_be_traced() -> bool:
    """Tell whether torch's compiler knows the shape of ``mm(out_dtype=...)``; asked while it compiles, as the first
    time takes a second."""
    half = torch.empty(1, 1, dtype=torch.float16, device="meta")
    try:
        return torch.mm(half, half, out_dtype=torch.float32).dtype == torch.float32
    except TypeError:
        return False
