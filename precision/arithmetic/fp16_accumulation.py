"""Linear layers with fp16 accumulation: layers whose partial sums are proven to stay in fp16's range.

Every partial sum of ``x . w`` is at most ``max ||x_row||_2 * max ||w_row||_2`` (Cauchy-Schwarz), in whatever order the
products are added. The margin of 2 covers rounding: adding ``p`` to a sum moves
the rounded sum by at most ``2 |p|``, because the sum does not change if ``|p|`` is below half a unit in its last place.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..base.dtypes import FP16_MAX
from ..base.flags import flags_set
from ..base.message import Message
from .calibration import Calibration
from .linear import WeightProvider, lent
from .proofs import MARGIN, Proof, largest_row_norm

FP16_ACCUMULATION = "fp16_accumulation"


class SumBound(Proof):
    """Proof that no partial sum of a Linear exceeds fp16's range, from norms of its input and of its weight.

    ``terms``: products per sum (K), 0 until measured. ``gain``: largest 2-norm of the weight's rows. ``proven``: the
    sums fit. ``evidence``: the numbers behind the decision as text, empty until measured.
    """

    gain = 0.0
    terms = 0
    proven = False
    evidence = ""
    _largest = 0.0

    def forget(self) -> None:
        super().forget()
        self.proven, self._largest = False, 0.0

    @property
    def limit(self) -> float:
        """Largest 2-norm of the input's rows for which the proof holds."""
        return FP16_MAX / (MARGIN * self.gain) if self.gain else math.inf

    def holds(self, magnitude: float) -> bool:
        return self.proven and magnitude <= self.limit

    def prove(self, norm: float, gain: float, terms: int) -> None:
        """Decide from the largest 2-norm of the rows of the inputs so far and of the weight; an input with NaN or Inf
        is ignored."""
        if not math.isfinite(norm):
            return
        self._largest = max(norm, self._largest)
        self.gain, self.terms = gain, terms
        bound = self._largest * gain
        self.proven = bound * MARGIN <= FP16_MAX
        numbers = f"||x|| {self._largest:.3g}, ||w||2 {gain:.3g}, K {terms}"
        self.evidence = Message("bound {0} of {1} ({2})", f"{bound:.4g}", f"{FP16_MAX:.0f}", numbers)


class ProvenSums:
    """Run the product of a Linear with fp16 accumulation if its sums are proven to fit, in a scope in which the flag is
    off.

    ``weights``: weight provider, or None if the module's weight is not accessible, so there is no proof.
    """

    def __init__(
        self, module: torch.nn.Module, sums: SumBound, calibration: Calibration, weights: WeightProvider | None
    ):
        self.module = module
        self.sums = sums
        self.calibration = calibration
        self.weights = weights

    def __call__(self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return ``product(x)``; in a calibrating call, the product with the weight that is measured."""
        if x.dtype != torch.float16 or self.weights is None:
            return product(x)
        if self.calibration.calibrating:
            self.sums.device = x.device
            return self._calibrate(x, self.weights)
        if not self.sums.proven:
            return product(x)
        self.sums.record(largest_row_norm(x))
        with flags_set({FP16_ACCUMULATION: True}):
            return product(x)

    def _calibrate(self, x: torch.Tensor, weights: WeightProvider) -> torch.Tensor:
        # Asked for once, for the reason at ``SafeOperation._calibrate`` (comfy/ops.py, resolve_cast_module_with_vbar).
        with lent(weights(self.module, x, torch.float16)) as (weight, bias):
            norm, gain = torch.stack([largest_row_norm(x), largest_row_norm(weight)]).tolist()
            self.sums.prove(norm, gain, weight.shape[1])
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
