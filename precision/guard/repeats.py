"""The repeats of one failed call: how many there were, how many more are allowed, and what those in fp32 have shown."""

import math
from collections.abc import Callable, Sequence
from typing import Generic

from .failed_call import Attempt, FailedCall, Given, Result, Step
from .ladder import RandomStart
from .localize import Origin
from .log import GuardLog


class Repeats(Generic[Given, Step, Result]):
    """The repeats of one failed call.

    Args:
        start: the random numbers it began with.
        log: what was said of its model so far.
        most: how often it may be repeated to cure it; None for as often as the ladder asks.
            Evidence alone is not bounded by it.

    ``failed_in_fp32``: whether the call with the inputs it was given is NaN or Inf in fp32 too, None while unknown.
    """

    def __init__(self, call: FailedCall[Given, Step, Result], start: RandomStart, log: GuardLog, most: int | None):
        self.most = most
        self.failed_in_fp32: bool | None = None if call.about.steps else True
        self._call = call
        self._start = start
        self._log = log
        self._used = 0

    def may_take(self, number: int) -> bool:
        """Tell whether so many more repeats are allowed."""
        return self.most is None or self._used + number <= self.most

    def run(self, given: Given) -> Attempt[Result]:
        """Repeat the call as it was."""
        return self._again(lambda: self._call.run(given), "as it was")

    def watched(self, given: Given) -> tuple[Attempt[Result], Origin | None]:
        """Repeat the call as it was with every operation watched: (attempt, what failed)."""
        return self._again(lambda: self._call.watched(given), "to find what fails")

    def first_finite(self, steps: Sequence[Step], given: Given) -> tuple[Step, Attempt[Result]] | None:
        """Repeat the call at each step in turn until its result is finite; None if it is at none that is allowed."""
        for step in steps:
            if not self.may_take(1):
                return None
            attempt = self._at(step, given)
            if attempt.finite:
                return step, attempt
        return None

    def at(self, step: Step, given: Given) -> Attempt[Result]:
        """Repeat the call at a step, however many repeats are allowed."""
        return self._at(step, given)

    def fails_in_fp32(self, given: Given) -> bool:
        """Tell whether the call as it is is not finite in fp32 either; False where that may not be tried any more."""
        if self.failed_in_fp32 is None and self._evidence_allowed():
            self._at(self._call.about.in_fp32, given)
        return bool(self.failed_in_fp32)

    def finite_in_fp32(self, given: Given, zeroed: Sequence[str] = ()) -> bool:
        """Tell whether a variant of the call is finite in fp32:
        other inputs, or zeros for NaN and Inf of ``zeroed`` weights."""
        if not self._evidence_allowed():
            return False
        step = self._call.about.in_fp32
        return self._again(lambda: self._call.run_at(step, given, zeroed), "in fp32, to find the cause").finite

    def _at(self, step: Step, given: Given) -> Attempt[Result]:
        attempt = self._again(lambda: self._call.run_at(step, given), f"in {self._call.named(step)}")
        if step == self._call.about.in_fp32:
            self.failed_in_fp32 = not attempt.finite
        return attempt

    def _again(self, run: Callable, how: str):
        self._call.tell(f"Repeating {self._what} {how}")
        self._log.extra_calls += 1
        self._used += 1
        with self._start.again():
            return run()

    @property
    def _what(self) -> str:
        position, origin = self._call.about.position, self._call.about.default_origin
        if math.isfinite(position.sigma):
            return f"step {position.step}"
        return origin.layer if origin else "the call"

    def _evidence_allowed(self) -> bool:
        return self._log.on_nan != "retry_higher" or self.may_take(1)
