"""Scale an operand by a power of two so that it and its product fit fp16."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..dtypes import FP16_MAX
from .proofs import FLOOR_BITS, HEADROOM_BITS, Proof, fits_range
from .result_bound import RESULT_MARGIN, FiniteResult, ResultBound

if TYPE_CHECKING:
    from .bounds.known_values import MeasuredOnce
    from .bounds.value_bounds import ValueBound

MAX_GAIN = 2.0**16
MAX_FALLS = 2
ROOM_BESIDE = 64.0
"""How much operands may grow before a LoRA beside the weight must be fitted anew: of fp16's 30 bits, 12 are left below
what a rank of it mostly is."""
SMALLEST_KNOWN = 2.0 ** (6 - FLOOR_BITS)
"""The amax from which on an operand is not measured in each call: 64 times what fp16 is too coarse for."""


class ScaledOperand(Proof):
    """Bound the operand of an operation after it was multiplied by ``2**-exponent``."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times ``2**-exponent`` in fp16, exact, by one kernel where the device has one. A compiled graph
        multiplies by a tensor, whatever the exponent is."""
        if torch.compiler.is_compiling() and self.recorder.entry is not None:
            return (x * self.recorder.entry.scale()[0]).to(torch.float16)
        if not self.exponent:
            return x.to(torch.float16)
        recorded = x.requires_grad and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or recorded or not converts_results(x.device):
            return (x * 2.0**-self.exponent).to(torch.float16)
        return torch.mul(x, 2.0**-self.exponent, out=torch.empty_like(x, dtype=torch.float16))


class OperandScale(ScaledOperand):
    """Prove that an operand times ``2**-exponent`` fits fp16, and so does its product where that is fp16.

    It holds for operands whose amax is from ``floor`` to ``limit``: a sum of products is at most ``gain`` times that
    amax, where ``gain`` is the largest 1-norm of the weight's rows, or 1 where the device returns fp32.

    ``gain``: None until measured. ``in_fp32``: the operation runs in fp32. ``meets_zeros``: its operand was nothing but
    zeros once. ``result``: the proof that the result may be returned in fp16. ``covered``: it holds for any operand
    that is known to keep this bound; its result keeps ``reach``. ``once``: measures an operand that others have too.
    ``beside``: what is added beside the weight fits fp16 up to this amax. ``by_result``: measuring the result is
    enough, and costs less; ``finite``: measures it. ``owed``: this call is to measure it still.
    """

    def __init__(self, name: str, result: ResultBound | None = None):
        super().__init__(name)
        self.gain: float | None = None
        self.in_fp32 = False
        self.meets_zeros = False
        self.result = result or ResultBound()
        self.covered: ValueBound | None = None
        self.reach: ValueBound | None = None
        self.once: MeasuredOnce | None = None
        self.beside = math.inf
        self.by_result = False
        self.owed = False
        self.finite = FiniteResult(f"{name} result")
        self._falls = 0

    def forget(self) -> None:
        """Begin anew, for a model whose operands are others now."""
        super().forget()
        self.gain, self.in_fp32, self._falls = None, False, 0
        self.result.refuted = False
        if self.once is not None:
            self.once.forget()

    @property
    def limit(self) -> float:
        """The largest amax that stays finite; below any before the first measurement."""
        if self.gain is None:
            return -1.0
        own = self.result.limit if self.result.proven else self.limit_of_operand / self.gain
        return min(own, self.beside)

    @property
    def floor(self) -> float:
        """The amax below which an operand loses more to fp16's subnormal numbers than bf16 rounds away."""
        return 2.0 ** (self.exponent - FLOOR_BITS)

    def holds(self, magnitude: float) -> bool:
        """Tell whether an operand of this amax neither overflows nor underflows."""
        return fits_range(magnitude, self.limit, self.floor)

    def calibrate(self, magnitude: float, gain: float = 1.0) -> None:
        """Choose the exponent that keeps ``magnitude * gain`` two bits below fp16's largest number (``gain`` >= 1).

        Left to fp32: an operand whose amax keeps falling out of the range that its larger ones need, and a gain so
        large that scaling for it costs the operand its precision.
        """
        measured, self.gain, self.beside = self.gain is not None, gain, math.inf
        self.largest = max(self.largest, magnitude)
        self.meets_zeros = self.meets_zeros or magnitude == 0
        if gain > MAX_GAIN:
            self.in_fp32 = True
        if not 0 < magnitude < math.inf or self.holds(magnitude * 2.0**HEADROOM_BITS):
            return
        needed = math.ceil(math.log2(magnitude) + math.log2(gain / FP16_MAX)) + HEADROOM_BITS
        self._falls += measured and needed < self.exponent
        self.in_fp32 = self.in_fp32 or self._falls > MAX_FALLS
        self.exponent = needed

    def prove_result(self, magnitude: float, row_sum: float, bias: float) -> None:
        """Decide whether the result fits fp16, as ``ResultBound.prove``; not where the operand is scaled or in fp32."""
        self.result.prove(magnitude, row_sum, bias)
        self.result.proven = self.result.proven and not (self.in_fp32 or self.exponent)

    def leave_room(self) -> float:
        """Choose the amax up to which what is added beside the weight must fit fp16; return ``room``."""
        largest = ROOM_BESIDE * max(self.largest, self.covered.largest if self.covered else 0.0)
        self.beside = largest if 0 < largest < math.inf else self.limit_of_operand
        return self.room

    @property
    def room(self) -> float:
        """That amax of the operand as it is multiplied."""
        return self.beside * 2.0**-self.exponent

    @property
    def limit_of_operand(self) -> float:
        """The largest amax that stays finite when it is scaled."""
        return FP16_MAX * 2.0**self.exponent

    @property
    def takes_fp16(self) -> bool:
        """Tell whether the operand may come in fp16 as it is."""
        return not (self.in_fp32 or self.exponent or self.meets_zeros)

    def cover(self, known: ValueBound | None, reach: ValueBound | None, magnitude: float, wide: bool) -> None:
        """Decide whether the proof holds for every operand that keeps a bound, unscaled.

        Args:
            known: the bound; None where there is none.
            reach: of the result, by it.
            magnitude: of the measured operand, which is far from fp16's smallest numbers.
            wide: whether the product is fp32.
        """
        self.covered = self.reach = None
        if known is None or reach is None or self.in_fp32 or self.exponent or not magnitude >= SMALLEST_KNOWN:
            return
        limit = FP16_MAX / RESULT_MARGIN
        if known.largest <= limit and (reach.largest <= limit or (wide and not self.result.proven)):
            self.covered, self.reach = known, reach

    def measure_by_result(self, operand: torch.Tensor, result: torch.Tensor, magnitude: float) -> None:
        """Decide whether the result is measured in place of an operand of this amax, which nothing has hidden in."""
        far_from_smallest = self.takes_fp16 and SMALLEST_KNOWN <= magnitude < math.inf
        self.by_result = self.covered is None and far_from_smallest and result.nbytes < operand.nbytes
        self.finite.recorder.device = result.device if self.by_result else None

    def record_result(self, result: torch.Tensor, alone: bool) -> None:
        """Record the amax of a result where its operand was not measured."""
        if self.owed:
            self.owed = False
            self.finite.recorder.record_amax(result, alone)

    def record(self, x: torch.Tensor, operand: torch.Tensor, alone: bool) -> None:
        """Record the amax of ``operand``, which is ``x`` as it is multiplied: fewer bytes than ``x`` and as good, but
        that zeros may be what is left of numbers that fp16 does not hold. An operation that has met zeros records
        ``x``."""
        self.recorder.record_amax(x if self.meets_zeros else operand, alone)

    def magnitude(self, numbers: list[float]) -> float:
        """Return the operand's amax, from what was recorded."""
        if self.meets_zeros:
            return numbers[0]
        return numbers[0] * 2.0**self.exponent if numbers[0] else math.nan

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times ``2**-exponent`` in fp16; there is no exponent where the result is fp16."""
        return x.to(torch.float16) if self.result.proven else super().scaled(x)

    @property
    def times(self) -> float | torch.Tensor:
        """What products of the operand are multiplied by: a tensor in a compiled graph, whatever the exponent is."""
        if torch.compiler.is_compiling() and self.recorder.entry is not None:
            return self.recorder.entry.scale()[1]
        return 2.0**self.exponent

    def unscaled(self, product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``product`` times ``2**exponent``, plus ``bias``, in fp32 and in one pass; ``product`` may be written
        to."""
        if torch.compiler.is_compiling() and self.recorder.entry is not None:
            product = product.float() * self.recorder.entry.scale()[1]
            return product if bias is None else product + bias
        if bias is None:
            return product.float().mul_(2.0**self.exponent) if self.exponent else product.float()
        recorded = product.requires_grad or (bias.requires_grad and torch.is_grad_enabled())
        if product.dtype != torch.float32 or recorded:
            return torch.add(bias, product, alpha=2.0**self.exponent)
        if torch.compiler.is_compiling():
            return product.mul_(2.0**self.exponent).add_(bias)
        return torch.add(bias, product, alpha=2.0**self.exponent, out=product)


def converts_results(device: torch.device) -> bool:
    """Tell whether an element-wise kernel of a device writes a result in another dtype than its operands'."""
    # Metal has kernels for operands and results of one dtype, from torch 2.8 on for ``mul`` too (PyTorch #152515):
    # "Failed to create function state object for: mul_dense_scalar_half_float". Nobody has tried the other devices.
    return device.type in ("cpu", "cuda")
