"""Operands in fp16: scaled by a power of two so that they and their products fit, and shared by the layers of a block
that are given the same tensor."""

from __future__ import annotations

import math
import weakref

import torch

from ..base.dtypes import FP16_MAX
from ..base.layer_names import block_of
from .proofs import FLOOR_BITS, HEADROOM_BITS, Proof, fits_range

MAX_GAIN = 2.0**16
MAX_FALLS = 2
SMALLEST_UNWATCHED = 2.0 ** (6 - FLOOR_BITS)
"""The amax from which on an unscaled operand is not measured in each call: 64 times what fp16 is too coarse for."""


class ScaledOperand(Proof):
    """Bound the operand of an operation after it was multiplied by ``2**-exponent``."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times ``2**-exponent`` in fp16, exact. A compiled graph multiplies by a tensor, even by 1."""
        if torch.compiler.is_compiling() and self.entry is not None:
            return (x * self.entry.scale()[0]).to(torch.float16)
        return self.scaled_eagerly(x)

    def scaled_eagerly(self, x: torch.Tensor) -> torch.Tensor:
        """Scale ``x`` in eager code, in a single kernel where the device has such a kernel."""
        if not self.exponent:
            return x if x.dtype is torch.float16 else x.half()  # faster on the host than ``to``
        recorded = x.requires_grad and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or recorded or not converts_results(x.device):
            return (x * 2.0**-self.exponent).to(torch.float16)
        return torch.mul(x, 2.0**-self.exponent, out=torch.empty_like(x, dtype=torch.float16))


class OperandScale(ScaledOperand):
    """Prove that an operand times ``2**-exponent`` fits fp16, and its product too where the device returns fp16.

    It holds for operands whose amax is from ``floor`` to ``limit``: a sum of products is at most ``gain`` times that
    amax, where ``gain`` is the largest 1-norm of the weight's rows, or 1 where the device returns fp32.

    ``gain``: None until measured. ``in_fp32``: the operation runs in fp32. ``meets_zeros``: its operand was nothing but
    zeros once. ``is_watched``: the operand is measured in every call, as it is scaled or was nearly too small for fp16;
    an overflow of any other shows in the result, as Inf or NaN. ``fits_result``: the result may be fp16, with room to
    grow; ``is_refuted``: once it did not fit, or fp16 was too coarse for it.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.gain: float | None = None
        self.in_fp32 = False
        self.meets_zeros = False
        self.is_watched = False
        self.fits_result = self.is_refuted = False
        self._falls = 0
        self._smallest = math.inf

    def forget(self) -> None:
        super().forget()
        self.gain, self.in_fp32, self._falls, self._smallest = None, False, 0, math.inf
        self.is_refuted = False

    @property
    def limit(self) -> float:
        """The largest amax that stays finite; below any before the first measurement."""
        return -1.0 if self.gain is None else FP16_MAX * 2.0**self.exponent / self.gain

    @property
    def floor(self) -> float:
        """The amax below which an operand loses more to fp16's subnormal numbers than bf16 rounds away."""
        return 2.0 ** (self.exponent - FLOOR_BITS)

    def holds(self, magnitude: float) -> bool:
        return fits_range(magnitude, self.limit, self.floor)

    def calibrate(self, magnitude: float, gain: float = 1.0) -> None:
        """Choose the exponent that keeps ``magnitude * gain`` two bits below fp16's largest number (``gain`` >= 1).

        Left to fp32: an operand whose amax keeps falling out of the range that its larger ones need, and a gain so
        large that scaling for it costs the operand its precision.
        """
        measured, self.gain = self.gain is not None, gain
        self.largest = max(self.largest, magnitude)
        self.meets_zeros = self.meets_zeros or magnitude == 0
        self._smallest = min(self._smallest, magnitude or math.inf)
        if gain > MAX_GAIN:
            self.in_fp32 = True
        self._fit(magnitude, gain, measured)
        self.is_watched = self.exponent != 0 or self.meets_zeros or self._smallest < SMALLEST_UNWATCHED

    def _fit(self, magnitude: float, gain: float, measured: bool) -> None:
        if not 0 < magnitude < math.inf or self.holds(magnitude * 2.0**HEADROOM_BITS):
            return
        needed = math.ceil(math.log2(magnitude) + math.log2(gain / FP16_MAX)) + HEADROOM_BITS
        self._falls += measured and needed < self.exponent
        self.in_fp32 = self.in_fp32 or self._falls > MAX_FALLS
        self.exponent = needed

    def prove_result(self, magnitude: float, row_sum: float, bias: float) -> None:
        """Decide whether the result fits fp16: at most ``row_sum`` times the amax of the operand, plus ``bias``."""
        finite = math.isfinite(magnitude)
        self.is_refuted |= finite and 2.0**HEADROOM_BITS * magnitude * row_sum + 2.0 * bias > FP16_MAX
        self.fits_result = finite and not (self.is_refuted or self.in_fp32 or self.exponent)

    def refute_result(self) -> None:
        """Return fp32 until the model's operands are others."""
        self.fits_result, self.is_refuted = False, True

    def record_operand(self, x: torch.Tensor, operand: torch.Tensor) -> None:
        """Record the amax of ``operand``, the fp16 form of ``x``."""
        # Zeros may be all that fp16 leaves of small numbers.
        self.record_amax(x if self.meets_zeros else operand)

    def magnitude(self, numbers: list[float]) -> float:
        if self.meets_zeros:
            return numbers[0]
        return numbers[0] * 2.0**self.exponent if numbers[0] else math.nan

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times ``2**-exponent`` in fp16; there is no exponent where the result is fp16."""
        return x.to(torch.float16) if self.fits_result else super().scaled(x)

    def unscaled(self, product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``product`` times ``2**exponent``, plus ``bias``, in fp32 and in a pass; may write to ``product``."""
        if torch.compiler.is_compiling() and self.entry is not None:
            product = product.float() * self.entry.scale()[1]
            return product if bias is None else product + bias
        if bias is None:
            return product.float().mul_(2.0**self.exponent) if self.exponent else product.float()
        recorded = product.requires_grad or (bias.requires_grad and torch.is_grad_enabled())
        own = product.dtype != torch.float32 or recorded or torch.compiler.is_compiling()
        return torch.add(bias, product, alpha=2.0**self.exponent, out=None if own else product)


def converts_results(device: torch.device) -> bool:
    """Tell whether an element-wise kernel of a device writes a result in another dtype than its operands'."""
    # Metal has kernels for operands and results of one dtype, from torch 2.8 on for ``mul`` too (PyTorch #152515):
    # "Failed to create function state object for: mul_dense_scalar_half_float". Nobody has tried the other devices.
    return device.type in ("cpu", "cuda")


class SharedOperands:
    """Make the operands of a model's operations.

    A call that calibrates finds out who shares an operand: who is given the very same tensor next, not written to in
    between, in the same block. It holds an operand no longer than the model holds that tensor. Nothing is left for a
    later block: ComfyUI's model compiler lends the next one the memory of the one before
    (``nodes/host/replay/model_compiler.py``).
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a call that calibrates: who shares an operand is found out anew."""
        self._calls: dict[OperandScale, int] = {}
        self._first: dict[OperandScale, OperandScale] = {}
        self.sharing: dict[OperandScale, list[OperandScale]] = {}
        self.end()

    def end(self) -> None:
        """Let go of the call's tensors."""
        self._x: torch.Tensor | None = None
        self._measured: weakref.ref | None = None
        self._operand: torch.Tensor | None = None
        self._scale: OperandScale | None = None
        self._left = 0

    def of(self, scale: OperandScale, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in fp16, scaled, and recorded where watched; a compiled graph does so in the kernel it has."""
        if torch.compiler.is_compiling():
            operand = scale.scaled(x)
            scale.record_operand(x, operand)
            return operand
        first = self._scale
        if self._x is x and first and self._first.get(scale) is first and first.exponent == scale.exponent:
            operand, self._left = self._operand, self._left - 1
            if not self._left:
                self._x = self._operand = None
            return operand
        operand = scale.scaled_eagerly(x)
        if scale.gain is None:
            scale.missed.any = True
        elif scale.is_watched:
            scale.record_operand(x, operand)
        if takers := self.sharing.get(scale):
            self._x, self._scale, self._operand, self._left = x, scale, operand, len(takers)
        elif self._x is not None:
            self._x = self._operand = None
        return operand

    def measured(self, scale: OperandScale, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in fp16, scaled, in a call that calibrates."""
        operand, first = scale.scaled_eagerly(x), self._scale
        calls = self._calls[scale] = self._calls.get(scale, 0) + 1
        last = self._measured() if self._measured else None
        if first and calls == 1 and last is x and first is not scale and self._is_same(first, scale, operand):
            self._first[scale] = first
            self.sharing.setdefault(first, []).append(scale)
        else:
            self._first.pop(scale, None)
            self._measured, self._scale = weakref.ref(x, self._let_go), scale
            self._operand = None if operand is x else operand
        return operand

    def _let_go(self, measured: weakref.ref) -> None:
        if measured is self._measured:
            self._operand = None

    def _is_same(self, first: OperandScale, scale: OperandScale, operand: torch.Tensor) -> bool:
        if block_of(first.name) != block_of(scale.name) or first.exponent != scale.exponent:
            return False
        return self._operand is None or torch.equal(self._operand, operand)
