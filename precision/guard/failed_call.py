"""A call that gave NaN or Inf, as whoever made it can repeat it, and its repeats: what :mod:`case` decides over."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..base.modes import FP32
from .inputs import NotFiniteInput
from .ladder import RandomStart
from .localize import Origin
from .log import CallPosition, GuardLog
from .wording import Wording

Given = TypeVar("Given")
Step = TypeVar("Step")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Attempt(Generic[Result]):
    """One result of a call.

    Args:
        largest: its largest magnitude before any clamp; NaN or inf where it is not finite.
        observed: what was measured while it was made, for the call that made it.
    """

    result: Result
    largest: float
    observed: Any = None

    @property
    def finite(self) -> bool:
        """Tell whether it holds neither NaN nor Inf."""
        return math.isfinite(self.largest)


class Weights(Protocol):
    """The weights of what a call runs, named as its modules are."""

    def not_finite(self) -> dict[str, torch.Tensor]:
        """Return name -> weight or buffer with NaN or Inf."""
        ...

    def has_nan(self, name: str) -> bool:
        """Tell whether a weight, quantized or not, holds NaN."""
        ...

    def bad_copy(self, origin: Origin) -> str:
        """Describe the weight of the operation that failed first, if the device's copy alone is not finite; empty for
        any other."""
        ...

    def sentence(self, name: str) -> str:
        """Describe a weight that is not finite: what made it so and what to do."""
        ...

    def patch_sentence(self, layer: str) -> str:
        """Describe the LoRA or other patch of a layer's weight that holds NaN or Inf; empty where none does."""
        ...


@dataclass(frozen=True)
class Circumstances(Generic[Step]):
    """Facts on a failed call, before any repeat.

    Args:
        position: where it stands in its run.
        batch: how many rows a result has.
        images: how many images a result has, of which row r is of image r modulo ``images``;
            0 where its rows are of all images.
        device: where it runs.
        steps: what it can be repeated at, the last all in fp32; the first may be ``present``.
            Empty where it was in fp32 already.
        in_fp32: the step at which all of it runs in fp32.
        present: the step it failed at, where it may be repeated so before others.
        locates_first: the operation is looked for before higher steps are tried, as a call costs little of its run.
        hidden: the result is finite, but the model's own code clamped what was not.
        promised: the step that the model's plan falls back to, whatever the guard is to do; None where it has none.
        compiled: torch.compile runs it.
        default_origin: the origin in events that blame no operation.
    """

    position: CallPosition
    batch: int
    images: int
    device: torch.device
    steps: Sequence[Step]
    in_fp32: Step
    present: Step | None = None
    locates_first: bool = True
    hidden: bool = False
    promised: Step | None = None
    compiled: bool = False
    default_origin: Origin | None = None


class FailedCall(ABC, Generic[Given, Step, Result]):
    """A failed call, as its maker can repeat it. Every repeat is made with the random numbers
    that the call began with.

    ``packs``: those that may keep state between steps, so that the whole sampling starts again instead of the call, and
    ``obstacle``: why it cannot.
    """

    packs: str = ""
    obstacle: str = ""
    wording: Wording
    weights: Weights
    about: Circumstances[Step]

    @abstractmethod
    def run(self, given: Given) -> Attempt[Result]:
        """Make the call again as it was."""

    @abstractmethod
    def watched(self, given: Given) -> tuple[Attempt[Result], Origin | None]:
        """Make the call again as it was with every operation watched: (attempt, what failed)."""

    @abstractmethod
    def run_at(self, step: Step, given: Given, zeroed: Sequence[str] = ()) -> Attempt[Result]:
        """Make the call again at a step of the ladder. ``zeroed``: weights that get a zero for each NaN and Inf."""

    @abstractmethod
    def rows(self, result: Result) -> set[int]:
        """List the rows of a result that are not finite."""

    @abstractmethod
    def with_nan(self, result: Result, rows: set[int]) -> Result:
        """Return a copy of a result with NaN in these rows."""

    @abstractmethod
    def modes(self, origin: Origin | None, step: Step | None = None) -> tuple[str, str]:
        """Return (mode of the operation that failed, its mode after ``step``)."""

    @abstractmethod
    def keep(self, step: Step, attempt: Attempt[Result], origin: Origin | None) -> None:
        """Run later calls as the attempt at a step, which was finite, showed to be needed."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether an error means that a repeat found no memory."""

    def widen(self, step: Step) -> None:
        """Run at a step from now on, for a sampling that starts again."""

    def start_again(self) -> Result:
        """Start the sampling of the call again from its first step. It never returns."""
        raise NotImplementedError

    def tell(self, doing: str) -> None:
        """Tell whoever waits for the call what is being done, in words."""

    def named(self, step: Step) -> str:
        """Name the precision of a step."""
        return FP32.name if step == self.about.in_fp32 else "fp16_safe"

    def inputs(self, given: Given) -> list[NotFiniteInput]:
        """List the inputs of the call with NaN or Inf."""
        return []

    def replaced(self, given: Given, function: Callable[[torch.Tensor], torch.Tensor]) -> Given:
        """Return a copy of what the call was given with ``function`` of each tensor in its place."""
        return given

    def patches(self, given: Given) -> str:
        """Name the functions that nodes put into the model's blocks; empty for none."""
        return ""

    def without_patches(self, given: Given) -> Given:
        """Return the inputs of the call without the functions named by :meth:`patches`."""
        return given


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

    def at(self, step: Step, given: Given) -> Attempt[Result]:
        """Repeat the call at a step, however many repeats are allowed."""
        attempt = self._again(lambda: self._call.run_at(step, given), f"in {self._call.named(step)}")
        if step == self._call.about.in_fp32:
            self.failed_in_fp32 = not attempt.finite
        return attempt

    def fails_in_fp32(self, given: Given) -> bool:
        """Tell whether the call as it is is not finite in fp32 either; False where that may not be tried any more."""
        if self.failed_in_fp32 is None and self._evidence_allowed():
            self.at(self._call.about.in_fp32, given)
        return bool(self.failed_in_fp32)

    def finite_in_fp32(self, given: Given, zeroed: Sequence[str] = ()) -> bool:
        """Tell whether a variant of the call is finite in fp32:
        other inputs, or zeros for NaN and Inf of ``zeroed`` weights."""
        if not self._evidence_allowed():
            return False
        step = self._call.about.in_fp32
        return self._again(lambda: self._call.run_at(step, given, zeroed), "in fp32, to find the cause").finite

    def _again(self, run: Callable, how: str):
        about = self._call.about
        what = about.default_origin.layer if about.default_origin else f"step {about.position.step}"
        self._call.tell(f"Repeating {what} {how}")
        self._log.extra_calls += 1
        self._used += 1
        with self._start.again():
            return run()

    def _evidence_allowed(self) -> bool:
        return self._log.on_nan != "retry_higher" or self.may_take(1)
