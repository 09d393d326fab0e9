"""A call that gave NaN or Inf, as whoever made it can repeat it: what :mod:`case` decides over."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..base.modes import FP32
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
