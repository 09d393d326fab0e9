"""An acting part that calibrates: its attempts measure, and their results are checked."""

from __future__ import annotations

import torch

from ....precision.arithmetic.calibration import Calibration
from .interceptor import Acting


class CalibratedActing(Acting):
    """Act with the measurements and checks of a calibration. ``watches``: there is something to
    measure."""

    calibration: Calibration
    watches = True
    _alike: bool | None = None

    def begin_call(self) -> None:
        self.calibration.begin_call()

    def take_back(self) -> None:
        self.calibration.take_back()

    def stands(self, result: torch.Tensor) -> bool:
        return not self.watches or self.calibration.stands(result)

    def goes_on_after(self, error: RuntimeError) -> bool:
        return self.watches and self.calibration.goes_on_after(error)

    def blocks_are_alike(self) -> bool:
        """Compare what the blocks of the model allocate."""
        raise NotImplementedError

    def allocates_alike(self) -> bool:
        """True if all blocks of the model allocate alike, so that ComfyUI's compiler may run; False
        in a calibrating call."""
        if self.watches and self.calibration.calibrating:
            self._alike = None
            return False
        if self._alike is None:
            self._alike = self.blocks_are_alike()
        return self._alike
