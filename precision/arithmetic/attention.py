"""Attention in fp16 that cannot overflow in its scores: left alone, with smoothed keys, or in fp32, call by call.

A score is at most ``max ||q|| * max ||k|| * scale``. Keys that share a large offset (OneDiff #454: SVD) pass fp16's range
though their scores differ little: subtracting one vector from every key changes all scores of a query alike, which leaves
the softmax as it was (smooth-K, SageAttention, arXiv:2411.10958). What is still too large is computed in fp32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..amax import amax
from ..dtypes import FP16_MAX
from .fp16_sums import MARGIN
from .linear import head_norms, score_factor
from .ranges import Ranges, Slot

AS_IS, SMOOTH, FULL = "unchanged", "smooth-K", "fp32"
MODES = (AS_IS, SMOOTH, FULL)
LARGEST_SCORE = FP16_MAX / MARGIN
COARSE_SCORE = 512.0
WORTH_SMOOTHING = 0.25


@dataclass
class Scores:
    """One attention of a model call: its mode, and the largest score it can reach."""

    name: str
    mode: str = AS_IS
    bound: float = 0.0


class ScoreSlot(Slot):
    """The scores of all attentions: one limit holds for them."""

    @property
    def limit(self) -> float:
        return LARGEST_SCORE

    def holds(self, magnitude: float) -> bool:
        return magnitude <= self.limit


class BoundedAttention:
    """Every fp16 attention of a model, told apart by their order in a call.

    Args:
        ranges: the model's measuring state; all attentions record in one slot there.
        always_full: compute every fp16 attention in fp32, measuring nothing.
    """

    def __init__(self, ranges: Ranges, always_full: bool = False):
        self.ranges = ranges
        self.always_full = always_full
        self.scores = ranges.slots["attention"] = ScoreSlot("attention")
        self.slots: list[Scores] = []
        self.changed = False
        self.met: set[torch.dtype] = set()
        self.unfused = False
        self._index = 0

    def begin(self) -> None:
        """Call before each model call."""
        self._index = 0

    def __call__(self, attention: Callable, full: Callable, q, k, v, heads: int, *args, fused=True, foreign=False, **kwargs):
        """One attention with ComfyUI's arguments. Returns the dtype of ``q``.

        Args:
            attention: what would run.
            full: what runs in fp32 in its place.
            fused: ``attention`` keeps its scores in fp32 registers and scales before it rounds.
            foreign: ``attention`` is somebody's override, whose result is checked too.
        """
        if self.ranges.measuring:
            self.met.add(q.dtype)
        self.unfused = self.unfused or not fused
        if q.dtype != torch.float16:
            return attention(q, k, v, heads, *args, **kwargs)
        if self.always_full:
            return in_fp32(full, q, k, v, heads, args, kwargs)
        index, self._index = self._index, self._index + 1
        if self.ranges.measuring:
            return self._measure(self._met(index), attention, full, q, k, v, heads, args, kwargs, fused)
        mode = self.slots[index % len(self.slots)].mode if self.changed else AS_IS
        if mode == FULL:
            return in_fp32(full, q, k, v, heads, args, kwargs)
        if mode == SMOOTH:
            k = smoothed(k)
        result = attention(q, k, v, heads, *args, **kwargs)
        bound = score_bound(q, k, heads, kwargs, fused)
        self.scores.record(bound + 0 * amax(result) if foreign else bound)
        return result

    def _met(self, index: int) -> Scores:
        if index == len(self.slots):
            self.slots.append(Scores(f"attention {index}"))
        return self.slots[index]

    def _measure(self, slot: Scores, attention, full, q, k, v, heads, args, kwargs, fused) -> torch.Tensor:
        self.scores.device = q.device
        try:
            return self._in_first_mode_that_fits(slot, attention, full, q, k, v, heads, args, kwargs, fused)
        finally:
            self.changed = self.changed or slot.mode != AS_IS

    def _in_first_mode_that_fits(self, slot, attention, full, q, k, v, heads, args, kwargs, fused) -> torch.Tensor:
        for mode in MODES[MODES.index(slot.mode) : -1]:
            keys = smoothed(k) if mode == SMOOTH else k
            bound = score_bound(q, keys, heads, kwargs, fused).item()
            if mode == AS_IS:
                slot.bound = bound if math.isfinite(bound) else slot.bound
            if bound > LARGEST_SCORE and math.isfinite(bound):
                continue
            if mode == AS_IS and not fused and self._rather_smoothed(bound, q, k, heads, kwargs):
                continue
            result = attention(q, keys, v, heads, *args, **kwargs)
            if not math.isfinite(bound) or torch.isfinite(amax(result)):
                slot.mode = mode
                return result
        slot.mode = FULL
        return in_fp32(full, q, k, v, heads, args, kwargs)

    def _rather_smoothed(self, bound: float, q, k, heads, kwargs) -> bool:
        """Scores that fit fp16 but are coarse in it, where all of them share what makes them large."""
        if not COARSE_SCORE < bound < math.inf:
            return False
        return score_bound(q, smoothed(k), heads, kwargs, False).item() < WORTH_SMOOTHING * bound

    def summary(self) -> str:
        """One line: how many attentions run how, and those that were changed with their bound; empty before a call."""
        if self.always_full:
            return "all fp16 attentions in fp32" if self.met else ""
        if not self.met:
            return ""
        if not self.slots:
            return f"nothing to do: attention runs in {', '.join(sorted(str(d).removeprefix('torch.') for d in self.met))}"
        counts = [f"{sum(slot.mode == mode for slot in self.slots)} {mode}" for mode in MODES]
        changed = [f"{slot.name}: {slot.mode}, score bound {slot.bound:.3g}" for slot in self.slots if slot.mode != AS_IS]
        return f"{len(self.slots)} in fp16: {', '.join(counts)}" + "".join(f"; {line}" for line in changed[:8])


def smoothed(k: torch.Tensor) -> torch.Tensor:
    """The keys less their mean over tokens (dimension -2). Any one vector would do, so its rounding is no error."""
    return k - k.mean(-2, keepdim=True, dtype=torch.float32).to(k.dtype)


def score_bound(q: torch.Tensor, k: torch.Tensor, heads: int, kwargs: dict, fused: bool) -> torch.Tensor:
    """The largest number an attention's scores can reach, 0-dim fp32: ``max ||q|| * max ||k||``, scaled."""
    of_q, of_k = head_norms(q, k, heads)
    return of_q * of_k * score_factor(q, heads, kwargs, fused)


def in_fp32(attention: Callable, q, k, v, heads: int, args: tuple, kwargs: dict) -> torch.Tensor:
    """An attention on fp32 operands and mask, its result in the dtype of ``q``."""
    wide = (tensor.float() for tensor in (q, k, v))
    kwargs = {**kwargs, "mask": _wide_mask(kwargs["mask"])} if "mask" in kwargs else kwargs
    return attention(*wide, heads, *map(_wide_mask, args), **kwargs).to(q.dtype)


def _wide_mask(mask):
    return mask.float() if torch.is_tensor(mask) and mask.is_floating_point() else mask
