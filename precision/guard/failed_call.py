"""A call that gave NaN or Inf, as whoever made it can repeat it: what :mod:`case` decides over."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..modes import FP32
from .inputs import NotFiniteInput
from .localize import Origin
from .log import CallPosition
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
        """Return name -> weight or buffer, of those that hold NaN or Inf."""
        ...

    def has_nan(self, name: str) -> bool:
        """Tell whether a weight, quantized or not, holds NaN."""
        ...

    def transfer(self, origin: Origin) -> str:
        """Describe the weight of the operation that failed first, where it went bad on its way from the file to the
        device; empty where it did not."""
        ...

    def sentence(self, name: str) -> str:
        """Describe a weight that is not finite: what made it so and what to do."""
        ...

    def patch_sentence(self, layer: str) -> str:
        """Describe the LoRA or other patch of a layer's weight that holds NaN or Inf; empty where none does."""
        ...


@dataclass(frozen=True)
class Circumstances(Generic[Step]):
    """What is known of a failed call before it is repeated.

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
        nowhere: the origin in events that blame no operation.
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
    nowhere: Origin | None = None


class FailedCall(ABC, Generic[Given, Step, Result]):
    """What a case needs of the one that made a call. Every repeat is made with the random numbers
    that the call began with."""

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
        """Return (mode in which the call failed, mode after ``step`` was kept) of the operation that failed."""

    @abstractmethod
    def keep(self, step: Step, attempt: Attempt[Result], origin: Origin | None) -> None:
        """Run later calls as the attempt at a step, which was finite, showed to be needed."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether an error means that a repeat found no memory."""

    def tell(self, doing: str) -> None:
        """Tell whoever waits for the call what is being done, in words."""

    def named(self, step: Step) -> str:
        """Name the precision of a step."""
        return FP32.name if step == self.about.in_fp32 else "fp16_safe"

    def inputs(self, given: Given) -> list[NotFiniteInput]:
        """List what is not finite of what the call was given."""
        return []

    def replaced(self, given: Given, function: Callable[[torch.Tensor], torch.Tensor]) -> Given:
        """Return a copy of what the call was given with ``function`` of each tensor in its place."""
        return given

    def patches(self, given: Given) -> str:
        """Name the functions that nodes put into the model's blocks; empty for none."""
        return ""

    def kept_result(self, attempt: Attempt[Result]) -> str:
        """Name what gave an attempt a result that was kept of an earlier one; empty where the call ran."""
        return ""

    def without_patches(self, given: Given) -> Given:
        """Return what the call was given without the functions that :meth:`patches` names."""
        return given
