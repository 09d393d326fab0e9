"""Go up the ladder with a call that returned NaN or Inf: what cures it, and if nothing does, what explains it."""

from dataclasses import replace
from typing import Any

from ..base.nested import tensors_in
from ..report.schema import Verdict
from . import verdicts
from .evidence import BEYOND_RUNGS, BY_INPUTS, BY_WEIGHTS, LAST, Evidence, explained
from .failed_call import Attempt, FailedCall
from .inputs import Diagnosis, rows_not_finite, with_nan, without_nan
from .log import CallPosition, GuardLog, event_of, sentence
from .policy import OFF
from .rungs import Rung
from .verdicts import CLEAN, DEVICE_FAULT, NOT_PRECISION, RECOVERED, STOPPED, NonFinite


class Ladder:
    """The repeats of one failed call.

    Args:
        most: how many repeats may be made to cure it; None for as many as there are rungs.
    """

    def __init__(self, call: FailedCall, log: GuardLog, most: int | None = None):
        self.call = call
        self.log = log
        self.evidence = Evidence(call, log, most)
        self.rows: set[int] = set()
        """The rows of the result that failed and are not given up."""
        self.lost: set[int] = set()
        """The rows given up: NaN takes their place in a result that is finite otherwise."""

    def resolved(self) -> Any:
        """Return the result to go on with.

        Raises:
            NonFinite: there is none, or the guard is to stop.
            BaseException: the sampling starts again (``FailedCall.start_again``).
        """
        try:
            return self._resolved()
        except NonFinite:
            raise
        except Exception as error:  # a repeat runs code in a dtype that it may never have run in, and needs more memory
            return self._broken_off(error)

    def _resolved(self) -> Any:
        call = self.call
        self.evidence.inputs = call.inputs()
        if not call.hidden:
            self._give_up_rows()
            if not self.rows:
                return call.result
        result = self._as_asked()
        return result if result is call.result or not self.lost else with_nan(result, self.lost)

    def _broken_off(self, error: Exception) -> Any:
        """Return the first result: the run goes on as it would have without a repeat."""
        if self.call.is_out_of_memory(error):
            found = Diagnosis(self.evidence.place, STOPPED, self.call.wording.no_memory)
        else:
            reason = verdicts.BROKEN_OFF.format(f"{type(error).__name__}: {error}")
            found = Diagnosis(self.evidence.place, STOPPED, self.call.wording.broken_off, reason)
        return self._give_up(found, goes_on=True)

    def _give_up_rows(self) -> None:
        """Blame inputs for the rows that were given NaN. Repeats are given a zero for each NaN."""
        call = self.call
        tensors = tensors_in(call.result)
        batch = len(tensors[0]) if tensors else 1
        self.rows = set(rows_not_finite(tensors[0])) if tensors else set()
        if not self.rows:  # a clamp after the call put a number in place of what is not finite
            self.rows = set(range(batch))
        self._lose({row for row in self.rows if row % call.images in self.log.lost})
        inputs = self.evidence.inputs
        for one in inputs:
            rows = one.nan_rows(batch) & self.rows
            if rows:
                position = call.position_of(rows, self.log.lost)
                self._lose(rows)
                self._log_given_up(one.diagnosis(), position)
        if inputs:
            zeros_for_nan, self.evidence.inputs = without_nan(inputs)
            self.evidence.given = call.replaced(call.given, zeros_for_nan)

    def _lose(self, rows: set[int]) -> None:
        self.rows = self.rows - rows
        self.lost |= rows

    def _as_asked(self) -> Any:
        """Do what the plan promises, then what the guard is set to, for a call whose failure no NaN input explains."""
        call = self.call
        if call.promised:
            if call.restarts:
                return self._start_again(call.promised)
            attempt = self.evidence.at(call.promised)
            if attempt.finite:
                return self._cured(call.promised, attempt, verdicts.BEGINS_SAFE)
        if self.log.on_nan == "retry_higher":
            return self._climbed()
        if self.log.on_nan == OFF:
            self.log.given_up = True
            return call.result
        if call.hidden and self.log.verdict != CLEAN:
            return call.result
        self.evidence.locate()
        if call.hidden:
            mode = call.mode(self.evidence.place)
            self._note(False, STOPPED, (mode, mode))
            return call.result
        found = explained(self.evidence, [*BY_WEIGHTS, *BY_INPUTS])
        return self._give_up(found or Diagnosis(self.evidence.place, STOPPED))

    def _climbed(self) -> Any:
        """Repeat the call at each rung until its result is finite or nothing is left to try."""
        call, evidence = self.call, self.evidence
        if call.locates_first and evidence.may_repeat(2):
            watched = evidence.locate()
            if watched.finite and not call.hidden and not call.restarts and evidence.may_repeat():
                plain = evidence.at(call.as_it_was)
                if plain.finite:
                    return self._finite_again(plain)
                if call.compiled:
                    self._note_unchanged(verdicts.COMPILED, verdicts.EAGER_IS_FINITE)
                    return watched.result
            elif found := explained(evidence, BY_WEIGHTS):
                return self._give_up(found)
        for rung in self._rungs():
            if call.restarts:
                return self._start_again(rung)
            if not evidence.may_repeat():
                break
            attempt = evidence.at(rung)
            if attempt.finite:
                return self._finite_again(attempt) if rung.as_it_was else self._cured(rung, attempt)
        return self._not_cured()

    def _rungs(self) -> list[Rung]:
        """List the rungs left to try: fp32 alone for what came in with the inputs."""
        only_fp32, in_vain = self.evidence.comes_from_inputs, self.evidence.fails_in_fp32
        return [rung for rung in self.call.rungs if not (in_vain if rung.is_fp32 else only_fp32)]

    def _finite_again(self, attempt: Attempt) -> Any:
        """Return the result of a repeat in the same arithmetic, which is finite: the device is at fault."""
        self._note_unchanged(None, verdicts.SAME_AGAIN)
        return attempt.result

    def _cured(self, rung: Rung, attempt: Attempt, advice: str | None = None) -> Any:
        modes = self.call.keep(rung, self.evidence.origin, self.evidence.place)
        self._note(True, RECOVERED, modes, rung, advice)
        return attempt.result

    def _start_again(self, rung: Rung) -> Any:
        """Start the whole sampling again at a rung, by an exception: what the packs keep is of the failed run.

        Returns only if no repeat is allowed.
        """
        call, evidence = self.call, self.evidence
        if not rung.of_plan and not evidence.may_repeat():
            return self._not_cured()
        again, modes = call.start_again(rung, evidence.place)
        text = verdicts.STARTED_AGAIN.format(rung.name, call.packs)
        if rung.of_plan:
            text = f"{text} {verdicts.GOES_ON}"
        event = event_of(self._position, evidence.place, *modes, True, text)
        event.fell_back = rung.of_plan
        message = sentence(replace(event, recovered=False), evidence.place)
        advice = verdicts.BEGINS_SAFE if rung.of_plan else self._advice(RECOVERED)
        self.log.note(event, evidence.place, RECOVERED, advice, message)
        self.log.extra_calls += 1
        raise again

    def _not_cured(self) -> Any:
        """Find what explains a call that no rung cured."""
        evidence = self.evidence
        evidence.exhausted = True
        found = explained(evidence, BEYOND_RUNGS)
        if found is None:
            if not self.call.locates_first:
                evidence.locate()
            found = explained(evidence, [*BY_WEIGHTS, *LAST])
        return self._give_up(found or Diagnosis(evidence.place, NOT_PRECISION, None, verdicts.FAILS_IN_FP32))

    @property
    def _position(self) -> CallPosition:
        return self.call.position_of(self.rows, self.log.lost)

    def _advice(self, verdict: Verdict) -> str | None:
        return self.call.wording.advice.get(verdict)

    def _give_up(self, found: Diagnosis, goes_on: bool = False) -> Any:
        self._log_given_up(found, self._position, goes_on)
        return self.call.result

    def _log_given_up(self, found: Diagnosis, position: CallPosition, goes_on: bool = False) -> None:
        mode = self.call.mode(found.origin)
        advice = self._advice(found.verdict) if found.advice is None else found.advice
        self.log.give_up(position, replace(found, advice=advice), mode, goes_on)

    def _note(
        self,
        recovered: bool,
        verdict: Verdict,
        modes: tuple[str, str],
        rung: Rung | None = None,
        advice: str | None = None,
    ) -> None:
        place = self.evidence.place
        event = event_of(self._position, place, *modes, recovered, rung.later if rung else "")
        event.fell_back = bool(rung and rung.of_plan)
        self.log.note(event, place, verdict, self._advice(verdict) if advice is None else advice)

    def _note_unchanged(self, advice: str | None, evidence: str) -> None:
        """Note that the device is at fault, and no layer: the arithmetic stays as it was."""
        place = self.call.default_origin
        mode = self.call.mode(place)
        event = event_of(self._position, place, mode, mode, True, evidence)
        self.log.note(event, place, DEVICE_FAULT, advice)
