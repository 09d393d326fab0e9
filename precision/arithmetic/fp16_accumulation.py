"""Linear layers with fp16 accumulation: layers whose partial sums are proven to stay in fp16's range.

Every partial sum of ``x . w`` is at most ``amax(x) * max_row ||w||_1`` and at most ``max ||x_row|| * max ||w_row||_2``
(Cauchy-Schwarz), in whatever order the products are added. The margin of 2 covers rounding: adding ``p`` to a sum moves
the rounded sum by at most ``2 |p|``, because the sum does not change if ``|p|`` is below half a unit in its last place.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..base.amax import amax
from ..base.dtypes import FP16_MAX
from ..base.flags import flags_set
from ..base.message import Message
from .calibration import Calibration
from .linear import WeightProvider, lent
from .proofs import MARGIN, Proof, largest_row_norm

FP16_ACCUMULATION = "fp16_accumulation"
LABELS = {"amax": ("amax", "||w||1"), "norm": ("||x||", "||w||2")}


class SumBound(Proof):
    """Proof that no partial sum of a Linear exceeds fp16's range, from norms of its input and of its weight.

    ``terms``: products per sum (K), 0 until measured. ``gain``: the weight's norm in the smaller of the two bounds.
    ``by``: the name of that bound. ``proven``: the sums fit. ``evidence``: the numbers behind the decision as text,
    empty until measured.
    """

    gain = 0.0
    terms = 0
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
        return FP16_MAX / (MARGIN * self.gain) if self.gain else math.inf

    def holds(self, magnitude: float) -> bool:
        return self.proven and magnitude <= self.limit

    def prove(self, largest: float, norm: float, row_sum: float, row_norm: float, terms: int) -> None:
        """Decide from the largest input so far and the weight; an input with NaN or Inf is ignored.

        ``largest``, ``norm``: amax of the input and the largest 2-norm of its rows. ``row_sum``, ``row_norm``: largest
        1-norm and 2-norm of the weight's rows.
        """
        if not math.isfinite(largest) or not math.isfinite(norm):
            return
        self.terms = terms
        self._largest_amax, self._largest_norm = max(largest, self._largest_amax), max(norm, self._largest_norm)
        pairs = {"amax": (self._largest_amax, row_sum), "norm": (self._largest_norm, row_norm)}
        self.by = min(pairs, key=lambda by: math.prod(pairs[by]))
        of_input, self.gain = pairs[self.by]
        bound = of_input * self.gain
        self.proven = bound * MARGIN <= FP16_MAX
        input_norm, weight_norm = LABELS[self.by]
        numbers = f"{input_norm} {of_input:.3g}, {weight_norm} {self.gain:.3g}, K {terms}"
        self.evidence = Message("bound {0} of {1} ({2})", f"{bound:.4g}", f"{FP16_MAX:.0f}", numbers)


class Fp16AccumulationLinear:
    """Run a Linear with fp16 accumulation if its sums are proven to fit, in a scope in which the flag is off.

    ``inner``: the layer's forward. ``weights``: weight provider, or None if the module's weight is not accessible, so
    there is no proof.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inner: Callable[..., torch.Tensor],
        sums: SumBound,
        calibration: Calibration,
        weights: WeightProvider | None,
    ):
        self.module = module
        self.inner = inner
        self.sums = sums
        self.calibration = calibration
        self.weights = weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float16 or self.weights is None:
            return self.inner(x)
        if self.calibration.calibrating:
            self.sums.device = x.device
            return self._calibrate(x, self.weights)
        if not self.sums.proven:
            return self.inner(x)
        self.sums.record(amax(x) if self.sums.by == "amax" else largest_row_norm(x))
        with flags_set({FP16_ACCUMULATION: True}):
            return self.inner(x)

    def _calibrate(self, x: torch.Tensor, weights: WeightProvider) -> torch.Tensor:
        # Asked for once, for the reason at ``SafeOperation._calibrate`` (comfy/ops.py, resolve_cast_module_with_vbar).
        with lent(weights(self.module, x, torch.float16)) as (weight, bias):
            norms = [torch.linalg.vector_norm(weight, n, dim=-1, dtype=torch.float32).amax() for n in (1, 2)]
            numbers = torch.stack([amax(x), largest_row_norm(x), *norms])
            largest, norm, row_sum, row_norm = numbers.tolist()
            self.sums.prove(largest, norm, row_sum, row_norm, weight.shape[1])
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
