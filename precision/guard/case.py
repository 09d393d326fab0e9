"""Decide over a call that gave NaN or Inf, whoever made it: what explains it, what cures it, the verdict."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..base.nested import tensors_in
from ..devices import probes
from . import verdicts
from .failed_call import Attempt, FailedCall, Step
from .inputs import Diagnosis, NotFiniteInput, changed, rows_not_finite, with_nan, zero_for_nan, zeroed
from .localize import Origin
from .log import CallPosition, GuardLog, event_of, sentence
from .policy import OFF
from .verdicts import BAD_WEIGHTS, CLEAN, DEVICE_FAULT, NOT_PRECISION, RECOVERED, STOPPED, NonFinite

MOST_INPUTS = 4
NARROW = ("fp16", "bf16")


class Case:
    """One failed call.

    ``most``: how often it may be repeated to cure it, None for as often as its steps ask; ``failed_in_fp32``: whether
    the call with the inputs it was given is NaN or Inf in fp32 too, None while unknown.
    """

    def __init__(self, call: FailedCall, log: GuardLog, most: int | None = None):
        self.call = call
        self.log = log
        self.most = most
        self.given = call.given
        self.origin: Origin | None = None
        self.failed_in_fp32: bool | None = None if call.steps else True
        self.inputs: list[NotFiniteInput] = []
        self.lost: set[int] = set()
        tensors = tensors_in(call.result)
        self.batch = len(tensors[0]) if tensors else 1
        self.rows = set(rows_not_finite(tensors[0])) if tensors else set()
        if not self.rows and not call.hidden:  # a clamp after the call put a number in place of what is not finite
            self.rows = set(range(self.batch))
        self._repeats = 0

    def resolved(self) -> Any:
        """Return the result to go on with.

        Raises:
            NonFinite: there is none, or the guard is to stop.
        """
        try:
            return self._resolved()
        except NonFinite:
            raise
        except Exception as error:  # a repeat runs code in a dtype that it may never have met, and needs more memory
            return self._broken_off(error)

    def _resolved(self) -> Any:
        call = self.call
        if not call.hidden:
            self._lose({row for row in self.rows if row % call.images in self.log.lost})
            for one in call.inputs(self.given):
                self._lose_rows_given_nan(one)
            if not self.rows:
                return call.result
        self.inputs = call.inputs(self.given)
        result = self._as_asked()
        return result if result is call.result or not self.lost else with_nan(result, self.lost)

    def _broken_off(self, error: Exception) -> Any:
        """Give the first result back, as the run would have gone on with it."""
        if self.call.is_out_of_memory(error):
            found = Diagnosis(self._place, STOPPED, self.call.wording.no_memory)
        else:
            reason = verdicts.BROKEN_OFF.format(f"{type(error).__name__}: {error}")
            found = Diagnosis(self._place, STOPPED, self.call.wording.broken_off, reason)
        return self._give_up(found, goes_on=True)

    def _lose(self, rows: set[int]) -> None:
        self.rows = self.rows - rows
        self.lost |= rows

    def _lose_rows_given_nan(self, one: NotFiniteInput) -> None:
        """Blame an input's NaN for its rows, and go on with the other rows as if the input were finite."""
        rows = one.nan_rows(self.batch) & self.rows
        self.given = self.call.replaced(self.given, changed([one], zero_for_nan))
        if rows:
            position = self._position(rows)
            self._lose(rows)
            self._give_up(one.diagnosis(verdicts.NAN_GIVEN), position)

    def _as_asked(self) -> Any:
        """Do what the plan promises, then follow the node's setting, for a call whose failure no NaN input explains."""
        promised = self._in_promised() if self.call.promised else None
        if promised is not None:
            return promised
        if self.log.on_nan == "retry_higher":
            return self._in_higher_precision()
        if self.log.on_nan == OFF:
            self.log.given_up = True
            return self.call.result
        if self.call.hidden and self.log.verdict != CLEAN:
            return self.call.result
        self._locate()
        if self.call.hidden:
            self._note(False, STOPPED)
            return self.call.result
        diagnosis = self._weight_at_fault() or self._input_at_fault()
        return self._give_up(diagnosis or Diagnosis(self._place, STOPPED))

    def _in_promised(self) -> Any:
        """Repeat the call at the step that the model's plan promises; None where its result is not finite either."""
        step = self.call.promised
        if self._restarts:
            return self._started_again(step)
        attempt = self._at(step)
        if not attempt.finite:
            return None
        later = self.call.keep(step, None)
        self._note(True, RECOVERED, step, later, verdicts.BEGINS_SAFE, fell_back=True)
        return attempt.result

    def _in_higher_precision(self) -> Any:
        """Repeat the call at each step until its result is finite or nothing is left to try."""
        if self.call.locates_first and self._may_repeat(2):
            again = self._locate()
            if again.finite and not self.call.hidden and not self._restarts:
                return self._finite_again(again)
            if diagnosis := self._weight_at_fault():
                return self._give_up(diagnosis)
        return self._up_the_ladder()

    def _finite_again(self, watched: Attempt) -> Any:
        """Repeat a call exactly as it was, after the watched repeat was finite, to learn why."""
        if not self._may_repeat():
            return self._up_the_ladder()
        plain = self._again("as it was", self.call.run, self.given)
        if plain.finite:
            self._note_unchanged(True, DEVICE_FAULT, None, verdicts.SAME_AGAIN)
            return plain.result
        if self.call.compiled:
            self._note_unchanged(True, DEVICE_FAULT, verdicts.COMPILED, verdicts.EAGER_IS_FINITE)
            return watched.result
        return self._up_the_ladder()

    def _up_the_ladder(self) -> Any:
        steps = self.call.steps
        if self._comes_from_inputs():
            steps = steps[-1:]
        if self.failed_in_fp32:
            steps = steps[:-1]
        if steps and self._restarts:
            return self._started_again(steps[0])
        for step in steps:
            if not self._may_repeat():
                break
            attempt = self._at(step)
            if attempt.finite:
                return self._cured(step, attempt)
        return self._not_cured()

    def _cured(self, step: Step, attempt: Attempt) -> Any:
        if step == self.call.present:
            self._note_unchanged(True, DEVICE_FAULT, None, verdicts.SAME_AGAIN)
        else:
            later = self.call.keep(step, self.origin)
            self._note(True, RECOVERED, step, later)
        return attempt.result

    def _started_again(self, step: Step) -> Any:
        """Start the whole sampling again at a step, as the packs' state is of the failed run, by an exception; it
        returns only where no repeat is allowed."""
        promised = step == self.call.promised
        if not promised and not self._may_repeat():
            return self._give_up(self._untried())
        again = self.call.widened(step)
        evidence = verdicts.STARTED_AGAIN.format(self.call.named(step), self.call.packs)
        if promised:
            evidence = f"{evidence} {verdicts.GOES_ON}"
        event = event_of(self._position(self.rows), self._place, *self.call.modes(self._place, step), True, evidence)
        event.fell_back = promised
        message = sentence(replace(event, recovered=False), self._place)
        advice = verdicts.BEGINS_SAFE if promised else self._advice(RECOVERED)
        self.log.note(event, self._place, RECOVERED, advice, message)
        self.log.extra_calls += 1
        self.call.tell(evidence)
        raise again

    def _not_cured(self) -> Any:
        if self.failed_in_fp32 is None:
            return self._give_up(self._untried())
        if self.call.packs and not self.call.can_start_again:
            advice = verdicts.LEAVE_OUT.format(self.call.packs)
            return self._give_up(Diagnosis(self._place, STOPPED, advice, verdicts.MAY_BE_KEPT))
        diagnosis = self._input_at_fault()
        if not diagnosis and not self.call.locates_first:
            self._locate()
        diagnosis = diagnosis or self._weight_at_fault(everywhere=True)
        if not diagnosis and not self._may_repeat() and (self.inputs or self.call.weights.not_finite()):
            return self._give_up(self._untried())
        ok, detail = probes.canary(self.call.device, "fp32")
        if not ok:
            diagnosis = Diagnosis(self._place, DEVICE_FAULT, f"{detail}.", verdicts.WRONG_IN_FP32)
        diagnosis = diagnosis or self._finite_before() or self._not_widened()
        return self._give_up(diagnosis or Diagnosis(self._place, NOT_PRECISION, None, verdicts.FAILS_IN_FP32))

    def _finite_before(self) -> Diagnosis | None:
        """Tell whether earlier inputs, with which the result was finite, are not finite now."""
        known = self.call.was_finite
        if known is None or not self._may_repeat():
            return None
        if self._again("with an earlier input", self.call.run, known).finite:
            return None
        return Diagnosis(self._place, DEVICE_FAULT, None, verdicts.WAS_FINITE)

    def _not_widened(self) -> Diagnosis | None:
        """Find the layer that computes in 16 bit where all of the call was to run in fp32."""
        origin = self.origin
        if self.call.steps:
            if not self._may_repeat():
                return self._untried()
            origin = self._again("in fp32, to locate the NaN", self.call.watched_at, self.call.in_fp32, self.given)
        made_by = self.call.maker(origin.layer) if origin else ""
        if origin is None or not (origin.result in NARROW or (made_by and origin.kind == "unknown")):
            return None
        sentence = verdicts.STAYS_LOW_OF if made_by else verdicts.STAYS_LOW
        evidence = sentence.format(origin.layer or "The model", made_by)
        return Diagnosis(origin, STOPPED, verdicts.OF_ITS_OWN, evidence)

    def _untried(self) -> Diagnosis:
        return Diagnosis(self._place, STOPPED, f"max_retries is {self.most}, which left repeats untried: increase it.")

    def _may_repeat(self, times: int = 1) -> bool:
        return self.most is None or self._repeats + times <= self.most

    def _again(self, how: str, run: Callable, *args) -> Any:
        what = self.call.default_origin.layer if self.call.default_origin else f"step {self.call.position.step}"
        self.call.tell(f"Repeating {what} {how}")
        self.log.extra_calls += 1
        self._repeats += 1
        with self.call.start.again():
            return run(*args)

    def _locate(self) -> Attempt:
        again, self.origin = self._again("to locate the NaN", self.call.watched, self.given)
        return again

    def _at(self, step: Step) -> Attempt:
        """Repeat the call at a step, however many repeats are allowed."""
        attempt = self._again(f"in {self.call.named(step)}", self.call.run_at, step, self.given)
        if step == self.call.in_fp32:
            self.failed_in_fp32 = not attempt.finite
        return attempt

    def _fails_in_fp32(self) -> bool:
        if self.failed_in_fp32 is None and self._may_search():
            self._at(self.call.in_fp32)
        return bool(self.failed_in_fp32)

    def _finite_in_fp32(self, given: Any, zeroed: Sequence[str] = ()) -> bool:
        repeat = self.call.run_at, self.call.in_fp32, given, zeroed
        return self._may_search() and self._again("in fp32, to find the cause", *repeat).finite

    def _may_search(self) -> bool:
        """Tell whether repeats for evidence are allowed: ``most`` bounds those of a cure alone."""
        return self.log.on_nan != "retry_higher" or self._may_repeat()

    def _comes_from_inputs(self) -> bool:
        """Tell whether what is infinite came in with the inputs, as far as the operations watched can tell."""
        return self._is_unknown and bool(self.inputs) and not self.call.hidden

    @property
    def _is_unknown(self) -> bool:
        return self.origin is not None and self.origin.kind == "unknown"

    def _input_at_fault(self) -> Diagnosis | None:
        """Find the input without whose infinite values the call is finite in fp32, where with them it is not."""
        may_matter = self.failed_in_fp32 is not None or self._comes_from_inputs()
        if not self.inputs or not may_matter or not self._fails_in_fp32():
            return None
        for one in self.inputs[:MOST_INPUTS]:
            if self._finite_in_fp32(self.call.replaced(self.given, changed([one], zeroed))):
                return one.diagnosis(self.call.wording.input_made_finite)
        return None

    def _weight_at_fault(self, everywhere: bool = False) -> Diagnosis | None:
        """Find the weight or patch at fault. ``everywhere``: look at all weights, not only at those watched."""
        weights, origin = self.call.weights, self.origin
        if origin and (bad_copy := weights.bad_copy(origin)):
            return Diagnosis(origin, DEVICE_FAULT, None, bad_copy)
        if origin and self._is_unknown and (patch := weights.patch_sentence(origin.layer)):
            return Diagnosis(origin, BAD_WEIGHTS, patch, verdicts.PATCH_READ)
        bad = weights.not_finite() if everywhere or (origin and origin.kind == "weights") else {}
        name = origin.op if origin and origin.op in bad else next(iter(bad), "")
        if not name:
            return None
        if origin and name == origin.op and weights.has_nan(name):
            return Diagnosis(origin, BAD_WEIGHTS, weights.sentence(name), verdicts.NAN_READ)
        if self._fails_in_fp32() and self._finite_in_fp32(self.given, list(bad)):
            return Diagnosis(origin, BAD_WEIGHTS, weights.sentence(name), verdicts.WEIGHTS_MADE_FINITE)
        return None

    @property
    def _restarts(self) -> bool:
        return bool(self.call.packs) and self.call.can_start_again

    @property
    def _place(self) -> Origin | None:
        return self.origin or self.call.default_origin

    def _position(self, rows: set[int]) -> CallPosition:
        images = {row % self.call.images for row in rows}
        spoils_all = len(self.log.lost | images) >= self.call.images
        return replace(self.call.position, batch_rows=sorted(images), spoils_all=spoils_all)

    def _give_up(self, found: Diagnosis, position: CallPosition | None = None, goes_on: bool = False) -> Any:
        mode, _ = self.call.modes(found.origin)
        advice = self._advice(found.verdict) if found.advice is None else found.advice
        self.log.give_up(position or self._position(self.rows), replace(found, advice=advice), mode, goes_on)
        return self.call.result

    def _advice(self, verdict: str) -> str | None:
        return self.call.wording.advice.get(verdict)

    def _note(
        self,
        recovered: bool,
        verdict: str,
        step: Step | None = None,
        evidence: str = "",
        advice: str | None = None,
        fell_back: bool = False,
    ) -> None:
        modes = self.call.modes(self._place, step)
        event = event_of(self._position(self.rows), self._place, *modes, recovered, evidence)
        event.fell_back = fell_back
        self.log.note(event, self._place, verdict, self._advice(verdict) if advice is None else advice)

    def _note_unchanged(self, recovered: bool, verdict: str, advice: str | None, evidence: str = "") -> None:
        """Note an event without a layer at fault; the arithmetic stays as it was."""
        place = self.call.default_origin
        mode, _ = self.call.modes(place)
        event = event_of(self._position(self.rows), place, mode, mode, recovered, evidence)
        self.log.note(event, place, verdict, advice)
