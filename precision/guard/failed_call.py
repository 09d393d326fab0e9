"""A call that gave NaN or Inf, as its maker can repeat it: what :mod:`case` decides over."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from ..base import nested
from ..base.modes import FP32
from .inputs import NotFiniteInput
from .localize import Origin
from .log import CallPosition
from .random_start import RandomStart
from .verdicts import Wording

Step = Any
"""An entry of the ladder: what runs wider of a diffusion model, the dtype of a VAE or text encoder."""


@dataclass(frozen=True)
class Attempt:
    """One result of a call.

    Args:
        largest: its largest magnitude before any clamp, NaN or inf where it is not finite.
        judged: the tensors that were found finite or not, where they are not those of the result.
        error: what ended the call, for numbers that are not finite; it has no result then.
    """

    result: Any
    largest: float
    judged: Sequence[torch.Tensor] = ()
    error: Exception | None = None

    @property
    def finite(self) -> bool:
        """Tell whether it holds neither NaN nor Inf."""
        return math.isfinite(self.largest)


@dataclass(eq=False)
class FailedCall(ABC):
    """A failed call, as its maker can repeat it.

    Args:
        given: the inputs of the call, and ``result`` its return value.
        start: the random numbers of its beginning, with which each repeat is made.
        position: its place in its run.
        images: how many images the result has; row r of the result is of image r modulo ``images``.
        weights: the weights and patches of the model, VAE or text encoder (``LoadedWeights`` of the host).
        wording: the sentences on its kind of call.
        steps: the entries of the ladder to repeat it at, the last all in fp32; the first may be ``present``.
            Empty where it was in fp32 already.
        in_fp32: the step at which all of it runs in fp32.
        tell: tells whoever waits for the call what is being done, in words.
        present: the step it failed at, where it may be repeated so before others.
        locates_first: the operation is looked for before higher steps are tried, as a call costs little of its run.
        hidden: the result is finite, but the model's own code clamped what was not.
        promised: the step that the model's plan falls back to, whatever the guard is to do; None where it has none.
        default_origin: the origin in events that blame no operation.
        packs: those that may keep state between steps, so that the whole sampling starts again instead of the call.
        was_finite: earlier inputs, with which the result was finite; None where none are known.
    """

    given: Any
    result: Any
    start: RandomStart
    position: CallPosition
    images: int
    device: torch.device
    weights: Any
    wording: Wording
    steps: Sequence[Step]
    in_fp32: Step
    tell: Callable[[str], None]
    is_out_of_memory: Callable[[BaseException], bool]
    _: KW_ONLY
    present: Step | None = None
    locates_first: bool = True
    hidden: bool = False
    promised: Step | None = None
    compiled: bool = False
    default_origin: Origin | None = None
    packs: str = ""
    can_start_again: bool = True
    was_finite: Any = None

    @abstractmethod
    def run(self, given: Any) -> Attempt:
        """Make the call again as it was."""

    @abstractmethod
    def watched(self, given: Any) -> tuple[Attempt, Origin | None]:
        """Make the call again as it was with every operation watched: (attempt, what failed)."""

    @abstractmethod
    def run_at(self, step: Step, given: Any, zeroed: Sequence[str] = ()) -> Attempt:
        """Make the call again at a step of the ladder. ``zeroed``: weights that get a zero for each NaN and Inf."""

    @abstractmethod
    def watched_at(self, step: Step, given: Any) -> Origin | None:
        """Make the call again at a step of the ladder with every operation watched. Returns what failed."""

    def maker(self, layer: str) -> str:
        """Name the pack whose code a layer is; empty for ComfyUI's and torch's own."""
        return ""

    @abstractmethod
    def modes(self, origin: Origin | None, step: Step | None = None) -> tuple[str, str]:
        """Return (mode of the operation that failed, its mode after ``step``)."""

    def keep(self, step: Step, origin: Origin | None) -> str:
        """Run later calls as the last attempt, which was finite at a step, showed to be needed. Returns the sentence on
        later runs; empty where they begin as this one did."""
        return ""

    def widened(self, step: Step) -> BaseException:
        """Run at a step from now on. Returns the exception that starts the sampling of the call again."""
        raise NotImplementedError

    def named(self, step: Step) -> str:
        """Name the precision of a step."""
        return FP32.name if step == self.in_fp32 else "fp16_safe"

    def inputs(self, given: Any) -> list[NotFiniteInput]:
        """List the inputs of the call with NaN or Inf."""
        return []

    def replaced(self, given: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return a copy of what the call was given with ``function`` of each tensor in its place."""
        return nested.replaced(given, function)
