"""What is known of a failed call, and the table of what explains its failure."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..base.message import Message
from ..base.nested import floats_in
from ..devices import probes
from ..report.schema import Verdict
from . import verdicts
from .failed_call import Attempt, FailedCall
from .inputs import Diagnosis, NotFiniteInput, rows_not_finite, rows_that_differ, without_nan, zeroed
from .localize import Origin
from .log import GuardLog
from .rungs import AS_IT_WAS, Rung

MOST_INPUTS = 4
NARROW = ("fp16", "bf16")
IN_FP32 = "in fp32, to find the cause"
WITHOUT_NAN = "with a zero for each NaN of its inputs"


class Evidence:
    """What is known of a failed call. A question that needs a repeat of the call makes the repeat.

    The conditions of the tables below are methods: each returns what it found, as a text for the
    sentences of its row, and an empty text if it found nothing.

    Args:
        most: how many repeats may be made to cure the call; None for as many as there are rungs.

    Attributes:
        given: the inputs of each repeat: those of the call, without the NaN that rows were blamed
            for.
        inputs: those of ``given`` that hold NaN or Inf.
        origin: the operation that failed; None until :meth:`locate` found one.
        fails_in_fp32: whether the call is NaN or Inf in fp32 too; None until known.
        recurs: a repeat of the call as it was failed too.
        exhausted: no rung cured the call, so all weights are searched, not only those of the
            located operation.
    """

    def __init__(self, call: FailedCall, log: GuardLog, most: int | None = None):
        self.call = call
        self.log = log
        self.most = most
        self.given = call.given
        self.inputs: list[NotFiniteInput] = []
        self.origin: Origin | None = None
        self.fails_in_fp32: bool | None = None if call.rungs else True
        self.recurs = False
        self.exhausted = False
        self._in_fp32: Any = None
        self._repeats = 0

    @property
    def place(self) -> Origin | None:
        """The origin for an event: the operation that failed, else what the kind of call has."""
        return self.origin or self.call.default_origin

    def may_repeat(self, times: int = 1) -> bool:
        """True if so many more repeats are allowed."""
        return self.most is None or self._repeats + times <= self.most

    def repeat(
        self, rung: Rung, why: str, given: Any = None, zeroed: Sequence[str] = (), watched: bool = False
    ) -> Attempt:
        """Make the call again with its random numbers, and count it. ``given``: other inputs than
        :attr:`given`."""
        self.log.extra_calls += 1
        self._repeats += 1
        with self.call.start.again():
            return self.call.repeat(rung, self.given if given is None else given, why, zeroed, watched)

    def at(self, rung: Rung) -> Attempt:
        """Make the call at a rung, however many repeats are allowed."""
        attempt = self.repeat(rung, "as it was" if rung.as_it_was else Message("in {0}", rung.name))
        self.recurs = self.recurs or (rung.as_it_was and not attempt.finite)
        if rung.is_fp32:
            self.fails_in_fp32 = not attempt.finite
            self._in_fp32 = attempt.result
        return attempt

    def failed_in_fp32(self, result: Any) -> None:
        """Record that the call is not finite in fp32, where it returned ``result``."""
        self.fails_in_fp32 = self.exhausted = True
        self._in_fp32 = result

    def changed_rows(self) -> set[int]:
        """List the rows of a finite result that another number in place of each NaN of the inputs
        changes."""
        zeros_for_nan, _ = without_nan(self.inputs)
        again = self.repeat(AS_IT_WAS, WITHOUT_NAN, self.call.replaced(self.call.given, zeros_for_nan))
        if not rows_that_differ(self.call.result, again.result):
            return set()
        # A repeat runs without caches and the compiler, and is compared with another repeat.
        return rows_that_differ(self.repeat(AS_IT_WAS, WITHOUT_NAN, self.call.given).result, again.result)

    def failed_rows(self) -> set[int]:
        """List the rows of a hidden failure, which its result does not show: those not finite in
        fp32, else all."""
        result = self.call.result if self._in_fp32 is None else self._in_fp32
        return rows_not_finite(result) or {*range(next(map(len, floats_in(result)), 0))}

    def locate(self) -> Attempt:
        """Make the call as it was with every operation watched, to find the one that failed."""
        attempt = self.repeat(AS_IT_WAS, "to locate the NaN", watched=True)
        self.origin = attempt.origin
        self.recurs = self.recurs or not attempt.finite
        return attempt

    @property
    def comes_from_inputs(self) -> bool:
        """True if no watched operation produced the Inf and an input holds one."""
        is_unknown = self.origin is not None and self.origin.kind == "unknown"
        return is_unknown and bool(self.inputs) and not self.call.hidden

    def may_search(self) -> bool:
        """True if a repeat for evidence is allowed: ``most`` limits those for a cure alone."""
        return self.log.on_nan != "retry_higher" or self.may_repeat()

    def _is_not_finite_in_fp32(self) -> bool:
        if self.fails_in_fp32 is None and self.may_search():
            self.at(self.call.fp32)
        return bool(self.fails_in_fp32)

    def _finite_in_fp32(self, given: Any = None, zeroed: Sequence[str] = ()) -> bool:
        return self.may_search() and self.repeat(self.call.fp32, IN_FP32, given, zeroed).finite

    def untried(self) -> str:
        """Return how many repeats were allowed, if they left fp32 untried, or finite there in a
        search alone."""
        return "" if self.fails_in_fp32 else str(self.most)

    def unexplained(self) -> str:
        """Return how many repeats were allowed, if more could tell which input, weight or layer is
        at fault."""
        if self.may_repeat() or not (self.call.rungs or self.inputs or self._weights_not_finite):
            return ""
        return str(self.most)

    def kept_state(self) -> str:
        """Name the packs whose state of the failed call each repeat was given."""
        return "" if self.call.can_start_again else self.call.packs

    def wrong_in_fp32(self) -> str:
        """Describe a wrong test operation of the device in fp32."""
        ok, detail = probes.canary(self.call.device, "fp32")
        return "" if ok else detail

    def bad_copy(self) -> str:
        """Describe a weight that is finite in host memory, and not in its copy on the device."""
        origin = self.origin
        return self.call.weights.bad_copy(origin) if origin and origin.kind in ("weights", "unknown") else ""

    def bad_patch(self) -> str:
        """Describe the patch with NaN or Inf that the failed operation reads."""
        origin = self.origin
        return self.call.weights.patch_sentence(origin.layer) if origin and origin.kind == "unknown" else ""

    def nan_weight(self) -> str:
        """Describe the weight with NaN that the failed operation reads."""
        weights, name = self.call.weights, self.origin.op if self.origin else ""
        return weights.sentence(name) if name in self._bad_weights() and weights.has_nan(name) else ""

    def read_weight(self) -> str:
        """Describe the weight of which an operation made NaN in a call whose result is finite."""
        origin = self.origin
        return self.call.weights.sentence(origin.op) if origin and origin.kind == "weights" else ""

    def bad_weight(self) -> str:
        """Describe the weight with NaN or Inf, if a zero for each of these makes the call finite in
        fp32."""
        bad = self._bad_weights()
        if not bad or not self._is_not_finite_in_fp32() or not self._finite_in_fp32(zeroed=list(bad)):
            return ""
        if self.origin is None or self.origin.op not in bad:
            self.origin = Origin.of_weight(next(iter(bad)))
        return self.call.weights.sentence(self.origin.op)

    def _bad_weights(self) -> dict[str, torch.Tensor]:
        searched = self.exhausted or (self.origin is not None and self.origin.kind == "weights")
        return self._weights_not_finite if searched else {}

    @functools.cached_property
    def _weights_not_finite(self) -> dict[str, torch.Tensor]:
        return self.call.weights.not_finite()

    def bad_input(self) -> NotFiniteInput | None:
        """Return the input without whose infinite values the call is finite in fp32; with them it
        is not."""
        may_matter = self.fails_in_fp32 is not None or self.comes_from_inputs
        if not self.inputs or not may_matter or not self._is_not_finite_in_fp32():
            return None
        for one in self.inputs[:MOST_INPUTS]:
            if self._finite_in_fp32(self.call.replaced(self.given, _changed([one], zeroed))):
                return one
        return None

    def own_dtype(self) -> str:
        """Describe the layer that computes in 16 bit although all of the call was to run in
        fp32."""
        origin = self.origin
        if self.call.rungs:
            origin = self.repeat(self.call.fp32, "in fp32, to locate the NaN", watched=True).origin
        made_by = self.call.maker(origin.layer) if origin else ""
        if origin is None or not (origin.result in NARROW or (made_by and origin.kind == "unknown")):
            return ""
        self.origin = origin
        sentence = verdicts.STAYS_LOW_OF if made_by else verdicts.STAYS_LOW
        return Message(sentence, origin.layer or "The model", made_by)

    def explained(self, rows: Sequence["_Row"]) -> Diagnosis | None:
        """Return the first of these explanations that holds; None if none does."""
        for condition, verdict, advice, text in rows:
            found = condition(self)
            if isinstance(found, NotFiniteInput):
                return found.diagnosis(verdicts.INPUT_MADE_FINITE)
            if found:
                advice = None if advice is None else Message(advice, found)
                return Diagnosis(self.place, verdict, advice, Message(text, found))
        return None


def _changed(chosen: Iterable[NotFiniteInput], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Return a function that changes each tensor of the chosen inputs, and no other tensor."""
    wanted = {id(value) for one in chosen for value in one.values}
    return lambda value: change(value) if id(value) in wanted else value


class _Row(NamedTuple):
    """One explanation of a failed call.

    Args:
        condition: the question that finds it.
        verdict: of the run, if the condition found something. A bad input has a verdict of its own.
        advice: with what was found in place of {0}; None for the advice of the verdict.
        evidence: with what was found in place of {0}.
    """

    condition: Callable[[Evidence], object]
    verdict: Verdict
    advice: str | None = None
    evidence: str = ""


RAISE_RETRIES = "max_retries is {0}, which left repeats untried: increase it."
BY_INPUTS = (_Row(Evidence.bad_input, "bad_input"),)
BY_WEIGHTS = (
    _Row(Evidence.bad_copy, "device_fault", None, "{0}"),
    _Row(Evidence.bad_patch, "bad_weights", "{0}", verdicts.PATCH_READ),
    _Row(Evidence.nan_weight, "bad_weights", "{0}", verdicts.NAN_READ),
    _Row(Evidence.bad_weight, "bad_weights", "{0}", verdicts.WEIGHTS_MADE_FINITE),
)
BY_READING = (
    *BY_WEIGHTS[:2],
    _Row(Evidence.read_weight, "bad_weights", "{0}", verdicts.NAN_REPLACED),
)
"""The explanations of NaN that a call reads and its result does not show."""
BEYOND_RUNGS = (
    _Row(Evidence.untried, "stopped", RAISE_RETRIES),
    _Row(Evidence.kept_state, "stopped", verdicts.LEAVE_OUT, verdicts.MAY_BE_KEPT),
    _Row(Evidence.wrong_in_fp32, "device_fault", "{0}.", verdicts.WRONG_IN_FP32),
    *BY_INPUTS,
)
"""The first explanations of a call that no rung cured, in order."""
LAST = (
    _Row(Evidence.unexplained, "stopped", RAISE_RETRIES),
    _Row(Evidence.own_dtype, "stopped", verdicts.OF_ITS_OWN, "{0}"),
)
"""The explanations of a call whose inputs and weights are not at fault either, in order; if none
holds, the call fails in fp32 by itself (``NOT_PRECISION``)."""
