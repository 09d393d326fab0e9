"""Thin products in fp16 without overflow: the factors of a LoRA, and the rows of an fp32 input that they multiply.

A LoRA is added to the result of its layer instead of to an 8-bit weight: ``y = W x + s * up (down x)``. The sum of both
weights, rounded to the 8-bit grid again, would have moved by whole steps of that grid.

No number in between passes fp16's range: the magnitudes of a factor's row add up to at most 1, or to 1/64 a column in
wide factors, and those of an fp32 input's row are at most 1. Both are scaled; what they were scaled by multiplies the
result in fp32. With 12,288 columns that is at most 192 for a LoRA, and 192 * 192 for a LoHa, which multiplies two.
"""

import math

import torch

from .operand_scale import converts_results

COLUMNS = 64
"""From so many columns on their mean magnitude is held instead of their sum: MI200 reads numbers below 6e-5 as zero."""
SMALLEST_SIZE = 2.0**-120


def normalized(factor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Divide a factor ``(rows, columns)`` by a power of two; return it in ``dtype``, and the power."""
    factor = factor.float()
    largest_sum = factor.abs().sum(1).amax().item() / max(1.0, factor.shape[1] / COLUMNS)
    exponent = math.frexp(largest_sum)[1] if math.isfinite(largest_sum) else 0
    return torch.ldexp(factor, torch.tensor(-exponent)).to(dtype), 2.0**exponent


def rows_in_fp16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an fp32 input in fp16, each row divided by its amax, and those ``(..., 1)`` in fp32."""
    size = torch.linalg.vector_norm(x.detach(), math.inf, dim=-1, keepdim=True).clamp(min=SMALLEST_SIZE)
    if torch.compiler.is_compiling() or not converts_results(x.device):
        return (x / size).to(torch.float16), size
    return torch.div(x, size, out=torch.empty_like(x, dtype=torch.float16)), size
