"""Bounds of the numbers in an attention, computed from its operands.

A score is at most ``max ||q|| * max ||k|| * scale`` (Cauchy-Schwarz); a result is a weighted mean
of the rows of v.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..base.amax import amax
from ..base.dtypes import FP16_MAX
from .proofs import HEADROOM_BITS, Proof, fits_range

LARGEST_SCORE = FP16_MAX / 2.0
"""Rounding moves a sum of products by less than its own size."""
MASK_FACTOR = 8.0
SMALLEST_VALUE = 2.0**-10


class AttentionCall(NamedTuple):
    """Arguments of an attention of ComfyUI: q, k, v of shape (..., tokens, channels), and all
    arguments after ``heads``.

    ``fused``: scores are kept in fp32 and scaled before rounding.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    heads: int
    args: tuple
    kwargs: dict
    fused: bool = True

    def run(self, attention: Callable) -> torch.Tensor:
        return attention(self.q, self.k, self.v, self.heads, *self.args, **self.kwargs)

    def in_dtype(self, dtype: torch.dtype) -> "AttentionCall":
        """Return the same attention over operands, masks and other tensors in ``dtype``."""
        if self.q.dtype == self.k.dtype == self.v.dtype == dtype and not self.is_masked():
            return self
        args = tuple(_mask_in(dtype, mask) for mask in self.args)
        kwargs = {name: _mask_in(dtype, value) for name, value in self.kwargs.items()}
        return AttentionCall(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.heads, args, kwargs, self.fused)

    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the largest 2-norm of a head's rows of q and of k, each 0-dim fp32."""
        by_head = (-1, self.head_size())
        return _largest_row_norm(self.q.unflatten(-1, by_head)), _largest_row_norm(self.k.unflatten(-1, by_head))

    def head_size(self) -> int:
        return self.q.shape[-1] if self.q.dim() == 4 else self.q.shape[-1] // self.heads

    def score_factor(self) -> float:
        """Return the largest factor of a product of rows of q and k: unfused scores are scaled
        after the product. With a mask it is 8 times larger, so that no score outweighs a masked
        score."""
        scale = self.kwargs.get("scale") or self.head_size() ** -0.5
        factor = scale if self.fused else max(scale, 1.0)
        return factor * MASK_FACTOR if self.is_masked() else factor

    def is_masked(self) -> bool:
        masks = (mask for mask in (*self.args, self.kwargs.get("mask")) if isinstance(mask, torch.Tensor))
        return any(mask.is_floating_point() for mask in masks)

    def largest(self) -> torch.Tensor:
        """Compute the largest of: norm of a row of q or k, score, element of v; 0-dim fp32. Values
        of v so small that fp16 rounds them to zero count as too large."""
        of_q, of_k = self.norms()
        of_v = amax(self.v)
        score = of_q * of_k * self.score_factor()
        return torch.stack([of_q, of_k, score, of_v, SMALLEST_VALUE * FP16_MAX / of_v]).amax()


class AttentionRange(Proof):
    """Proof that attentions with fp16 operands stay in fp16's range, from the largest number in
    them."""

    def holds(self, magnitude: float) -> bool:
        """True if the largest number in the attention fits fp16."""
        return fits_range(magnitude)


class AttentionBound(AttentionRange):
    """Proof that one attention with fp16 operands stays in fp16's range.

    A fused kernel keeps its scores in fp32, so only q, k and v can overflow. Inf in v gives Inf or
    NaN in the result. Inf in k gives NaN, or a score of -Inf, whose weight is correctly 0. Inf in q
    may leave zeros, so the amax of q is recorded, in one kernel. With an additive mask, or with
    scores in fp16, the norms of the rows of q and k are recorded, which bound their product.

    ``factor``: factor of a score, including the mask's. ``limit``: largest amax of q, which also
    keeps scores from becoming coarse. ``by_norm``: record the norms.
    """

    width = 2
    factor = 1.0
    limit = 0.0
    by_norm = False

    def calibrate(self, call: AttentionCall, amax_of_q: float, largest: float) -> None:
        """Choose the numbers to record. ``largest``: the largest number in the attention."""
        self.device = call.q.device
        self.factor, self.by_norm = call.score_factor(), not call.fused or call.is_masked()
        self.limit = min(math.sqrt(LARGEST_SCORE / largest), 2.0**HEADROOM_BITS) * amax_of_q

    def record_call(self, call: AttentionCall) -> None:
        """Record the numbers of an attention. If this call has a mask, or another kernel, and the
        measured call had none, the larger factor is used."""
        if not (self.by_norm or not call.fused or call.is_masked()):
            self.record_amax(call.q)
            return
        if not self.by_norm:
            self.missed.any = True
        self.factor = max(self.factor, call.score_factor())
        for place, norm in enumerate(call.norms()):
            self.record(norm, place)

    def magnitude(self, numbers: list[float]) -> float:
        """Return the largest number in the attention, from its records; if only q is recorded, the
        growth of q in units of fp16's range."""
        of_q, of_k = numbers
        if not self.by_norm:
            return FP16_MAX * of_q / self.limit * (1 - 2.0**-12) if self.limit else math.nan
        return max(of_q, of_k, of_q * of_k * self.factor)


def _largest_row_norm(x: torch.Tensor) -> torch.Tensor:
    """Compute the largest 2-norm of the rows of ``x`` (..., K), 0-dim fp32 on its device; 0 without
    rows."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax().float()


def _mask_in(dtype: torch.dtype, mask: object) -> object:
    # Half of fp16's range hides a token as well as -inf does, and can be added to a score.
    if not isinstance(mask, torch.Tensor) or not mask.is_floating_point():
        return mask
    return (mask.clamp(-FP16_MAX / 2, FP16_MAX / 2) if dtype == torch.float16 else mask).to(dtype)
