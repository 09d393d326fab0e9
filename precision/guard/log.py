"""What the guard says of one model, VAE or text encoder: its events, its verdict, and when a run is stopped."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ..report.schema import GuardEvent, GuardReport
from .localize import Origin
from .policy import ADVICE, CURED, Escalation, NonFinite


@dataclass
class CallPosition:
    """The place of a failed call in the sampler's run, and the images of the batch that it spoils.

    Args:
        call: its number, from 1.
        batch_rows: the images that hold NaN or Inf.
        spoils_all: no image of the batch is finite.
    """

    call: int
    step: int = 0
    sigma: float = math.nan
    batch_rows: list[int] = field(default_factory=list)
    spoils_all: bool = False


def event_of(position: CallPosition, origin: Origin | None, from_mode: str, to_mode: str, recovered: bool) -> GuardEvent:
    """Build the report's entry for one failed call."""
    layer, op, kind = (origin.layer, origin.op, origin.kind) if origin else ("", "", "unknown")
    kind = "saturation" if origin and origin.hidden else kind
    return GuardEvent(
        position.call, position.step, position.sigma, layer, op, kind, position.batch_rows, from_mode, to_mode, recovered
    )


def sentence(event: GuardEvent, origin: Origin | None) -> str:
    """Describe an event of a diffusion model in one line, for the log, the page and errors."""
    op = f" ({event.op})" if event.op and event.op != event.layer else ""
    what = {"saturation": "values past fp16's range were clamped by the model's own code", "weights": "a weight is not finite"}
    place = f"in {event.layer or 'the model'}{op}"
    cause = what.get(event.kind, "the result became NaN or Inf")
    given = f", largest input {origin.largest:.4g}" if origin and origin.largest == origin.largest else ""
    rows = f", batch rows {', '.join(map(str, event.batch_rows))}" if event.batch_rows else ""
    line = f"Step {event.step}, sigma {event.sigma:.4g}: {cause} {place}, computed in {event.from_mode}{given}{rows}."
    return f"{line} Repeated in {event.to_mode}: finite." if event.recovered else line


def encoder_sentence(event: GuardEvent, origin: Origin, kind: str) -> str:
    """Describe an event of a VAE or text encoder, named ``kind``, in one line."""
    if event.recovered:
        return f"{event.layer}: the result was NaN or Inf in {event.from_mode}. Repeated in {event.to_mode}: finite."
    op = f" ({event.op})" if event.op and origin.kind != "weights" else ""
    return f"{kind}: the result is NaN or Inf, computed in {event.from_mode}, first in {event.layer}{op}."


class Notify(Protocol):
    """Tells the user of an event, or of the verdict of a run (``event`` None)."""

    def __call__(self, kind: str, verdict: str, message: str, advice: str, event: GuardEvent | None = None) -> None: ...


def _silent(kind: str, verdict: str, message: str, advice: str, event: GuardEvent | None = None) -> None:
    """Tell nobody."""


@dataclass
class GuardLog:
    """The events of one model, VAE or text encoder, told as they happen.

    Args:
        on_nan: the node's setting, which decides whether a run without a cure is stopped.
        notify: tells the user.
        describe: gives an event as a sentence.
        prompt: the prompt that the log is of.
        given_up: nothing cures this run, so no call is repeated.
    """

    on_nan: str = "report"
    notify: Notify = _silent
    describe: Callable[[GuardEvent, Origin | None], str] = sentence
    prompt: str | None = None
    calls: int = 0
    extra_calls: int = 0
    verdict: str = "clean"
    events: list[GuardEvent] = field(default_factory=list)
    advice: str = ""
    given_up: bool = False

    def note(
        self, event: GuardEvent, origin: Origin | None, verdict: str, advice: str | None = None, message: str = ""
    ) -> NonFinite:
        """Add an event and tell it. Returns the error to raise if the run is to end with it.

        A verdict is never replaced by a milder one of the same run.
        """
        message = message or self.describe(event, origin)
        advice = ADVICE[verdict] if advice is None else advice
        self.events.append(event)
        if self.verdict in CURED:
            self.verdict, self.advice = verdict, advice
        self.notify("event", verdict, message, advice, event)
        return NonFinite(message, verdict, advice)

    def give_up(self, position: CallPosition, origin: Origin | None, verdict: str, advice: str | None = None, mode: str = "") -> None:
        """Note what repeats cannot cure.

        Raises:
            NonFinite: nothing is left to save, or the guard is to stop; never where it only reports.
        """
        error = self.note(event_of(position, origin, mode, mode, False), origin, verdict, advice)
        self.given_up = True
        if self.on_nan == "stop" or (self.on_nan == "retry_higher" and position.spoils_all):
            raise error

    def tell_verdict(self) -> None:
        """Sum up a sampler's run, unless there is nothing to tell."""
        if self.verdict != "clean":
            events, repeats = _count(len(self.events), "event"), _count(self.extra_calls, "repeated call")
            self.notify("verdict", self.verdict, f"Guard: {self.verdict}, {events}, {repeats}.", self.advice)

    def report(self, escalation: Escalation) -> GuardReport:
        """Give the log as the report's section, with what runs wider now."""
        return GuardReport(
            self.verdict, self.calls, self.extra_calls, escalation.named(), list(self.events), escalation.rules(), self.advice
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
