"""A call that returned NaN or Inf, as its maker can repeat it: what :mod:`ladder` climbs with."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch

from ..base import nested
from ..devices.random_start import RandomStart
from .inputs import NotFiniteInput
from .localize import Origin
from .log import CallPosition
from .rungs import Rung
from .verdicts import Wording


@dataclass(frozen=True)
class Attempt:
    """One result of a call.

    Args:
        largest: its largest magnitude before any clamp; NaN or inf if it is not finite.
        hidden: the places in the model's code that replaced NaN or Inf by a number.
        judged: the tensors that decide whether it is finite, if they are not those of the result.
        error: the exception that ended the call because of numbers that are not finite; there is no
            result then.
        origin: what failed in a watched repeat; None if it is finite or was not watched.
    """

    result: Any
    largest: float
    judged: Sequence[torch.Tensor] = ()
    error: Exception | None = None
    origin: Origin | None = None
    hidden: frozenset = frozenset()

    @property
    def finite(self) -> bool:
        """True if it holds neither NaN nor Inf, and none was replaced in it."""
        return math.isfinite(self.largest) and not self.hidden


@dataclass(eq=False)
class FailedCall(ABC):
    """A failed call, as its maker can repeat it.

    Args:
        given: the inputs of the call, and ``result`` its return value.
        start: the random numbers of its beginning; each repeat draws them again.
        position: its place in its run.
        images: number of images of the result; row r of the result belongs to image r modulo
            ``images``.
        weights: the weights and patches of the model, VAE or text encoder (``LoadedWeights`` of the
            host).
        wording: the sentences for its kind of call.
        rungs: what it is repeated in, the last one in fp32; empty if it ran in fp32 already.
        fp32: the rung in which everything runs in fp32.
        is_out_of_memory: tells an error for lack of memory from others.
        locates_first: the failed operation is looked for before the first rung: a call costs little
            of its run.
        sites: the places in the model's own code that replaced NaN or Inf by a number in a result
            that is finite.
        by_design: the places that do so in fp32 too, with a finite result; filled by repeats in
            fp32.
        nan_weights: weights or LoRAs of a call whose result is finite hold NaN.
        nan_inputs: so do conditionings of its run.
        promised: the rung of the model's plan, tried whatever the guard is set to; None if the plan
            has no fallback.
        compiled: torch.compile runs the call.
        default_origin: the origin of events that blame no operation.
        packs: the packs that may keep state between steps, so that the sampling starts again and
            not the call.
        can_start_again: the sampling can start again.
    """

    given: Any
    result: Any
    start: RandomStart
    position: CallPosition
    images: int
    device: torch.device
    weights: Any
    wording: Wording
    rungs: Sequence[Rung]
    fp32: Rung
    is_out_of_memory: Callable[[BaseException], bool]
    _: KW_ONLY
    locates_first: bool = True
    sites: frozenset = frozenset()
    by_design: set = field(default_factory=set)
    nan_weights: bool = False
    nan_inputs: bool = False
    promised: Rung | None = None
    compiled: bool = False
    default_origin: Origin | None = None
    packs: str = ""
    can_start_again: bool = True

    @abstractmethod
    def repeat(self, rung: Rung, given: Any, why: str, zeroed: Sequence[str] = (), watched: bool = False) -> Attempt:
        """Make the call again.

        Args:
            rung: the arithmetic to run in.
            given: the inputs.
            why: what for, in words, for whoever waits for the call.
            zeroed: names of weights that get a zero for each NaN and Inf.
            watched: watch every operation, and return the attempt with its origin.
        """

    @abstractmethod
    def inputs(self) -> list[NotFiniteInput]:
        """List the inputs of the call that hold NaN or Inf."""

    @abstractmethod
    def mode(self, origin: Origin | None) -> str:
        """Return the mode of the operation that failed."""

    @abstractmethod
    def maker(self, layer: str) -> str:
        """Name the pack whose code a layer is; empty for ComfyUI's and torch's own."""

    def own_rungs(self, origin: Origin | None) -> list[Rung]:
        """List the rungs that widen only the code that failed, if that code belongs to no layer."""
        return []

    @abstractmethod
    def keep(self, rung: Rung, origin: Origin | None, place: Origin | None) -> tuple[str, str]:
        """Run later calls as the last repeat, which was finite at ``rung``, showed to be needed.

        Returns (mode of the operation at ``place`` when the call failed, its mode from now on).
        """

    def start_again(self, rung: Rung, place: Origin | None) -> tuple[BaseException, tuple[str, str]]:
        """Run at ``rung`` from now on. Returns (the exception that starts the sampling of the call
        again, the modes of :meth:`keep`)."""
        raise NotImplementedError

    def replaced(self, given: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return a copy of inputs with ``function`` applied to each tensor."""
        return nested.replaced(given, function)

    def position_of(self, rows: set[int], lost: set[int]) -> CallPosition:
        """Return the place of the call with the images of failed rows. ``lost``: images given up
        before."""
        images = {row % self.images for row in rows}
        return replace(self.position, batch_rows=sorted(images), spoils_all=len(lost | images) >= self.images)

    @property
    def hidden(self) -> bool:
        """True if the result is finite, but the model's own code clamped a value that is finite in
        fp32."""
        return not self.by_design >= self.sites

    @property
    def restarts(self) -> bool:
        """True if the sampling starts again and the call is not repeated."""
        return bool(self.packs) and self.can_start_again
