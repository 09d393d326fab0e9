"""fp16 products besides a layer's own: matmuls with an fp32 result on CUDA, and the low-rank
products of a LoRA.

A LoRA is added to the output of its layer instead of to an 8-bit weight: ``y = W x + s * up (down
x)``. Rounding the sum of both weights to the 8-bit grid again would move it by whole steps of that
grid.

No intermediate value exceeds fp16's range. The magnitudes in a factor's row add up to at most 1, or
to 1/64 per column in wide factors, and the magnitudes in a row of an fp32 input are at most 1. Both
are scaled, and the scales multiply the result in fp32. With 12,288 columns an intermediate value is
at most 192 for a LoRA, and 192 * 192 for a LoHa, which multiplies two.
"""

import math

import torch

from .hiding import own_arithmetic
from .operand_scale import converts_results

HAS_WIDE_PRODUCT = hasattr(torch.ops.aten.mm, "dtype")
"""torch has ``mm(out_dtype=...)``, from 2.8 on (PyTorch #150812)."""
COLUMNS = 64
"""Number of columns from which the mean magnitude of a row is bounded instead of its sum: MI200
reads numbers below 6e-5 as zero."""
SMALLEST_SIZE = 2.0**-120


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply ``x`` (M, K) by ``weight`` (K, N), both fp16 on CUDA, into fp32."""
    if torch.compiler.is_compiling() and not can_be_traced():
        return torch.ops.halfsafe.wide_product(x, weight)
    # Never ``addmm`` or ``baddbmm`` in a graph: with ``out_dtype`` they cannot be traced (PyTorch
    # #163880).
    return torch.mm(x, weight, out_dtype=torch.float32)


def _opaque(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight, out_dtype=torch.float32)


def _without_numbers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1], dtype=torch.float32)


# torch 2.8 and 2.9 break the graph at each product: "meta_mm() takes 2 positional arguments but 3
# were given" (PyTorch #163275). An operator of ours is one node to the compiler, and the same
# product. ``torch.library.custom_op`` would ask ``inspect`` for each module that was ever imported,
# in whole ComfyUI: a third of the pack's import.
_library = torch.library.Library("halfsafe", "FRAGMENT")
if not hasattr(torch.ops.halfsafe, "wide_product"):  # of the same pack under another name
    _library.define("wide_product(Tensor x, Tensor weight) -> Tensor")
    _library.impl("wide_product", _opaque, "CompositeExplicitAutograd")
    _library.impl("wide_product", _without_numbers, "Meta")


@torch.compiler.assume_constant_result
def can_be_traced() -> bool:
    """True if torch's compiler can trace ``mm(out_dtype=...)``; the first call takes a second."""
    half = torch.empty(1, 1, dtype=torch.float16, device="meta")
    try:
        return torch.mm(half, half, out_dtype=torch.float32).dtype == torch.float32
    except TypeError:
        return False


def normalized(factor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Divide a factor ``(rows, columns)`` by a power of two. Returns the factor in ``dtype``, and
    the power."""
    factor = factor.float()
    largest_sum = factor.abs().sum(1).amax().item() / max(1.0, factor.shape[1] / COLUMNS)
    exponent = math.frexp(largest_sum)[1] if math.isfinite(largest_sum) else 0
    return torch.ldexp(factor, torch.tensor(-exponent)).to(dtype), 2.0**exponent


def rows_in_fp16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each row of an fp32 input by its amax. Returns the rows in fp16, and the amax ``(...,
    1)`` in fp32."""
    size = torch.linalg.vector_norm(x.detach(), math.inf, dim=-1, keepdim=True) + SMALLEST_SIZE
    if torch.compiler.is_compiling():
        return (x / size).to(torch.float16), size
    with own_arithmetic():
        if not converts_results(x.device):
            return (x / size).to(torch.float16), size
        return torch.div(x, size, out=torch.empty_like(x, dtype=torch.float16)), size
