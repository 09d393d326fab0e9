"""One operation whose operand is scaled to fp16: what was measured of it, and what follows from that."""

import math

import torch

from ..amax import amax
from ..dtypes import FP16_MAX
from .cells import Cell

HEADROOM_BITS = 2
FLOOR_BITS = 12
MAX_GAIN = 2.0**16
MAX_FALLS = 2
RESULT_MARGIN = 2.0


class Slot:
    """One operation: its operand is scaled by ``2**-exponent``, which holds magnitudes from ``floor`` to ``limit``.

    ``gain``: by how much the operation can raise a magnitude in fp16; None until it was measured. ``in_fp32``: it runs in
    fp32. ``flops``: floating-point operations of one model call. ``largest``: the largest magnitude of all calls so far.
    ``device``: where it ran when it was measured; ``cells``: its numbers there, ``cell`` the first; ``missed``: it ran in this
    call without one. ``uses``: how often it ran in the call that calibrated. ``returns_fp16``: its result fits fp16, as ``bias``, the
    largest magnitude of its own, plus ``row_sum`` times that of its operand does. ``stays_wide``: found not to fit once.
    ``meets_zeros``: its operand was nothing but zeros once.
    ``copies``: the operation before it that has the same operand, which is cast and recorded there; ``copied_by``: the reverse.
    """

    width = 1
    """How many numbers it records."""

    def __init__(self, name: str):
        self.name = name
        self.exponent = 0
        self.gain: float | None = None
        self.in_fp32 = False
        self.flops = 0
        self.largest = 0.0
        self.device: torch.device | None = None
        self.cells: list[Cell] = []
        self.cell: Cell | None = None
        self.missed = False
        self.uses = 0
        self.meets_zeros = False
        self.returns_fp16 = False
        self.stays_wide = False
        self.row_sum = 1.0
        self.bias = 0.0
        self.copies: Slot | None = None
        self.copied_by: list[Slot] = []
        self._falls = 0

    def forget(self) -> None:
        """Begin anew, for a model whose operands are others now."""
        self.gain, self.in_fp32, self.stays_wide, self.largest, self._falls = None, False, False, 0.0, 0

    @property
    def limit(self) -> float:
        """The largest magnitude that stays finite; below any before the first measurement."""
        if self.gain is None:
            return -1.0
        if self.returns_fp16:
            return (FP16_MAX / RESULT_MARGIN - self.bias) / self.row_sum
        return FP16_MAX * 2.0**self.exponent / self.gain

    @property
    def floor(self) -> float:
        """The magnitude below which an operand loses more to fp16's subnormal numbers than bf16 rounds away."""
        return 2.0 ** (self.exponent - FLOOR_BITS)

    def record(self, magnitude: torch.Tensor) -> None:
        """Keep the larger of ``magnitude`` (0-dim fp32) and what this call has recorded already; NaN stays."""
        if self.cell is None or self.cell.device != magnitude.device:
            self.missed = True
        else:
            self.cell.record(magnitude)

    def record_operand(self, x: torch.Tensor, operand: torch.Tensor) -> None:
        """Record the amax of ``operand``, which is ``x`` as it is multiplied: fewer bytes than ``x`` and as good, but that zeros
        may be what is left of numbers that fp16 does not hold. An operation that has met zeros records ``x``."""
        operand = x if self.meets_zeros else operand
        if torch.compiler.is_compiling() or self.uses != 1 or self.cell is None or self.cell.device != operand.device:
            self.record(amax(operand))
        else:
            self.cell.write_amax(operand)

    def magnitude(self, values: list[float]) -> float:
        """The operand's magnitude, from the numbers it has recorded."""
        if self.meets_zeros:
            return values[0]
        return values[0] * 2.0**self.exponent if values[0] else math.nan

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` times ``2**-exponent``, exact, in fp16, by one kernel. A compiled graph multiplies by a tensor, whatever the
        exponent is."""
        if torch.compiler.is_compiling() and self.cell is not None and not self.returns_fp16:
            return (x * self.cell.scale()[0]).to(torch.float16)
        if not self.exponent:
            return x.to(torch.float16)
        recorded = x.requires_grad and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or recorded or not converts_results(x.device):
            return (x * 2.0**-self.exponent).to(torch.float16)
        return torch.mul(x, 2.0**-self.exponent, out=torch.empty_like(x, dtype=torch.float16))

    def unscaled(self, product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``product`` times ``2**exponent``, plus ``bias``, in fp32 and in one pass; ``product`` may be written to."""
        if torch.compiler.is_compiling() and self.cell is not None:
            product = product.float() * self.cell.scale()[1]
            return product if bias is None else product + bias
        if bias is None:
            return product.float().mul_(2.0**self.exponent) if self.exponent else product.float()
        recorded = product.requires_grad or (bias.requires_grad and torch.is_grad_enabled())
        if product.dtype == torch.float32 and not recorded:
            return product.mul_(2.0**self.exponent).add_(bias) if torch.compiler.is_compiling() else torch.add(
                bias, product, alpha=2.0**self.exponent, out=product
            )
        return torch.add(bias, product, alpha=2.0**self.exponent)

    def holds(self, magnitude: float) -> bool:
        """Tell whether an operand of this magnitude neither overflows nor underflows; no NaN or inf is held.

        Nor is exactly fp16's largest number, which is what model code's own clamp leaves of an overflow (``clamp_fp16`` in
        ``comfy/ldm/lumina/model.py``).
        """
        return self.limit > 0 and magnitude != FP16_MAX and (magnitude == 0 or self.floor <= magnitude <= self.limit)

    def calibrate(self, magnitude: float, gain: float = 1.0) -> None:
        """Choose the exponent that keeps ``magnitude * gain`` two bits below fp16's largest number (``gain`` >= 1).

        Left to fp32: an operand whose magnitude keeps falling out of the range that its larger ones need, and a gain so
        large that scaling for it costs the operand its precision.
        """
        measured, self.gain = self.gain is not None, gain
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
        """Decide whether the result fits fp16 with room to grow: it is at most ``magnitude * row_sum + bias``.

        Args:
            magnitude: of the operand.
            row_sum: the largest 1-norm of the weight's rows.
            bias: the largest magnitude of the bias.
        """
        self.row_sum, self.bias = row_sum, bias
        if math.isfinite(magnitude):
            self.stays_wide = self.stays_wide or 2.0**HEADROOM_BITS * magnitude * row_sum + 2.0 * bias > FP16_MAX
        self.returns_fp16 = math.isfinite(magnitude) and not (self.stays_wide or self.in_fp32 or self.exponent)


def converts_results(device: torch.device) -> bool:
    """Tell whether an element-wise kernel of a device writes a result in another dtype than its operands'."""
    # Metal has kernels for operands and results of one dtype, from torch 2.8 on for ``mul`` too (PyTorch #152515): "Failed to
    # create function state object for: mul_dense_scalar_half_float". Nobody has tried the other devices.
    return device.type in ("cpu", "cuda")
