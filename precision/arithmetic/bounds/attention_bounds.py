"""How large the numbers of an attention can be: bounds from its operands, and what is proven from them.

A score is at most ``max ||q|| * max ||k|| * scale`` (Cauchy-Schwarz); a result is a mean of rows of v.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...amax import amax
from ...dtypes import FP16_MAX
from ..amax_buffer import NOTHING
from ..norms import largest_row_norm
from ..proofs import HEADROOM_BITS, MARGIN, Proof, fits_range
from .known_values import KnownValues, Tag
from .value_bounds import ValueBound, of_elements

LARGEST_SCORE = FP16_MAX / MARGIN
MASK_FACTOR = 8.0
SMALLEST_VALUE = 2.0**-10


class AttentionCall(NamedTuple):
    """Hold the arguments of one of ComfyUI's attentions: q, k and v of (..., tokens, channels), and what follows
    ``heads``.

    ``fused``: its scores are kept in fp32 and scaled before they are rounded.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    heads: int
    args: tuple
    kwargs: dict
    fused: bool = True

    def run(self, attention: Callable) -> torch.Tensor:
        """Run an attention on these arguments."""
        return attention(self.q, self.k, self.v, self.heads, *self.args, **self.kwargs)

    def run_in(self, dtype: torch.dtype, attention: Callable) -> torch.Tensor:
        """Run an attention on operands and masks in ``dtype``. Returns what it returns."""
        masks = (_mask_in(dtype, mask) for mask in self.args)
        kwargs = {**self.kwargs, "mask": _mask_in(dtype, self.kwargs["mask"])} if "mask" in self.kwargs else self.kwargs
        return attention(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.heads, *masks, **kwargs)

    def smoothed(self) -> "AttentionCall":
        """Return the same attention over keys less their mean."""
        return AttentionCall(self.q, smoothed(self.k), self.v, self.heads, self.args, self.kwargs, self.fused)

    def in_fp16(self) -> "AttentionCall":
        """Return the same attention over fp16 operands."""
        q, k, v = (tensor.to(torch.float16) for tensor in (self.q, self.k, self.v))
        return AttentionCall(q, k, v, self.heads, self.args, self.kwargs, self.fused)

    def head_size(self) -> int:
        return self.q.shape[-1] if self.q.dim() == 4 else self.q.shape[-1] // self.heads

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """Split the channels of q or k into heads: (..., heads, size)."""
        return tensor.unflatten(-1, (-1, self.head_size()))

    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the largest 2-norm of a head's rows of q and of k, each 0-dim fp32."""
        return largest_row_norm(self.by_head(self.q)), largest_row_norm(self.by_head(self.k))

    def score_factor(self) -> float:
        """Return what a product of a row of q and one of k is multiplied by at most; unfused scores are scaled after
        the product."""
        scale = self.kwargs.get("scale") or self.head_size() ** -0.5
        return scale if self.fused else max(scale, 1.0)

    def masked_factor(self) -> float:
        """Return the score factor with a mask counted eightfold, so that no score outweighs a masked one."""
        given = (*self.args, self.kwargs.get("mask"))
        masked = any(torch.is_tensor(mask) and mask.is_floating_point() for mask in given)
        return self.score_factor() * (MASK_FACTOR if masked else 1.0)

    def score_bound(self) -> torch.Tensor:
        """Compute the largest number the scores can reach, 0-dim fp32."""
        of_q, of_k = self.norms()
        return of_q * of_k * self.score_factor()

    def largest(self) -> torch.Tensor:
        """Compute the largest number the attention can hold, 0-dim fp32: a norm of a row of q or k, a score, an element
        of v.

        Values so small that fp16 would round them away count as too large.
        """
        of_q, of_k = self.norms()
        of_v = amax(self.v)
        score = of_q * of_k * self.masked_factor()
        return torch.stack([of_q, of_k, score, of_v, SMALLEST_VALUE * FP16_MAX / of_v]).amax()


class ScoreBound(Proof):
    """Prove that no score of a model's fp16 attentions passes fp16's range, from the norms of their q and k."""

    def holds(self, magnitude: float) -> bool:
        """Tell whether scores up to this bound fit."""
        return magnitude <= LARGEST_SCORE


class AttentionRange(Proof):
    """Prove that attentions over fp16 operands hold no number that fp16 does not, from the largest one they can
    hold."""

    def holds(self, magnitude: float) -> bool:
        """Tell whether fp16 holds numbers up to this one."""
        return fits_range(magnitude)


class AttentionBound(AttentionRange):
    """Prove the same of one attention, from numbers that cost a kernel each: amax of q, k and v as they are multiplied,
    of those that no bound is known of.

    ``size``: of a head; ``factor``: of a score, the mask's included; ``by_norm``: amax alone bounds its scores too
    roughly, so norms of rows of q and k are recorded, by two kernels each. ``values``: what no element of v passes,
    where a later operation relies on the result's bound (``tag``).
    """

    width = 3

    def __init__(self, name: str):
        super().__init__(name)
        self.size = 1
        self.factor = 1.0
        self.by_norm = False
        self.values = 0.0
        self.tag: Tag | None = None

    def forget(self) -> None:
        """Begin anew, for a model whose operands are others now."""
        super().forget()
        self.values = 0.0

    def calibrate(self, call: AttentionCall, known: KnownValues) -> None:
        """Choose what to record."""
        self.recorder.device, self.size, self.factor = call.q.device, call.head_size(), call.masked_factor()
        largest = [amax(tensor).item() for tensor in (call.q, call.k, call.v)]
        self.by_norm = False
        self.by_norm = not self.holds(self.magnitude(largest) * 2.0**HEADROOM_BITS)
        bound, measured = known.of(call.v), max(self.values, 2.0**HEADROOM_BITS * largest[2])
        self.values = bound.largest if bound and MARGIN * bound.largest <= FP16_MAX / MARGIN else measured
        if self._knows_scores(call, known):
            known.rely_on(call.q)
            known.rely_on(call.k)
        if self._knows_values(call, known):
            known.rely_on(call.v)

    def record(self, call: AttentionCall, given: AttentionCall, known: KnownValues) -> None:
        """Record what bounds the scores, and the amax of v, but for what is known of the tensors that were ``given``.

        A call may bring a mask, or another attention, where the measured one had none: the larger factor counts.
        """
        self.size, self.factor = max(self.size, call.head_size()), max(self.factor, call.masked_factor())
        recorder = self.recorder
        if recorder.entry is None or recorder.entry.device != call.q.device:
            recorder.missed = True
            return
        if known.sampling or not self._knows_scores(given, known):
            for entry, tensor in zip(recorder.entries, (call.q, call.k), strict=False):
                if self.by_norm:
                    entry.write_row_norm(call.by_head(tensor))
                else:
                    entry.write_amax(tensor)
        if known.sampling or not self._knows_values(given, known):
            recorder.entries[2].write_amax(call.v)

    def _knows_scores(self, call: AttentionCall, known: KnownValues) -> bool:
        """Tell whether no score and no element of q and k can pass fp16's range, by what is known of both."""
        of_q, of_k = known.of(call.q), known.of(call.k)
        if of_q is None or of_k is None:
            return False
        norm_q, norm_k = (known.head_norm(tensor, call.head_size()) for tensor in (call.q, call.k))
        return max(of_q.largest, of_k.largest, norm_q * norm_k * call.masked_factor()) <= LARGEST_SCORE

    def _knows_values(self, call: AttentionCall, known: KnownValues) -> bool:
        of_v = known.of(call.v)
        return of_v is not None and of_v.largest <= min(self.values, LARGEST_SCORE)

    def result_bound(self, columns: int) -> ValueBound:
        """Bound the result's rows of ``columns`` numbers: a mean of rows of v, with room for kernels that round it."""
        return of_elements(MARGIN * self.values, columns)

    def ran(self, numbers: list[float]) -> bool:
        """Tell whether any of the numbers was recorded in a call."""
        return any(number != NOTHING for number in numbers)

    def magnitude(self, numbers: list[float]) -> float:
        """Return the largest number the attention can hold, of those that were recorded; not finite where one of them
        is not."""
        if not all(map(math.isfinite, numbers)):
            return math.nan
        found = [0.0]
        if numbers[0] != NOTHING:
            of_q, of_k = (number if self.by_norm else number * self.size**0.5 for number in numbers[:2])
            found += [of_q, of_k, of_q * of_k * self.factor]
        if numbers[2] != NOTHING:
            if self.tag is not None and self.tag.used and numbers[2] > self.values:
                return math.nan
            found += [numbers[2], SMALLEST_VALUE * FP16_MAX / numbers[2] if numbers[2] else math.inf]
        return max(found)


def smoothed(k: torch.Tensor) -> torch.Tensor:
    """Subtract from the keys their mean over tokens (dimension -2). Any one vector would do, so its rounding is no
    error."""
    return k - k.mean(-2, keepdim=True, dtype=torch.float32).to(k.dtype)


def _mask_in(dtype: torch.dtype, mask: object) -> object:
    """Cast a floating mask. In fp16 it is clamped to half of the range, which hides a token as well as -inf does and
    can be added to a score."""
    if not isinstance(mask, torch.Tensor) or not mask.is_floating_point():
        return mask
    return (mask.clamp(-FP16_MAX / 2, FP16_MAX / 2) if dtype == torch.float16 else mask).to(dtype)
