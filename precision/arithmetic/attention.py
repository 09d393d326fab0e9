"""Attention in fp16 whose scores cannot overflow: an attention that does not fit fp16 runs in fp32.

A score is at most ``max ||q|| * max ||k|| * scale``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..base.amax import amax
from .attention_bounds import AttentionBound, AttentionCall, AttentionRange
from .calibration import Calibration
from .proofs import Proof


class Kernels(NamedTuple):
    """Functions that can compute an attention of ComfyUI: ``attention``, the function to call, and
    ``fp32``, a replacement that accepts fp32, which kernels of 16 bits or less do not.

    ``fused``: ``attention`` keeps its scores in fp32 registers and scales them before rounding.
    ``foreign``: ``attention`` is another pack's override, whose result is checked too.
    ``unbounded``: the call has an argument that the bounds of its numbers do not take into account.
    """

    attention: Callable
    fp32: Callable
    fused: bool = True
    foreign: bool = False
    unbounded: bool = False


def run_in_fp32(kernels: Kernels, call: AttentionCall) -> torch.Tensor:
    """Run an attention in fp32. Returns the dtype of ``q``."""
    return call.in_dtype(torch.float32).run(kernels.fp32).to(call.q.dtype)


class SafeAttention:
    """Run attention with fp16 operands if no operand and no score can exceed fp16's range, else in
    fp32.

    Attentions are identified by their order in a model call; an attention that was never measured
    runs in fp32. The result of a foreign kernel is checked, because its own arithmetic may
    overflow. ``asked``: returns True if the current attention has to run in fp32 whatever its
    scores are. ``fp16_flops``: floating-point operations with fp16 operands in a call.
    """

    def __init__(self, calibration: Calibration, asked: Callable[[], bool] = lambda: False):
        self.calibration = calibration
        self.asked = asked
        self.range = calibration.add(AttentionRange("attention"))
        self.finite = calibration.add(Proof("attention result"))
        self.bounds: list[AttentionBound] = []
        self.calls_in_fp32: list[bool] = []
        self.any_in_fp32 = False
        self.fp16_flops = 0
        self.index = 0

    def begin(self) -> None:
        self.index = 0
        if self.calibration.calibrating:
            self.fp16_flops = 0

    def __call__(self, kernels: Kernels, q: torch.Tensor, k, v, heads: int, *args, **kwargs) -> torch.Tensor:
        """Run one attention with ComfyUI's arguments. Returns the dtype of ``q``."""
        index, self.index = self.index, self.index + 1
        if (
            kwargs.get("mask") is None
            and not any(isinstance(each, torch.Tensor) for each in args)
            and not torch.compiler.is_dynamo_compiling()
            and not (self.calibration.calibrating or index >= len(self.bounds))
            and kernels.fused
            and not (kernels.foreign or kernels.unbounded or self.calls_in_fp32[index] or self.bounds[index].by_norm)
        ):
            half = q.half()
            self.bounds[index].record_amax(half)
            return kernels.attention(half, k.half(), v.half(), heads, *args, **kwargs).to(q.dtype)
        call = AttentionCall(q, k, v, heads, args, kwargs, kernels.fused)
        if self.calibration.calibrating:
            with self.calibration.hiding.pause():
                return self._calibrated(index, kernels, call)
        measured = index < len(self.calls_in_fp32) and not kernels.unbounded
        if not measured or (self.any_in_fp32 and self.calls_in_fp32[index]):
            return call.in_dtype(torch.float32).run(kernels.fp32)
        call = call.in_dtype(torch.float16)
        if torch.compiler.is_compiling():
            self.range.record(call.largest())
        else:
            self.bounds[index].record_call(call)
        result = call.run(kernels.attention)
        if kernels.foreign:
            self.finite.record_amax(result)
        return result.to(q.dtype)

    def _calibrated(self, index: int, kernels: Kernels, call: AttentionCall) -> torch.Tensor:
        if index == len(self.calls_in_fp32):
            self.calls_in_fp32.append(False)
            self.bounds.append(self.calibration.add(AttentionBound(f"attention {index}")))
        result = None
        self.range.device = self.finite.device = call.q.device
        amax_of_q, largest = torch.stack([amax(call.q), call.largest()]).tolist()
        in_fp32 = self.asked() or kernels.unbounded or self.calls_in_fp32[index] or not self.range.holds(largest * 2.0)
        if not in_fp32:
            result = call.in_dtype(torch.float16).run(kernels.attention).to(call.q.dtype)
            in_fp32 = kernels.foreign and not math.isfinite(amax(result).item())
        self.calls_in_fp32[index] = in_fp32
        self.any_in_fp32 = self.any_in_fp32 or in_fp32
        flops = 4 * call.q.numel() * call.k.shape[-2]
        self.calibration.flops[self.range.name] += flops
        if in_fp32 or result is None:
            return call.in_dtype(torch.float32).run(kernels.fp32)
        self.fp16_flops += flops
        self.bounds[index].calibrate(call, amax_of_q, largest)
        self.calibration.in_fp16 = True
        return result
