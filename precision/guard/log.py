"""Log the guard's events and verdict for one model, VAE or text encoder, and decide when a run is
stopped.

Failures outside of a model's calls are blamed here: on inputs and results of a run, on its device
and memory.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..base.message import Message, joined
from ..base.modes import label_of
from ..base.nested import floats_in
from ..plan.in_use import PlanInUse
from ..report.report_text import verdict_shown
from ..report.schema import CheckReport, EventKind, GuardEvent, GuardReport, Verdict
from . import verdicts
from .inputs import Diagnosis, NotFiniteInput, is_finite, rows_not_finite
from .localize import Origin
from .policy import OnNan
from .verdicts import NonFinite


@dataclass
class CallPosition:
    """The place of a failed call in the sampler's run, and the images of the batch that failed.

    Args:
        call: number of the call, from 1.
        batch_rows: the images that hold NaN or Inf.
        spoils_all: no image of the batch is finite.
    """

    call: int
    step: int = 0
    sigma: float = math.nan
    batch_rows: list[int] = field(default_factory=list)
    spoils_all: bool = False

    def event(
        self, origin: Origin | None, from_mode: str, to_mode: str, recovered: bool, evidence: str = ""
    ) -> GuardEvent:
        """Build the report's entry for this call, which failed."""
        layer, op = (origin.layer, origin.op) if origin else ("", "")
        kind: EventKind = origin.kind if origin else "unknown"
        return GuardEvent(
            self.call, self.step, self.sigma, layer, op, kind, self.batch_rows, from_mode, to_mode,
            recovered, evidence,
        )  # fmt: skip


GIVEN = ("input", "weights")
"""Kinds of events in which what is not finite was there before the call."""
FAILURES = {
    "saturation": "Values past fp16's range were clamped by the model's own code",
    "weights": "A weight is not finite",
}


def sentence(event: GuardEvent, origin: Origin | None, brief: bool = False) -> str:
    """Describe an event in one line: for the log and errors, or ``brief``, for the page."""
    in_step, of_input = math.isfinite(event.sigma), event.kind == "input"
    of_tensor = event.op == event.layer or event.op.startswith(f"{event.layer}.")
    layer = event.layer if brief or not event.op or of_tensor else f"{event.layer} ({event.op})"
    failure = FAILURES.get(event.kind, "The result became NaN or Inf")
    parts = [Message("NaN or Inf in the {0}", event.layer) if of_input else failure]
    if in_step and not of_input:
        parts = [Message("{0} in {1}", failure, layer or "the model")]
    elif event.layer and not of_input:
        parts.append(Message("first in {0}", layer))
    if event.from_mode and event.kind not in GIVEN:
        parts.append(Message("computed in {0}", label_of(event.from_mode) if brief else event.from_mode))
    if not brief and origin and math.isfinite(origin.largest):
        parts.append(Message("largest input {0}", f"{origin.largest:.4g}"))
    if not brief and event.batch_rows:
        parts.append(Message("batch rows {0}", ", ".join(map(str, event.batch_rows))))
    found = Message("{0}.", joined(parts, ", "))
    step = Message("Step {0}" if brief else "Step {0}, sigma {1}", event.step, f"{event.sigma:.4g}")
    repeated = Message("Repeated in {0}: no NaN.", label_of(event.to_mode)) if event.recovered else ""
    return joined([joined([step if in_step else "", found], ": "), repeated, event.evidence])


Notify = Callable[..., None]
"""Tells the user of (kind, verdict, message, advice, event); without an event, of the verdict of a
run. Of the kind ``calls`` with a number after the event: of calls that were checked. Of the kind
``taken_back``: a run that failed keeps no precision that it chose."""


@dataclass
class GuardLog:
    """The events of one model, VAE or text encoder; the user is notified of each as it happens.

    Args:
        given_up: no repeat cures this run, so no further call is repeated.
        lost: the images of the batch that no repeat cures; the others continue.
        remarks: remarks for the report on other nodes' code that ran with the model.
        devices: devices that made calls; MultiGPU has a thread for each.
        checks: reports on calls that were compared with fp32; ``checked``: their steps in this run
            of the sampler.
        adapted: layers of the model's text adapter that ran, in fp32.
        restarts: the events of this run of the sampler that restarted it.
        nan_given: conditionings of this run hold NaN; ``harmless``: which was found to change no
            result.
        ended_in: says which error or interrupt ended this run before its result.
        place: returns where a user finds this guard.
    """

    on_nan: OnNan = "report"
    notify: Notify = lambda *message: None
    prompt: str | None = None
    calls: int = 0
    extra_calls: int = 0
    verdict: Verdict = "clean"
    events: list[GuardEvent] = field(default_factory=list)
    advice: str = ""
    given_up: bool = False
    lost: set[int] = field(default_factory=set)
    remarks: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    checks: list[CheckReport] = field(default_factory=list)
    checked: set[int] = field(default_factory=set)
    adapted: set[str] = field(default_factory=set)
    restarts: list[GuardEvent] = field(default_factory=list)
    ended_in: str = ""
    nan_given: bool = False
    harmless: bool = False
    place: Callable[[], verdicts.Place] = lambda: verdicts.ANY_GUARD
    _numbers: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def held(self):
        """Return the row of the verdict so far."""
        return verdicts.VERDICTS[self.verdict]

    def begin_call(self) -> int:
        """Count a call. Returns its number, from 1."""
        with self._numbers:
            self.calls += 1
            return self.calls

    def drop_call(self) -> None:
        """Uncount a call that raised: it returned no result to check."""
        with self._numbers:
            self.calls -= 1

    def note(
        self, event: GuardEvent, origin: Origin | None, verdict: Verdict, advice: str | None = None, message: str = ""
    ) -> NonFinite:
        """Add an event. Its verdict does not replace a worse one. Returns the error to end the run
        with."""
        event.brief = event.brief or message or sentence(event, origin, brief=True)
        message = message or sentence(event, origin)
        advice = self.place().worded(verdicts.VERDICTS[verdict].advice if advice is None else advice)
        explains = not verdicts.VERDICTS[verdict].unexplained
        if self.held.cured or (explains and self._only_clamped()):
            self.verdict, self.advice = verdict, advice
        self.events.append(event)
        self.notify("event", verdict, message, advice, event)
        return NonFinite(message, verdict, advice)

    def _only_clamped(self) -> bool:
        """True if the verdict is that of clamped values, which end no run: any other failure is
        worse."""
        harmless = all(event.recovered or event.kind in ("saturation", "drift") for event in self.events)
        return self.held.unexplained and harmless

    def give_up(self, position: CallPosition, found: Diagnosis, mode: str = "", goes_on: bool = False) -> None:
        """Give up the images of ``position``, or the whole run if it names no image or all of them.

        Args:
            goes_on: continue the run unless the guard is set to stop.

        Raises:
            NonFinite: no image is left, or the guard is set to stop; never if it is set to report.
        """
        event = position.event(found.origin, mode, mode, False, found.evidence)
        nothing_left = self.on_nan == "retry_higher" and position.spoils_all and not goes_on
        event.ended = self.on_nan == "stop" or nothing_left
        error = self.note(event, found.origin, found.verdict, found.advice)
        self.lost.update(position.batch_rows)
        self.given_up = position.spoils_all or not position.batch_rows
        if event.ended:
            raise error

    def note_drift(self, event: GuardEvent) -> None:
        """Add an event for a finite result that drifts from fp32 and notify the user. The verdict,
        on NaN and Inf, stays."""
        sigma, off = f"{event.sigma:.4g}", event.from_mode
        message = Message("Step {0}, sigma {1}: finite, but off ({2}). {3}", event.step, sigma, off, event.evidence)
        self.events.append(event)
        self.notify("event", self.verdict, message, event.advice, event)

    def begin_run(self) -> None:
        """Clear what an earlier run of a sampler gave up."""
        self.given_up = False
        self.lost.clear()
        self.checked.clear()
        self.restarts.clear()
        self.ended_in = ""
        self.nan_given = self.harmless = False

    def take_back(self) -> None:
        """Note that the run failed after it had chosen a higher precision, which is not kept."""
        for event in self.restarts:
            event.recovered = False
        self.notify("taken_back", self.verdict, "", "")

    def notify_verdict(self, plan: PlanInUse) -> None:
        """Notify the user of the verdict of a sampler's run that ended under ``plan``, if there is
        one. ComfyUI itself tells of an error or interrupt that no event led to."""
        if self.ended_in and not self.events:
            return
        if self.held.rank:
            self.notify("verdict", self.verdict, self._became(), self.advice)
        elif plan.is_wider:
            self.notify("verdict", self.verdict, Message(verdicts.BEGAN_WITH, parts=", ".join(plan.parts())), "")

    def notify_calls(self, count: int) -> None:
        """Notify the user of a number of calls that were checked."""
        self.notify("calls", "clean", "", "", None, count)

    def blame_inputs(self, inputs: Sequence[NotFiniteInput], batch: int) -> None:
        """Blame the inputs with NaN of a sampler's run of ``batch`` images.

        Raises:
            NonFinite: no image is left, or the guard is set to stop.
        """
        for one in inputs:
            rows = one.nan_rows(batch)
            position = CallPosition(0, batch_rows=sorted(rows), spoils_all=len(rows | self.lost) >= batch)
            self.give_up(position, one.diagnosis())

    def blame_between_calls(self, result: torch.Tensor, sigmas: torch.Tensor) -> None:
        """Blame the code between a model's calls for images with NaN or Inf if no call of theirs
        failed.

        Raises:
            NonFinite: no image is left, or the guard is set to stop.
        """
        bad = [] if self.given_up else [tensor for tensor in floats_in(result) if not is_finite(tensor)]
        rows = sorted(rows_not_finite(bad) - self.lost)
        if rows:
            position = CallPosition(
                self.calls, len(sigmas) - 1, float(sigmas[-1]), rows, len(self.lost.union(rows)) >= len(bad[0])
            )
            origin = Origin("sampler", "", "nan", "fp32", math.nan)
            self.give_up(position, Diagnosis(origin, "not_precision", None, verdicts.BETWEEN_CALLS), "fp32")

    def blame_device(self, position: CallPosition, device: torch.device, mode: str, detail: str) -> bool:
        """Blame a device for a wrong test operation in ``mode``. Returns whether to run all in fp32
        from now on.

        Raises:
            NonFinite: the guard is set to stop.
        """
        cured = self.on_nan == "retry_higher"
        origin = Origin("", "matmul", "canary", mode, math.nan)
        event = position.event(origin, mode, "fp32" if cured else mode, cured)
        event.ended = self.on_nan == "stop"
        advice = Message("{0}. {1}", detail, verdicts.VERDICTS["device_fault"].advice)
        message = Message("A test operation on {0} is wrong.", device)
        error = self.note(event, origin, "device_fault", advice, message)
        if event.ended:
            raise error
        return cured

    def blame_end(self, error: BaseException, is_out_of_memory: Callable[[BaseException], bool]) -> None:
        """Revoke the verdict of a run that ended in an error or an interrupt: ``recovered``, with an
        event, and ``clean``, because a run without a result has none to be clean."""
        cause = f"{type(error).__name__}: {error}"
        if not self.held.rank:
            is_error = isinstance(error, Exception)
            self.ended_in = Message(verdicts.NO_RESULT, cause) if is_error else verdicts.INTERRUPTED
            self.verdict, self.advice = "stopped", self.ended_in
        if not self.held.repaired:
            return
        self.ended_in, advice = Message(verdicts.ENDED_IN, cause), verdicts.OTHERWISE
        if not isinstance(error, Exception):
            self.ended_in, advice = verdicts.INTERRUPTED, ""
        elif is_out_of_memory(error):
            advice = verdicts.MODEL.no_memory
        event = CallPosition(self.calls).event(None, "", "", False, self.ended_in)
        self.note(event, None, "stopped", advice, self.ended_in)

    def _became(self) -> str:
        """Return one sentence on how a run with NaN or Inf ended."""
        if self.held.repaired:
            steps = len({(event.call, event.step) for event in self.events if event.recovered})
            several = Message("Repaired: {0} steps were repeated.", steps)
            return "Repaired: 1 step was repeated." if steps == 1 else several
        if self.ended_in:
            return self.ended_in
        if self.held.unexplained and self.on_nan == "stop":
            return "Stopped, because the guard is set to stop."
        if self.held.unexplained and self.on_nan == "report":
            return "Not repaired, because the guard is set to report."
        return Message("Guard: {0}.", verdict_shown(self.verdict, [event.kind for event in self.events]))

    def report(self, plan: PlanInUse) -> GuardReport:
        """Return the guard's section of the report, with the parts that run wider now."""
        advice = verdicts.BEGAN_WIDER if plan.is_wider and not self.held.rank else self.advice
        return GuardReport(
            self.verdict, self.calls, self.extra_calls, plan.named(), list(self.events), plan.rules(),
            advice, list(self.checks), self.held.shown(),
        )  # fmt: skip
