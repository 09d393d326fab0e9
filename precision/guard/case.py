"""What to do with a call that gave NaN or Inf, whoever made it:
what explains it, whether a higher precision cures it, the verdict.

Whoever makes calls (of a model, a VAE, a text encoder) gives a :class:`FailedCall`;
every decision is here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from ..devices import probes
from .failed_call import Attempt, FailedCall, Given, Repeats, Result, Step
from .inputs import Diagnosis, NotFiniteInput, changed, input_origin, zero_for_nan, zeroed
from .ladder import RandomStart
from .localize import Origin
from .log import CallPosition, GuardLog, event_of
from .policy import OFF
from .verdicts import BAD_INPUT, BAD_WEIGHTS, CLEAN, DEVICE_FAULT, NOT_PRECISION, RECOVERED, STOPPED
from .wording import (
    BEGINS_SAFE,
    COMPILED,
    EAGER_IS_FINITE,
    FAILS_IN_FP32,
    GOES_ON,
    LEAVE_OUT,
    MAY_BE_KEPT,
    NAN_GIVEN,
    NAN_READ,
    PATCH_ADVICE,
    PATCH_READ,
    SAME_AGAIN,
    STARTED_AGAIN,
    WEIGHTS_MADE_FINITE,
    WITHOUT_PATCHES,
    WRONG_IN_FP32,
)

MOST_INPUTS = 4
Cured = TypeVar("Cured")


class Case(Generic[Given, Step, Result]):
    """One failed call.

    Args:
        start: the random numbers it began with.
        log: what was said of its model so far.
        given: what it was given, and ``result`` what it returned.
        most: how often it may be repeated to cure it; None for as often as its steps ask.

    ``origin``: what failed, once it was located.
    """

    def __init__(
        self,
        call: FailedCall[Given, Step, Result],
        start: RandomStart,
        log: GuardLog,
        given: Given,
        result: Result,
        most: int | None = None,
    ):
        self.call = call
        self.repeats = Repeats(call, start, log, most)
        self.log = log
        self.given = given
        self.result = result
        self.origin: Origin | None = None
        self.rows = call.rows(result)
        self.lost: set[int] = set()
        self.inputs: list[NotFiniteInput] = []

    def resolved(self) -> Result:
        """Return the result to go on with.

        Raises:
            NonFinite: there is none, or the guard is to stop.
        """
        if not self.call.about.hidden:
            self._lose({row for row in self.rows if self._images({row}) & self.log.lost})
            for one in self.call.inputs(self.given):
                self._lose_rows_given_nan(one)
            if not self.rows:
                return self.result
        self.inputs = self.call.inputs(self.given)
        result = self._as_asked()
        return result if result is self.result or not self.lost else self.call.with_nan(result, self.lost)

    def _lose(self, rows: set[int]) -> None:
        self.rows = self.rows - rows
        self.lost |= rows

    def _lose_rows_given_nan(self, one: NotFiniteInput) -> None:
        """Blame an input's NaN for its rows, and go on with the other rows as if the input were finite."""
        rows = one.nan_rows(self.call.about.batch) & self.rows
        self.given = self.call.replaced(self.given, changed([one], zero_for_nan))
        if rows:
            position = self._position(rows)
            self._lose(rows)
            self._give_up(one.diagnosis(NAN_GIVEN), position)

    def _as_asked(self) -> Result:
        """Do what the plan promises, then follow the node's setting, for a call whose failure no NaN input explains."""
        promised = self._repeated(self._in_promised) if self.call.about.promised else None
        if promised is not None:
            return promised
        if self.log.on_nan == "retry_higher":
            return self._repeated(self._in_higher_precision)
        if self.log.on_nan == OFF:
            self.log.given_up = True
            return self.result
        if self.call.about.hidden and self.log.verdict != CLEAN:
            return self.result
        self._locate()
        if self.call.about.hidden:
            self._note(False, STOPPED)
            return self.result
        return self._give_up(self._explained() or Diagnosis(self._place, STOPPED))

    def _explained(self) -> Diagnosis | None:
        """Find the cause of a failure under a setting without repeats; a lack of memory for the search is told too."""
        try:
            return self._weight_at_fault() or self._input_at_fault() or self._patch_at_fault()
        except RuntimeError as error:
            if not self.call.is_out_of_memory(error):
                raise
            return Diagnosis(self._place, STOPPED, self.call.wording.no_memory)

    def _repeated(self, cure: Callable[[], Cured]) -> Cured:
        """Cure the call, and say so where a repeat, which needs more memory than the call did, finds none."""
        try:
            return cure()
        except RuntimeError as error:
            if self.call.is_out_of_memory(error):
                self._note_unchanged(False, STOPPED, self.call.wording.no_memory)
            raise

    def _in_promised(self) -> Result | None:
        """Repeat the call at the step that the model's plan promises; None where its result is not finite either."""
        step = self.call.about.promised
        if self._restarts:
            return self._started_again(step)
        attempt = self.repeats.at(step, self.given)
        if not attempt.finite:
            return None
        self.call.keep(step, attempt, None)
        modes = self.call.modes(self._place, step)
        event = event_of(self._position(self.rows), self._place, *modes, True, GOES_ON)
        self.log.note(event, self._place, RECOVERED, BEGINS_SAFE)
        return attempt.result

    def _in_higher_precision(self) -> Result:
        """Repeat the call at each step until its result is finite or nothing is left to try."""
        if self.call.about.locates_first and self.repeats.may_take(2):
            again = self._locate()
            if again.finite and not self.call.about.hidden and not self._restarts:
                return self._finite_again(again)
            if diagnosis := self._weight_at_fault():
                return self._give_up(diagnosis)
        return self._up_the_ladder()

    def _finite_again(self, watched: Attempt[Result]) -> Result:
        """Repeat a call exactly as it was, after the watched repeat was finite, to learn why."""
        if not self.repeats.may_take(1):
            return self._up_the_ladder()
        plain = self.repeats.run(self.given)
        if plain.finite:
            self._note_unchanged(True, DEVICE_FAULT, None, SAME_AGAIN)
            return plain.result
        if self.call.about.compiled:
            self._note_unchanged(True, DEVICE_FAULT, COMPILED, EAGER_IS_FINITE)
            return watched.result
        return self._up_the_ladder()

    def _up_the_ladder(self) -> Result:
        steps = self.call.about.steps
        if self._comes_from_inputs():
            steps = steps[-1:]
        if self.repeats.failed_in_fp32:
            steps = steps[:-1]
        if steps and self._restarts:
            return self._started_again(steps[0])
        for step in steps:
            if not self.repeats.may_take(1):
                break
            attempt = self.repeats.at(step, self.given)
            if attempt.finite:
                return self._cured(step, attempt)
        return self._not_cured()

    def _cured(self, step: Step, attempt: Attempt[Result]) -> Result:
        if step == self.call.about.present:
            self._note_unchanged(True, DEVICE_FAULT, None, SAME_AGAIN)
        else:
            self.call.keep(step, attempt, self.origin)
            self._note(True, RECOVERED, step)
        return attempt.result

    def _started_again(self, step: Step) -> Result:
        """Start the whole sampling again at a step, as the packs' state is of the failed run. It returns only where no
        repeat is allowed."""
        if step != self.call.about.promised and not self.repeats.may_take(1):
            return self._give_up(self._untried())
        self.call.widen(step)
        evidence = STARTED_AGAIN.format(self.call.named(step), self.call.packs)
        event = event_of(self._position(self.rows), self._place, *self.call.modes(self._place, step), True, evidence)
        message = self.log.describe(replace(event, recovered=False), self._place)
        self.log.note(event, self._place, RECOVERED, self._advice(RECOVERED), message)
        self.log.extra_calls += 1
        self.call.tell(evidence)
        return self.call.start_again()

    def _not_cured(self) -> Result:
        if self.repeats.failed_in_fp32 is None:
            return self._give_up(self._untried())
        if self.call.packs and self.call.obstacle:
            return self._give_up(Diagnosis(self._place, STOPPED, LEAVE_OUT.format(self.call.packs), MAY_BE_KEPT))
        diagnosis = self._input_at_fault()
        if not diagnosis and not self.call.about.locates_first:
            self._locate()
        diagnosis = diagnosis or self._weight_at_fault(everywhere=True) or self._patch_at_fault()
        untried = self.inputs or self.call.weights.not_finite() or self.call.patches(self.given)
        if not diagnosis and not self.repeats.may_take(1) and untried:
            return self._give_up(self._untried())
        ok, detail = probes.canary(self.call.about.device, "fp32")
        if not ok:
            diagnosis = Diagnosis(self._place, DEVICE_FAULT, f"{detail}.", WRONG_IN_FP32)
        return self._give_up(diagnosis or Diagnosis(self._place, NOT_PRECISION, None, FAILS_IN_FP32))

    def _untried(self) -> Diagnosis:
        return Diagnosis(
            self._place, STOPPED, f"max_retries is {self.repeats.most}, which left repeats untried: raise it."
        )

    def _locate(self) -> Attempt[Result]:
        again, self.origin = self.repeats.watched(self.given)
        return again

    def _comes_from_inputs(self) -> bool:
        """Tell whether what is infinite came in with the inputs, as far as the operations watched can tell."""
        unknown = self.origin is not None and self.origin.kind == "unknown"
        return unknown and bool(self.inputs) and not self.call.about.hidden

    def _input_at_fault(self) -> Diagnosis | None:
        """Find the input without whose infinite values the call is finite in fp32, where with them it is not."""
        may_matter = self.repeats.failed_in_fp32 is not None or self._comes_from_inputs()
        if not self.inputs or not may_matter or not self.repeats.fails_in_fp32(self.given):
            return None
        groups = [[one] for one in self.inputs]
        groups += [self.inputs] if len(groups) > 1 else []
        for group in groups[:MOST_INPUTS]:
            if self.repeats.finite_in_fp32(self.call.replaced(self.given, changed(group, zeroed))):
                name, advice = " and the ".join(one.name for one in group), group[0].advice if len(group) == 1 else None
                return replace(group[0], name=name, advice=advice).diagnosis(self.call.wording.input_made_finite)
        return None

    def _patch_at_fault(self) -> Diagnosis | None:
        """Name the functions that nodes put into the model's blocks,
        if the call is finite in fp32 without them and not with them."""
        names = self.call.patches(self.given)
        unknown = self.origin is not None and self.origin.kind == "unknown"
        if (
            not names
            or (self.repeats.failed_in_fp32 is None and not unknown)
            or not self.repeats.fails_in_fp32(self.given)
        ):
            return None
        if not self.repeats.finite_in_fp32(self.call.without_patches(self.given)):
            return None
        return Diagnosis(input_origin(f"model patch {names}"), BAD_INPUT, PATCH_ADVICE, WITHOUT_PATCHES)

    def _weight_at_fault(self, everywhere: bool = False) -> Diagnosis | None:
        """Find the weight or patch without whose values that are not finite the call would be finite, or the weight
        whose copy on the device is bad.

        ``everywhere``: look at all weights, not only at what the operations watched lead to.
        """
        weights, origin = self.call.weights, self.origin
        if origin and (bad_copy := weights.bad_copy(origin)):
            return Diagnosis(origin, DEVICE_FAULT, None, bad_copy)
        if origin and origin.kind == "unknown" and (patch := weights.patch_sentence(origin.layer)):
            return Diagnosis(origin, BAD_WEIGHTS, patch, PATCH_READ)
        bad = weights.not_finite() if everywhere or (origin and origin.kind == "weights") else {}
        name = origin.op if origin and origin.op in bad else next(iter(bad), "")
        if not name:
            return None
        if origin and name == origin.op and weights.has_nan(name):
            return Diagnosis(origin, BAD_WEIGHTS, weights.sentence(name), NAN_READ)
        if self.repeats.fails_in_fp32(self.given) and self.repeats.finite_in_fp32(self.given, list(bad)):
            return Diagnosis(origin, BAD_WEIGHTS, weights.sentence(name), WEIGHTS_MADE_FINITE)
        return None

    @property
    def _restarts(self) -> bool:
        """Tell whether the whole sampling is to start again instead of the call."""
        return bool(self.call.packs) and not self.call.obstacle

    @property
    def _place(self) -> Origin | None:
        """The origin of the failure, or the origin named by events instead."""
        return self.origin or self.call.about.default_origin

    def _images(self, rows: set[int]) -> set[int]:
        """List the images that rows of the result are of; none where each row is of all of them."""
        images = self.call.about.images
        return {row % images for row in rows} if images else set()

    def _position(self, rows: set[int]) -> CallPosition:
        images = self._images(rows)
        spoils_all = len(self.log.lost | images) >= self.call.about.images
        return replace(self.call.about.position, batch_rows=sorted(images), spoils_all=spoils_all)

    def _give_up(self, diagnosis: Diagnosis, position: CallPosition | None = None) -> Result:
        place, verdict = diagnosis.origin, diagnosis.verdict
        mode, _ = self.call.modes(place)
        advice = self._advice(verdict) if diagnosis.advice is None else diagnosis.advice
        self.log.give_up(position or self._position(self.rows), place, verdict, advice, mode, diagnosis.evidence)
        return self.result

    def _advice(self, verdict: str) -> str | None:
        return self.call.wording.advice.get(verdict)

    def _note(self, recovered: bool, verdict: str, step: Step | None = None) -> None:
        event = event_of(self._position(self.rows), self._place, *self.call.modes(self._place, step), recovered)
        self.log.note(event, self._place, verdict, self._advice(verdict))

    def _note_unchanged(self, recovered: bool, verdict: str, advice: str | None, evidence: str = "") -> None:
        """Note an event without a layer at fault; the arithmetic stays as it was."""
        place = self.call.about.default_origin
        mode, _ = self.call.modes(place)
        self.log.note(
            event_of(self._position(self.rows), place, mode, mode, recovered, evidence), place, verdict, advice
        )
