"""Attention in fp16 whose scores cannot overflow. ``BoundedAttention`` leaves each call alone, smooths its keys or runs it in
fp32 (Accumulation's ``attention``); ``SafeAttention`` runs a call in fp16 where all of it fits (``fp16_safe``).

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
from .fp16_accumulation import MARGIN
from .ranges import Ranges, largest_row_norm
from .slot import HEADROOM_BITS, Slot

AS_IS, SMOOTH, FP32 = "unchanged", "smooth-K", "fp32"
MODES = (AS_IS, SMOOTH, FP32)
LARGEST_SCORE = FP16_MAX / MARGIN
COARSE_SCORE = 512.0
WORTH_SMOOTHING = 0.25
SMALLEST_VALUE = 2.0**-10


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
        ranges: the model's calibration; all attentions record in one slot there.
        always_fp32: compute every fp16 attention in fp32, without calibration.
    """

    def __init__(self, ranges: Ranges, always_fp32: bool = False):
        self.ranges = ranges
        self.always_fp32 = always_fp32
        self.scores = ranges.slots["attention"] = ScoreSlot("attention")
        self.slots: list[Scores] = []
        self.changed = False
        self.met: set[torch.dtype] = set()
        self.unfused = False
        self._index = 0

    def begin(self) -> None:
        """Call before each model call."""
        self._index = 0

    def __call__(
        self, attention: Callable, fp32_attention: Callable, q, k, v, heads: int, *args, fused=True, foreign=False, **kwargs
    ):
        """One attention with ComfyUI's arguments. Returns the dtype of ``q``.

        Args:
            attention: what would run.
            fp32_attention: what runs in fp32 in its place.
            fused: ``attention`` keeps its scores in fp32 registers and scales before it rounds.
            foreign: ``attention`` is somebody's override, whose result is checked too.
        """
        if self.ranges.calibrating:
            self.met.add(q.dtype)
        self.unfused = self.unfused or not fused
        if q.dtype != torch.float16:
            return attention(q, k, v, heads, *args, **kwargs)
        if self.always_fp32:
            return run_in(torch.float32, fp32_attention, q, k, v, heads, args, kwargs).to(q.dtype)
        index, self._index = self._index, self._index + 1
        if self.ranges.calibrating:
            return self._calibrate(self._met(index), attention, fp32_attention, q, k, v, heads, args, kwargs, fused)
        mode = self.slots[index % len(self.slots)].mode if self.changed else AS_IS
        if mode == FP32:
            return run_in(torch.float32, fp32_attention, q, k, v, heads, args, kwargs).to(q.dtype)
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

    def _calibrate(self, slot: Scores, attention, fp32_attention, q, k, v, heads, args, kwargs, fused) -> torch.Tensor:
        self.scores.device = q.device
        try:
            return self._in_first_mode_that_fits(slot, attention, fp32_attention, q, k, v, heads, args, kwargs, fused)
        finally:
            self.changed = self.changed or slot.mode != AS_IS

    def _in_first_mode_that_fits(self, slot, attention, fp32_attention, q, k, v, heads, args, kwargs, fused) -> torch.Tensor:
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
        slot.mode = FP32
        return run_in(torch.float32, fp32_attention, q, k, v, heads, args, kwargs).to(q.dtype)

    def _rather_smoothed(self, bound: float, q, k, heads, kwargs) -> bool:
        """Scores that fit fp16 but are coarse in it, where all of them share what makes them large."""
        if not COARSE_SCORE < bound < math.inf:
            return False
        return score_bound(q, smoothed(k), heads, kwargs, False).item() < WORTH_SMOOTHING * bound

    def summary(self) -> str:
        """One line: how many attentions run how, and those that were changed with their bound; empty before a call."""
        if self.always_fp32:
            return "all fp16 attentions in fp32" if self.met else ""
        if not self.met:
            return ""
        if not self.slots:
            return f"nothing to do: attention runs in {', '.join(sorted(str(d).removeprefix('torch.') for d in self.met))}"
        counts = [f"{sum(slot.mode == mode for slot in self.slots)} {mode}" for mode in MODES]
        changed = [f"{slot.name}: {slot.mode}, score bound {slot.bound:.3g}" for slot in self.slots if slot.mode != AS_IS]
        return f"{len(self.slots)} in fp16: {', '.join(counts)}" + "".join(f"; {line}" for line in changed[:8])


class OperandSlot(Slot):
    """q, k and v of one attention, as they are multiplied. ``size``: of a head; ``factor``: of a score, the mask's included;
    ``by_norm``: amax alone bounds its scores too roughly, so the norms of rows are recorded."""

    width = 3

    def __init__(self, name: str):
        super().__init__(name)
        self.gain = 1.0
        self.size = 1
        self.factor = 1.0
        self.by_norm = False

    def forget(self) -> None:
        super().forget()
        self.gain = 1.0

    def record_operands(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, factor: float) -> None:
        """Record what bounds the scores, and the amax of v: a kernel each, or two for a norm.

        ``factor``: of this call's scores. A call may bring a mask, or another attention, where the measured one had none.
        """
        self.size, self.factor = max(self.size, _head_size(q, heads)), max(self.factor, factor)
        if not self.cells or self.cell.device != q.device:
            self.missed = True
            return
        for cell, tensor in zip(self.cells, (q, k), strict=False):
            if self.by_norm:
                cell.write_row_norm(tensor.unflatten(-1, (-1, _head_size(q, heads))))
            else:
                cell.write_amax(tensor)
        self.cells[2].write_amax(v)

    def magnitude(self, values: list[float]) -> float:
        """The largest number the attention can hold; not finite where one of them is not."""
        if not all(map(math.isfinite, values)):
            return math.nan
        of_q, of_k = (value if self.by_norm else value * self.size**0.5 for value in values[:2])
        smallest = SMALLEST_VALUE * FP16_MAX / values[2] if values[2] else math.inf
        return max(of_q, of_k, of_q * of_k * self.factor, values[2], smallest)


class SafeAttention:
    """Attention with fp16 operands wherever neither an operand nor a score can pass fp16's range, in fp32 elsewhere.

    Attentions are told apart by their order in a model call; one that was never measured runs in fp32. The layers before one
    with large scores return fp32: q and k are rounded once and not twice.
    """

    def __init__(self, ranges: Ranges):
        self.ranges = ranges
        self.slot = ranges.slot("attention")
        self.operands: list[OperandSlot] = []
        self.calls_in_fp32: list[bool] = []
        self.any_in_fp32 = False
        self.fp32_flops = 0
        self.index = 0

    def begin(self) -> None:
        """Call before each model call."""
        self.index = 0
        if self.ranges.calibrating:
            self.fp32_flops = 0
            self.slot.gain = 1.0

    def __call__(self, attention: Callable, fp32_attention: Callable, q, k, v, heads: int, *args, fused: bool = True, **kwargs):
        """One attention with ComfyUI's arguments. Returns the dtype of ``q``, or fp16 beside other fp16 results.

        Args:
            attention: what runs on fp16 operands.
            fp32_attention: what runs in its place in fp32, which kernels of 16 bit or less cannot take.
            fused: ``attention`` keeps its scores in fp32.
        """
        index, self.index = self.index, self.index + 1
        if self.ranges.calibrating:
            self._calibrate(index, q, k, v, heads, args, kwargs, fused)
        if index >= len(self.calls_in_fp32) or (self.any_in_fp32 and self.calls_in_fp32[index]):
            return run_in(torch.float32, fp32_attention, q, k, v, heads, args, kwargs)
        dtype = torch.float16 if self.ranges.fp16_results else q.dtype
        q, k, v = (tensor.to(torch.float16) for tensor in (q, k, v))
        if torch.compiler.is_compiling():
            self.slot.record(largest_in_attention(q, k, v, heads, args, kwargs, fused))
        elif not self.ranges.calibrating:
            factor = score_factor(q, heads, kwargs, fused) * _mask_factor(args, kwargs)
            self.operands[index].record_operands(q, k, v, heads, factor)
        return run_in(torch.float16, attention, q, k, v, heads, args, kwargs).to(dtype)

    def _calibrate(self, index: int, q, k, v, heads: int, args: tuple, kwargs: dict, fused: bool) -> None:
        for tensor in (q, k, v):
            self.ranges.check(tensor)
        largest = largest_in_attention(q, k, v, heads, args, kwargs, fused)
        in_fp32, flops = not self.slot.holds(largest.item() * 2.0), 4 * q.numel() * k.shape[-2]
        if index == len(self.calls_in_fp32):
            self.calls_in_fp32.append(False)
            slot = OperandSlot(f"attention {index}")
            self.ranges.slots[slot.name] = slot
            self.operands.append(slot)
        self.ranges.end_chain(widen=largest.item() > COARSE_SCORE)
        in_fp32 = self.calls_in_fp32[index] = self.calls_in_fp32[index] or in_fp32
        self.any_in_fp32 = self.any_in_fp32 or in_fp32
        self.fp32_flops += flops if in_fp32 else 0
        self.slot.flops += flops
        self.slot.device = q.device
        if not in_fp32:
            self._choose_bound(self.operands[index], q, k, v, heads, args, kwargs, fused)

    def _choose_bound(self, slot: OperandSlot, q, k, v, heads: int, args: tuple, kwargs: dict, fused: bool) -> None:
        slot.device, slot.size = q.device, _head_size(q, heads)
        slot.factor = score_factor(q, heads, kwargs, fused) * _mask_factor(args, kwargs)
        largest = [amax(tensor).item() for tensor in (q, k, v)]
        slot.by_norm = False
        slot.by_norm = not slot.holds(slot.magnitude(largest) * 2.0**HEADROOM_BITS)


def smoothed(k: torch.Tensor) -> torch.Tensor:
    """The keys less their mean over tokens (dimension -2). Any one vector would do, so its rounding is no error."""
    return k - k.mean(-2, keepdim=True, dtype=torch.float32).to(k.dtype)


def score_bound(q: torch.Tensor, k: torch.Tensor, heads: int, kwargs: dict, fused: bool) -> torch.Tensor:
    """The largest number an attention's scores can reach, 0-dim fp32: ``max ||q|| * max ||k||``, scaled."""
    of_q, of_k = head_norms(q, k, heads)
    return of_q * of_k * score_factor(q, heads, kwargs, fused)


def head_norms(q: torch.Tensor, k: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest 2-norm of a head's rows of q and of k, each 0-dim fp32."""
    size = _head_size(q, heads)
    return tuple(largest_row_norm(tensor.unflatten(-1, (-1, size))) for tensor in (q, k))


def score_factor(q: torch.Tensor, heads: int, kwargs: dict, fused: bool) -> float:
    """What a product of a row of q and one of k is multiplied by at most; unfused scores are scaled after the product."""
    scale = kwargs.get("scale") or _head_size(q, heads) ** -0.5
    return scale if fused else max(scale, 1.0)


def _head_size(q: torch.Tensor, heads: int) -> int:
    return q.shape[-1] if q.dim() == 4 else q.shape[-1] // heads


def largest_in_attention(q, k, v, heads: int, args: tuple, kwargs: dict, fused: bool) -> torch.Tensor:
    """The largest number an attention can hold, 0-dim fp32: a norm of a row of q or k, a score, an element of v.

    A score is at most ``max ||q|| * max ||k||`` (Cauchy-Schwarz), times the softmax scale where ``fused``; with a mask it
    counts eightfold, so that no score outweighs a masked one. Values so small that fp16 would round them away count as
    too large. A result is a mean of rows of v.
    """
    rows = head_norms(q, k, heads)
    score = rows[0] * rows[1] * (score_factor(q, heads, kwargs, fused) * _mask_factor(args, kwargs))
    largest = amax(v)
    return torch.stack([*rows, score, largest, SMALLEST_VALUE * FP16_MAX / largest]).amax()


def _mask_factor(args: tuple, kwargs: dict) -> float:
    masked = any(torch.is_tensor(mask) and mask.is_floating_point() for mask in (*args, kwargs.get("mask")))
    return 8.0 if masked else 1.0


def run_in(dtype: torch.dtype, attention: Callable, q, k, v, heads: int, args: tuple, kwargs: dict) -> torch.Tensor:
    """Run an attention on operands and masks in ``dtype``. Returns what it returns."""
    operands = (tensor.to(dtype) for tensor in (q, k, v))
    masks = (_mask_in(dtype, mask) for mask in args)
    kwargs = {**kwargs, "mask": _mask_in(dtype, kwargs["mask"])} if "mask" in kwargs else kwargs
    return attention(*operands, heads, *masks, **kwargs)


def _mask_in(dtype: torch.dtype, mask):
    """Cast a floating mask. In fp16 it is clamped to half of the range, which hides a token as well as -inf does and can be
    added to a score."""
    if not torch.is_tensor(mask) or not mask.is_floating_point():
        return mask
    return (mask.clamp(-FP16_MAX / 2, FP16_MAX / 2) if dtype == torch.float16 else mask).to(dtype)
