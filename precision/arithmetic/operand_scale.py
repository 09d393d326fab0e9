"""Scale operands by powers of two so that they and their products fit fp16."""

import math

import torch

from ..base.dtypes import FP16_MAX
from .proofs import FLOOR_BITS, HEADROOM_BITS, Proof, fits_range

MAX_GAIN = 2.0**16
MAX_FALLS = 2
SMALLEST_UNWATCHED = 2.0 ** (6 - FLOOR_BITS)
"""The amax from which on an unscaled operand is not measured in each call: 64 times what fp16 is
too coarse for."""


class OperandScale(Proof):
    """Proof that an operand times ``2**-exponent`` fits fp16, and its product too if the device
    returns fp16.

    It holds for operands with an amax between ``floor`` and ``limit``: a sum of products is at most
    ``gain`` times that amax. ``gain`` is the largest 1-norm of the weight's rows, or 1 if the
    device returns fp32.

    ``gain``: None until measured. ``in_fp32``: the operation runs in fp32. ``meets_zeros``: the
    operand was all zeros in some call. ``is_watched``: the operand is measured in every call,
    because it is scaled or was nearly too small for fp16, or because it was never measured; the
    overflow of an unwatched operand shows as Inf or NaN in the result.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.gain: float | None = None
        self.in_fp32 = False
        self.meets_zeros = False
        self.is_watched = True
        self._falls = 0
        self._smallest = math.inf

    def forget(self) -> None:
        super().forget()
        self.gain, self.in_fp32, self._falls, self._smallest = None, False, 0, math.inf
        self.is_watched = True

    @property
    def limit(self) -> float:
        """Largest amax for which the product stays finite; -1 before the first measurement."""
        return -1.0 if self.gain is None else FP16_MAX * 2.0**self.exponent / self.gain

    @property
    def floor(self) -> float:
        """Smallest amax for which fp16's subnormal numbers lose less than rounding to bf16."""
        return 2.0 ** (self.exponent - FLOOR_BITS)

    def holds(self, magnitude: float) -> bool:
        return fits_range(magnitude, self.limit, self.floor)

    def calibrate(self, magnitude: float, gain: float = 1.0) -> None:
        """Choose the exponent that keeps ``magnitude * gain`` two bits below 65504 (``gain`` >= 1).

        The operation moves to fp32 if its amax keeps falling out of the range that larger operands
        need (``MAX_FALLS``), or if ``gain`` is so large that scaling costs the operand its
        precision (``MAX_GAIN``).
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

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x * 2**-exponent`` in fp16, exact. A compiled graph multiplies by a tensor, even
        if the factor is 1."""
        if torch.compiler.is_compiling() and self.entry is not None:
            return (x * self.entry.scale()[0]).to(torch.float16)
        return self.scaled_eagerly(x)

    def scaled_eagerly(self, x: torch.Tensor) -> torch.Tensor:
        """Scale ``x`` in eager code, in a single kernel if the device has one that also casts."""
        if not self.exponent:
            return x if x.dtype is torch.float16 else x.half()  # faster on the host than ``to``
        recorded = x.requires_grad and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or recorded or not converts_results(x.device):
            return (x * 2.0**-self.exponent).to(torch.float16)
        return torch.mul(x, 2.0**-self.exponent, out=torch.empty_like(x, dtype=torch.float16))

    def recorded(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` scaled in fp16, and record its amax. Under torch.compile, cast and record
        are fused into the kernel that makes ``x``."""
        operand = self.scaled(x)
        # Zeros may be all that fp16 leaves of small numbers.
        self.record_amax(x if self.meets_zeros else operand)
        return operand

    def magnitude(self, numbers: list[float]) -> float:
        """Return the amax of the unscaled operand from its record; NaN if fp16 rounded all of it to
        zero."""
        if self.meets_zeros:
            return numbers[0]
        return numbers[0] * 2.0**self.exponent if numbers[0] else math.nan

    def unscaled(self, product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``product * 2**exponent + bias`` in fp32, in one pass; may overwrite
        ``product``."""
        if bias is None:
            return product.float().mul_(2.0**self.exponent) if self.exponent else product.float()
        recorded = product.requires_grad or (bias.requires_grad and torch.is_grad_enabled())
        own = product.dtype != torch.float32 or recorded
        return torch.add(bias, product, alpha=2.0**self.exponent, out=None if own else product)

    def unscaled_in_graph(self, product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``product * 2**exponent + bias`` in fp32, in a graph of torch.compile: the factor
        is a tensor."""
        product = product.float() * (self.entry.scale()[1] if self.entry else 2.0**self.exponent)
        return product if bias is None else product + bias


def converts_results(device: torch.device) -> bool:
    """True if an element-wise kernel of a device can write its result in another dtype than its
    operands."""
    # Metal has kernels for operands and results of one dtype, from torch 2.8 on for ``mul`` too
    # (PyTorch #152515): "Failed to create function state object for: mul_dense_scalar_half_float".
    # Nobody has tried the other devices.
    return device.type in ("cpu", "cuda")
