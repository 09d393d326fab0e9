"""Linear layers with fp16 accumulation: layers whose partial sums are proven to stay in fp16's range.

Every partial sum of ``x . w`` is at most ``amax(x) * max_row ||w||_1`` and at most ``max ||x_row|| * max ||w_row||_2``
(Cauchy-Schwarz), in whatever order the products are added. The margin of 2 covers rounding: adding ``p`` to a sum moves
the rounded sum by at most ``2 |p|``, because the sum does not change if ``|p|`` is below half a unit in its last place.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from ..base import flags
from ..base.amax import amax
from ..base.dtypes import FP16_MAX
from ..base.message import Message, joined
from .calibration import Calibration
from .linear import WeightProvider, lent
from .operand_scale import ScaledOperand
from .proofs import FLOOR_BITS, MARGIN, largest_row_norm

MAX_EXPONENT = 6
WORTH_SCALING = 1024
"""Outputs from which fp16 sums save more time than the pass that scales the input costs: 6 bytes per input element
against 2 operations per output at twice the speed. An RTX 4090 breaks even at 924, a 3090 at 455
(benchmarks/cost.py)."""
FEW = "unscaled: fewer than {0} outputs gain nothing"
FP16_ACCUMULATION = "fp16_accumulation"
LABELS = {"amax": ("amax", "||w||1"), "norm": ("||x||", "||w||2")}


class SumBound(ScaledOperand):
    """Proof that no partial sum of a Linear exceeds fp16's range, from norms of its input and of its weight.

    ``terms``: products per sum (K), 0 until measured. ``gain``: the weight's norm in the smaller of the two bounds.
    ``by``: the name of that bound. ``proven``: the sums fit, if ``scales`` is set with a scaled input. ``evidence``:
    the numbers behind the decision as text, empty until measured.
    """

    gain = 0.0
    terms = 0
    scales = False
    by = "amax"
    proven = False
    evidence = ""
    _largest_amax = _largest_norm = 0.0

    def forget(self) -> None:
        super().forget()
        self.proven, self._largest_amax, self._largest_norm = False, 0.0, 0.0

    @property
    def limit(self) -> float:
        """Largest magnitude of the input for which the proof holds."""
        return FP16_MAX * 2.0**self.exponent / (MARGIN * self.gain) if self.gain else math.inf

    def holds(self, magnitude: float) -> bool:
        return self.proven and magnitude <= self.limit

    def prove(self, largest: float, norm: float, row_sum: float, row_norm: float, terms: int, can_scale: bool) -> None:
        """Decide from the largest input so far and the weight; an input with NaN or Inf is ignored.

        ``largest``, ``norm``: amax of the input and the largest 2-norm of its rows. ``row_sum``, ``row_norm``: largest
        1-norm and 2-norm of the weight's rows. ``can_scale``: scaling the input saves time.
        """
        if not math.isfinite(largest) or not math.isfinite(norm):
            return
        self.terms = terms
        self._largest_amax, self._largest_norm = max(largest, self._largest_amax), max(norm, self._largest_norm)
        pairs = {"amax": (self._largest_amax, row_sum), "norm": (self._largest_norm, row_norm)}
        self.by = min(pairs, key=lambda by: math.prod(pairs[by]))
        of_input, self.gain = pairs[self.by]
        self.exponent = needed_exponent(of_input * self.gain)
        scalable = can_scale and self._largest_amax >= 2.0 ** (self.exponent - FLOOR_BITS)
        self.scales = self.exponent != 0
        self.proven = self.exponent == 0 or (self.exponent <= MAX_EXPONENT and scalable)
        input_norm, weight_norm = LABELS[self.by]
        numbers = f"{input_norm} {of_input:.3g}, {weight_norm} {self.gain:.3g}, K {terms}"
        few = "" if can_scale or self.proven else Message(FEW, WORTH_SCALING)
        scaled = Message("input scaled by 2^-{0}", self.exponent) if self.proven and self.scales else ""
        bound = Message("bound {0} of {1} ({2})", f"{of_input * self.gain:.4g}", f"{FP16_MAX:.0f}", numbers)
        self.evidence = joined([bound, few, scaled], ", ")


def needed_exponent(bound: float) -> float:
    """Return 0 if the bound fits with its margin, else the power of two that leaves twice the margin."""
    if bound * MARGIN <= FP16_MAX:
        return 0
    return math.ceil(math.log2(bound * 2 * MARGIN / FP16_MAX)) if math.isfinite(bound) else math.inf


class Fp16AccumulationLinear:
    """Run a Linear with fp16 accumulation if its sums are proven to fit, in a scope in which the flag is off.

    ``inner``: the forward to use otherwise. ``weights``: weight provider, or None if the module's weight is not
    accessible, so there is no proof. ``by_layer``: switch the flag around this layer; else the flag of the scope
    applies.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inner: Callable[..., torch.Tensor],
        sums: SumBound,
        calibration: Calibration,
        weights: WeightProvider | None,
        by_layer: bool = True,
    ):
        self.module = module
        self.inner = inner
        self.sums = sums
        self.calibration = calibration
        self.weights = weights
        self.by_layer = by_layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float16 or self.weights is None:
            return self.inner(x)
        if self.calibration.calibrating:
            self.sums.device = x.device
            return self._calibrate(x, self.weights)
        if not self.sums.proven:
            if not self.by_layer and not self.sums.terms:
                self.sums.record(x.new_full((), math.inf, dtype=torch.float32))
            return self.inner(x)
        self.sums.record(amax(x) if self.sums.by == "amax" else largest_row_norm(x))
        with flags.switched(FP16_ACCUMULATION, True) if self.by_layer else nullcontext():
            return self._scaled(x, self.weights) if self.sums.scales else self.inner(x)

    def _calibrate(self, x: torch.Tensor, weights: WeightProvider) -> torch.Tensor:
        # Asked for once, for the reason at ``SafeOperation._calibrate`` (comfy/ops.py, resolve_cast_module_with_vbar).
        with lent(weights(self.module, x, torch.float16)) as (weight, bias):
            norms = [torch.linalg.vector_norm(weight, n, dim=-1, dtype=torch.float32).amax() for n in (1, 2)]
            numbers = torch.stack([amax(x), largest_row_norm(x), *norms])
            largest, norm, row_sum, row_norm = numbers.tolist()
            rows, terms = weight.shape
            self.sums.prove(largest, norm, row_sum, row_norm, terms=terms, can_scale=rows >= WORTH_SCALING)
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    def _scaled(self, x: torch.Tensor, weights: WeightProvider) -> torch.Tensor:
        """Multiply a scaled input. Unscaling and bias are part of the matmul in eager code."""
        with lent(weights(self.module, x, torch.float16, torch.float16)) as (weight, bias):
            scaled = self.sums.scaled(x)
            if torch.compiler.is_compiling() and self.sums.entry is not None:
                product = F.linear(scaled, weight).mul_(self.sums.entry.scale()[1])
                return product if bias is None else product.add_(bias)
            summand, beta = (weight.new_empty(1), 0) if bias is None else (bias, 1)
            rows = scaled.reshape(-1, weight.shape[1])
            product = torch.addmm(summand, rows, weight.t(), beta=beta, alpha=2.0**self.sums.exponent)
            return product.reshape(*x.shape[:-1], weight.shape[0])
