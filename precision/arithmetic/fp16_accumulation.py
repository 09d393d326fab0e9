"""Linear layers with fp16 accumulation, whose overflow is seen in the result of the call.

A partial sum that passes fp16's range is Inf, in whatever order the products are added, and Inf
plus any number is Inf or NaN: what overflowed never becomes a finite number within the product. It
reaches the result of the call as Inf or NaN, unless model code hides it, behind which the result of
the layer itself is checked (``hiding.py``).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..base.amax import amax
from ..base.flags import flags_set
from .calibration import Calibration
from .linear import WeightProvider, lent
from .proofs import Proof

FP16_ACCUMULATION = "fp16_accumulation"


class Fp16Sums(Proof):
    """Run the product of a Linear with fp16 accumulation, in a scope in which the flag is off,
    until fp16 sums overflow.

    The calibrating call returns products with fp16 sums as later calls do, or with fp32 sums if
    fp16 sums overflow: the first run of a seed equals the next. As a proof it checks the amax of
    the layer's result, in the calls after :meth:`look`.

    ``weights``: weight provider, or None if the module's weight is not accessible, so sums stay in
    fp32.
    ``ran``: some calibrating call ran the layer on a finite fp16 input. ``overflowed``: the result
    of fp16 sums was Inf or NaN in one, by fp32 sums too or not: a layer with such results, which
    model code hides, would fail each call.
    """

    def __init__(self, name: str, module: torch.nn.Module, calibration: Calibration, weights: WeightProvider | None):
        super().__init__(name)
        self.module = module
        self.calibration = calibration
        self.weights = weights
        self.ran = self.overflowed = False
        self._ran_on: torch.device | None = None

    @property
    def in_fp16(self) -> bool:
        """True if calls after the calibrating one sum in fp16."""
        return self.ran and not self.overflowed

    def forget(self) -> None:
        super().forget()
        self.ran = self.overflowed = False

    def look(self) -> None:
        """Check the layer's result in every later call."""
        self.device = self._ran_on

    def __call__(self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return ``product(x)``; in a calibrating call, the product of the weight that was asked
        for once."""
        if x.dtype != torch.float16 or self.weights is None:
            return product(x)
        if self.calibration.calibrating:
            return self._calibrate(x, self.weights)
        if not self.in_fp16:
            return product(x)
        with flags_set({FP16_ACCUMULATION: True}):
            result = product(x)
        if self.device is not None:
            self.record_amax(result)
        return result

    def _calibrate(self, x: torch.Tensor, weights: WeightProvider) -> torch.Tensor:
        # Asked for once, for the reason at ``SafeOperation._calibrate`` (comfy/ops.py,
        # resolve_cast_module_with_vbar).
        with self.calibration.hiding.pause(), lent(weights(self.module, x, torch.float16)) as (weight, bias):
            bias = None if bias is None else bias.to(x.dtype)
            with flags_set({FP16_ACCUMULATION: True}):
                result = F.linear(x, weight, bias)
            operand, tried = torch.stack([amax(x), amax(result)]).tolist()
            if math.isfinite(operand):  # what an input that is not finite gives says nothing about sums
                self.ran, self._ran_on = True, x.device
                self.overflowed = self.overflowed or not math.isfinite(tried)
            if not self.in_fp16:
                result = F.linear(x, weight, bias)
        if self.in_fp16:
            self.calibration.hiding.ran(self.name, self)
        return result
