"""A call of a model made again: as it was, at a higher precision, with other inputs or weights."""

import math
from collections.abc import Callable, Sequence

import torch

from ....precision.amax import amax_value
from ....precision.arithmetic.patching import Patch
from ....precision.guard.ladder import RandomStart
from ....precision.guard.log import GuardLog
from ....precision.guard.policy import ALL_IN_FP32, Escalation
from ..run.call import Call
from .escalation import EscalatedLayers, RangeObserver
from .state import Guarded

INSIDE = "halfsafe_guard"
"""The entry of ``transformer_options`` that tells the guard's innermost wrapper how to run a call; the model is given none."""


class Repeats:
    """The repeats of one call.

    Args:
        call: the call.
        start: the random numbers it began with.
        guarded: what the guard knows of its model, and ``log`` what it said of it.
        most: how often it may be repeated to cure it; None for evidence alone.

    ``failed_in_fp32``: whether the call as it is is NaN or Inf in fp32 too, None while unknown. ``observer``: what measured the
    last repeat at a higher precision.
    """

    def __init__(self, call: Call, start: RandomStart, guarded: Guarded, log: GuardLog, most: int):
        self.call = call
        self.most = most
        self.failed_in_fp32: bool | None = True if guarded.escalation.whole else None
        self.observer: RangeObserver
        self._start = start
        self._guarded = guarded
        self._log = log
        self._used = 0

    @property
    def left(self) -> int:
        """How many more repeats are allowed."""
        return max(0, self.most - self._used)

    def again(self, run: Callable[[Call], torch.Tensor] | None) -> torch.Tensor:
        """Repeat the call, with ``run`` in the place of the model inside of all wrappers."""
        self._log.extra_calls += 1
        self._used += 1
        with self._start.again():
            return self.call(**{INSIDE: run})

    def attempt(self, rung: Escalation) -> tuple[torch.Tensor, float]:
        """Repeat the call at a rung: (result, its largest magnitude)."""
        result, size = self._at(rung, ())
        if rung.whole:
            self.failed_in_fp32 = not math.isfinite(size)
        return result, size

    def _at(self, rung: Escalation, patches: Sequence[Patch]) -> tuple[torch.Tensor, float]:
        layers = EscalatedLayers(rung, self.call.model, self._guarded.modes)
        self.observer = RangeObserver(layers)
        observing = [*self.observer.patches, *patches]
        result = self.again(lambda call: layers.call(call, observing=observing))
        return result, amax_value(result)

    def fails_in_fp32(self) -> bool:
        """Tell whether the call as it is is not finite in fp32 either; False where that may not be tried any more."""
        if self.failed_in_fp32 is None and self._allowed():
            self.attempt(ALL_IN_FP32)
        return bool(self.failed_in_fp32)

    def finite_in_fp32(self, call: Call, patches: Sequence[Patch] = ()) -> bool:
        """Tell whether a variant of the call is finite in fp32; ``patches``: what to put on the model for it."""
        if not self._allowed():
            return False
        own, self.call = self.call, call
        try:
            return math.isfinite(self._at(ALL_IN_FP32, patches)[1])
        finally:
            self.call = own

    def _allowed(self) -> bool:
        return self._log.on_nan != "retry_higher" or bool(self.left)
