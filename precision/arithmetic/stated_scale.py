"""Scale of an fp8 product's input that a calibration left in the file, used while the inputs fit it."""

import torch

from ..base.amax import amax
from ..base.dtypes import max_of
from ..formats.fp8 import power_of_two_scale
from .calibration import Calibration, InputRange
from .proofs import HEADROOM_BITS

E4M3 = torch.float8_e4m3fn
FINE = 2.0**-6
"""Smallest amax that a scale serves, as a share of the largest input that it holds: below, small inputs become
subnormal numbers of e4m3fn. Error of inputs (trained UNet, 201 layers, 4 runs of 16 steps): 2.65 % with their own scale
and with one 64 times larger; 2.9 % on average, and 11 % in single layers, with one 256 times larger."""
USED = "the file's scale, enlarged four times, quantizes the input, and every seventh call checks that the input fits"
PASSED = "each call computes the scale of the input, which does not fit the file's scale"
HIDES_INF = "each call computes the scale of the fp16 input, because the file's scale would hide an overflow"


class StatedScale(InputRange):
    """The scale that a file states for a layer's input, with headroom, and the range of the inputs measured so far.

    A file states ``amax / 448`` of the inputs of its calibration. Later inputs may pass that, and are clipped to finite
    numbers: in a trained UNet those of 6 to 23 % of the layers, by up to 1.6 times, which costs up to 7 % of error. A
    larger scale costs nothing, as e4m3fn is a floating-point format. So the scale in use is the next power of two from
    4 times the stated scale, and it is used if the measured inputs fit without that headroom. fp16 inputs do not use
    it: Inf would become 448 and the overflow before it would not show.

    ``scale``: 0-dim fp32 on the input's device; None while each input needs its own. ``reason``: why, for the report.
    """

    def __init__(self, name: str, stated: float, calibration: Calibration):
        super().__init__(name)
        self.held = max_of(E4M3) * power_of_two_scale(stated * max_of(E4M3), E4M3)
        self.calibration = calibration
        self.scale: torch.Tensor | None = None
        self.reason = ""

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the scale for an input, or None if the input needs its own, as in a calibrating call, which measures
        it."""
        if not self.calibration.calibrating:
            return self.scale if self.range[1] else None
        self.measure(amax(x).item())
        smallest, largest = self.range
        limit = self.held * 2.0**HEADROOM_BITS
        fits = limit * FINE <= smallest and largest <= self.held and largest > 0
        self.reason = HIDES_INF if x.dtype is torch.float16 else USED if fits else PASSED
        self.scale = torch.full((), limit / max_of(E4M3), device=x.device) if self.reason is USED else None
        return None
