"""Go up the ladder with a call that returned NaN or Inf: what cures it, and if nothing does, what
explains it."""

import math
from dataclasses import replace
from typing import Any

from ..base.message import Message
from ..base.modes import FP32
from ..base.nested import floats_in
from ..report.schema import GuardEvent, Verdict
from . import verdicts
from .evidence import BEYOND_RUNGS, BY_INPUTS, BY_READING, BY_WEIGHTS, LAST, Evidence
from .failed_call import Attempt, FailedCall
from .inputs import Diagnosis, is_finite, rows_not_finite, with_nan, without_nan
from .localize import Origin
from .log import CallPosition, GuardLog, sentence
from .policy import OFF
from .rungs import AS_IT_WAS, Rung
from .verdicts import NonFinite


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

    def tell_hidden(self, exact: Any, again: Any) -> bool:
        """Note what explains a finite call whose repeat in fp32, ``exact``, is NaN or Inf. It ends
        no run.

        ``again``: the result of a second repeat in fp32. Returns whether something was found.
        """
        call, evidence = self.call, self.evidence
        evidence.inputs = call.inputs()
        evidence.failed_in_fp32(exact)
        self.rows = evidence.failed_rows()
        if all(map(is_finite, floats_in(again))):
            self._note_unchanged(None, verdicts.SAME_AGAIN, FP32.name)
            return True
        found = evidence.explained([*BEYOND_RUNGS, *BY_WEIGHTS])
        if found:
            mode = call.mode(found.origin)
            text = Message("{0} {1}", verdicts.FINITE_HERE, found.evidence)
            event = self._position.event(found.origin, mode, mode, False, text)
            self.log.note(event, found.origin, found.verdict, self._advice_on(found))
        return found is not None

    def _resolved(self) -> Any:
        call = self.call
        self.evidence.inputs = call.inputs()
        self._give_up_rows()
        if not call.hidden and (call.nan_weights or call.nan_inputs):
            return self._judged()
        if not self.rows and (not call.hidden or (self.lost and self.log.on_nan != "retry_higher")):
            return call.result
        result = self._as_asked()
        return result if result is call.result or not self.lost else with_nan(result, self.lost)

    def _judged(self) -> Any:
        """Return the result of a finite call whose weights or inputs hold NaN, if they are not at
        fault."""
        call = self.call
        if call.nan_weights and not self.evidence.may_search():
            self.log.remarks.add(verdicts.NOT_SEARCHED)
        elif call.nan_weights and not self.lost:
            self.evidence.locate()
            if found := self.evidence.explained(BY_READING):
                self.rows = {*range(next(map(len, floats_in(call.result)), 1))}
                return self._give_up(found)
            self.log.remarks.add(verdicts.READ_BY_NONE)
        return with_nan(call.result, self.lost) if self.lost and self.log.on_nan == "retry_higher" else call.result

    def _broken_off(self, error: Exception) -> Any:
        """Return the first result: the run goes on as it would have without a repeat."""
        if self.call.is_out_of_memory(error):
            found = Diagnosis(self.evidence.place, "stopped", self.call.wording.no_memory)
        else:
            reason = Message(verdicts.BROKEN_OFF, f"{type(error).__name__}: {error}")
            found = Diagnosis(self.evidence.place, "stopped", self.call.wording.broken_off, reason)
        return self._give_up(found, goes_on=True)

    def _give_up_rows(self) -> None:
        """Blame inputs for the rows that were given NaN. Repeats are given a zero for each NaN."""
        call, inputs = self.call, self.evidence.inputs
        batch = next(map(len, floats_in(call.result)), 1)
        self.rows = self._failed_rows(set().union(*(one.nan_rows(batch) for one in inputs)), batch)
        self._lose({row for row in self.rows if row % call.images in self.log.lost})
        for one in inputs:
            rows = one.nan_rows(batch) & self.rows
            if rows:
                position = call.position_of(rows, self.log.lost)
                self._lose(rows)
                self._log_given_up(one.diagnosis(), position)
        if inputs and (self.lost or not call.hidden):
            zeros_for_nan, self.evidence.inputs = without_nan(inputs)
            self.evidence.given = call.replaced(call.given, zeros_for_nan)

    def _failed_rows(self, given_nan: set[int], batch: int) -> set[int]:
        """Return the rows of the result that failed.

        A hidden failure shows in no row. If rows were given NaN, those failed that are others
        without it.
        """
        result = self.call.result
        if self.call.hidden or self.call.nan_weights or self.call.nan_inputs:
            if all(row % self.call.images in self.log.lost for row in given_nan):
                return set()
            found = self.evidence.changed_rows()
            if not found:
                self.log.harmless = True
                self.log.remarks.add(verdicts.NAN_CHANGES_NOTHING)
            return found
        # Not hidden and finite: a clamp after the call put a number in place of what is not finite.
        return rows_not_finite(result) or set(range(batch))

    def _lose(self, rows: set[int]) -> None:
        self.rows = self.rows - rows
        self.lost |= rows

    def _as_asked(self) -> Any:
        """Do what the plan promises, then what the guard is set to, for a call whose failure no NaN
        input explains."""
        call = self.call
        if call.promised:
            if again := self._finite_again():
                return self._was_a_fault(again)
            attempt = self._at(call.promised)
            if self._is_by_design:
                return call.result
            if call.restarts:
                return self._start_again(call.promised)
            if attempt.finite:
                return self._cured(call.promised, attempt, verdicts.BEGINS_SAFE)
        if self.log.on_nan == "retry_higher":
            return self._climbed()
        if self.log.on_nan == OFF:
            return self._unguarded()
        return self._explained()

    def _unguarded(self) -> Any:
        """Go on with the first result, as without a guard. A run that was repaired before is so no
        more."""
        if self.log.held.repaired and not self.call.hidden:
            return self._give_up(Diagnosis(self.evidence.place, "stopped", verdicts.UNGUARDED, verdicts.IN_VAIN))
        self.log.given_up = True
        return self.call.result

    def _explained(self) -> Any:
        """Find what explains a call that the guard may not cure."""
        call, evidence = self.call, self.evidence
        if call.hidden and self.log.held.rank and (self.log.lost or not evidence.inputs):
            return call.result
        if evidence.locate().finite and self._finite_again():
            return self._give_up(Diagnosis(call.default_origin, "device_fault", None, self._same_again))
        found = evidence.explained([*BY_WEIGHTS, *BY_INPUTS])
        if found or not call.hidden:
            return self._give_up(found or Diagnosis(evidence.place, "stopped"))
        if not evidence.at(call.fp32).finite:
            return self._not_cured()
        if self._is_by_design:
            return call.result
        self._note_clamped(Diagnosis(evidence.place, "stopped"))
        return call.result

    def _climbed(self) -> Any:
        """Repeat the call at each rung until its result is finite or nothing is left to try."""
        call, evidence = self.call, self.evidence
        if call.locates_first and evidence.may_repeat(2):
            watched = evidence.locate()
            if watched.finite and evidence.may_repeat():
                if again := self._finite_again():
                    return self._was_a_fault(again)
                if call.compiled and not call.restarts:
                    self._note_unchanged(verdicts.COMPILED, verdicts.EAGER_IS_FINITE)
                    return watched.result
            elif found := evidence.explained(BY_WEIGHTS):
                return self._give_up(found)
        for rung in self._rungs():
            if not evidence.may_repeat():
                break
            attempt = self._at(rung)
            if self._is_by_design:
                return call.result
            if call.restarts:  # finite or not: a pack may have given the repeat what it kept of the failed call
                return self._start_again(rung)
            if attempt.finite:
                return self._was_a_fault(attempt) if rung.as_it_was else self._cured(rung, attempt)
        return self._not_cured()

    def _at(self, rung: Rung) -> Attempt:
        """Repeat the call at a rung. If model code replaces there what it replaced in the failed
        call, fp32 tells whether it always does."""
        call, attempt = self.call, self.evidence.at(rung)
        of_all = rung is call.promised or rung in call.rungs
        if call.hidden and of_all and attempt.hidden & call.sites and math.isfinite(attempt.largest):
            self.evidence.at(call.fp32)
        return replace(attempt, hidden=attempt.hidden - call.by_design)

    @property
    def _is_by_design(self) -> bool:
        """True if all that model code replaced in the failed call is NaN or Inf in fp32 as well: it
        is no overflow."""
        return bool(self.call.sites) and not self.call.hidden

    def _rungs(self) -> list[Rung]:
        """List the rungs left to try: fp32 alone if the NaN or Inf came in with the inputs."""
        only_fp32, in_vain = self.evidence.comes_from_inputs, self.evidence.fails_in_fp32
        rungs = [*self.call.own_rungs(self.evidence.origin), *self.call.rungs]
        return [rung for rung in rungs if not (in_vain if rung.is_fp32 else only_fp32)]

    def _finite_again(self) -> Attempt | None:
        """Repeat the call as it was: a fault of the device does not come again. Return the repeat
        if it is finite.

        Beside a pack that may keep state the sampling starts again then, as it was, once.
        """
        if self.evidence.recurs or (self.call.restarts and self.log.held.rank):
            return None
        attempt = self.evidence.at(AS_IT_WAS)
        return attempt if attempt.finite else None

    def _was_a_fault(self, attempt: Attempt) -> Any:
        """Return the result of a repeat in the same arithmetic, which is finite: the device is at
        fault.

        It is not if rows were given up: the repeat was not given their NaN.
        """
        if self.call.restarts:
            return self._start_again(AS_IT_WAS)
        if not self.lost:
            self._note_unchanged(None, self._same_again)
        return attempt.result

    @property
    def _same_again(self) -> str:
        return verdicts.NOT_HIDDEN_AGAIN if self.call.hidden else verdicts.SAME_AGAIN

    def _cured(self, rung: Rung, attempt: Attempt, advice: str | None = None) -> Any:
        modes = self.call.keep(rung, self.evidence.origin, self.evidence.place)
        place = self.evidence.place
        event = self._event(place, "recovered", modes, rung.later)
        event.fell_back = rung is self.call.promised
        self.log.note(event, place, "recovered", self._advice("recovered") if advice is None else advice)
        return attempt.result

    def _start_again(self, rung: Rung) -> Any:
        """Start the whole sampling again at a rung, by an exception: what the packs keep is of the
        failed run.

        The failed call ran at that rung before, so an error that it raises there ends no run.
        """
        call, evidence = self.call, self.evidence
        promised = rung is call.promised
        place = call.default_origin if rung.as_it_was else evidence.place
        again, modes = call.start_again(rung, place)
        text = Message(verdicts.STARTED_AGAIN, modes[1] if rung.as_it_was else rung.name, call.packs)
        verdict: Verdict = "device_fault" if rung.as_it_was else "recovered"
        more = verdicts.GOES_ON if promised else self._same_again if rung.as_it_was else ""
        event = self._event(place, verdict, modes, Message("{0} {1}", text, more))
        event.fell_back = promised
        worded = replace(event, recovered=False)  # the evidence says what was restarted
        message, event.brief = sentence(worded, place), sentence(worded, place, brief=True)
        self.log.note(event, place, verdict, verdicts.BEGINS_SAFE if promised else self._advice(verdict), message)
        self.log.extra_calls += 1
        self.log.restarts.append(event)
        raise again

    def _not_cured(self) -> Any:
        """Find what explains a call that no rung cured."""
        evidence = self.evidence
        evidence.exhausted = True
        found = evidence.explained(BEYOND_RUNGS)
        if found is None:
            if not self.call.locates_first:
                evidence.locate()
            found = evidence.explained([*BY_WEIGHTS, *LAST])
        return self._give_up(found or Diagnosis(evidence.place, "not_precision", None, verdicts.FAILS_IN_FP32))

    @property
    def _position(self) -> CallPosition:
        return self.call.position_of(self.rows, self.log.lost)

    def _advice(self, verdict: Verdict) -> str | None:
        return self.call.wording.advice.get(verdict)

    def _advice_on(self, found: Diagnosis) -> str | None:
        return self._advice(found.verdict) if found.advice is None else found.advice

    def _give_up(self, found: Diagnosis, goes_on: bool = False) -> Any:
        call = self.call
        if call.hidden and verdicts.VERDICTS[found.verdict].unexplained:
            self._note_clamped(found)
            self.log.given_up = True
            return call.result
        if call.hidden:
            self.rows = self.evidence.failed_rows() - self.lost
        self._log_given_up(found, self._position, goes_on)
        return call.result

    def _note_clamped(self, found: Diagnosis) -> None:
        """Note a hidden failure that may be a clamp of values past fp16's range: it ends no run."""
        mode = self.call.mode(found.origin)
        event = self._event(found.origin, "stopped", (mode, mode), found.evidence)
        self.log.note(event, found.origin, "stopped", self._advice_on(found))

    def _log_given_up(self, found: Diagnosis, position: CallPosition, goes_on: bool = False) -> None:
        mode = self.call.mode(found.origin)
        self.log.give_up(position, replace(found, advice=self._advice_on(found)), mode, goes_on)

    def _note_unchanged(self, advice: str | None, evidence: str, mode: str = "") -> None:
        """Note that the device is at fault, and no layer: the arithmetic stays as it was.

        ``mode``: the arithmetic of the call that failed, if it is not the call's own.
        """
        place = self.call.default_origin
        mode = mode or self.call.mode(place)
        self.log.note(self._event(place, "device_fault", (mode, mode), evidence), place, "device_fault", advice)

    def _event(self, place: Origin | None, verdict: Verdict, modes: tuple[str, str], evidence: str) -> GuardEvent:
        """Build the report's entry for a failure that does not end the run."""
        row = verdicts.VERDICTS[verdict]
        event = self._position.event(place, *modes, not row.unexplained, evidence)
        if self.call.hidden and not row.of_device:
            event.kind = "saturation"
        return event
