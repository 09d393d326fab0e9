"""What a guard's log tells, and when it ends a run."""

import itertools
import math
import re

import pytest
from halfsafe.precision.guard.inputs import Diagnosis
from halfsafe.precision.guard.localize import Origin
from halfsafe.precision.guard.log import CallPosition, GuardLog, event_of, sentence
from halfsafe.precision.guard.policy import Escalation
from halfsafe.precision.guard.verdicts import ADVICE, NonFinite

ORIGIN = Origin("blocks.0.down", "matmul", "overflow", "fp16", 489.2)


class Told(list):
    """Keeps what a log tells: (kind, verdict, message, advice, event)."""

    def __call__(self, *message):
        self.append(message)


@pytest.mark.parametrize(
    ("on_nan", "spoils_all", "stops"),
    [("stop", False, True), ("stop", True, True), ("retry_higher", False, False), ("retry_higher", True, True), ("report", True, False)],
)
def test_a_run_ends_where_nothing_is_left_to_save_or_the_node_says_so(on_nan, spoils_all, stops):
    told = Told()
    log = GuardLog(on_nan, told)
    position = CallPosition(1, spoils_all=spoils_all)
    if stops:
        with pytest.raises(NonFinite, match="blocks.0.down") as error:
            log.give_up(position, Diagnosis(ORIGIN, "not_precision"), "fp16")
        assert error.value.verdict == "not_precision"
    else:
        log.give_up(position, Diagnosis(ORIGIN, "not_precision"), "fp16")
    assert log.given_up and [event.ended for event in log.events] == [stops]
    ((kind, verdict, message, advice, event),) = told
    assert (kind, verdict, advice, event) == ("event", "not_precision", ADVICE["not_precision"], log.events[0])
    assert "blocks.0.down" in message


def test_a_verdict_is_told_once_with_the_counts():
    told = Told()
    log = GuardLog(notify=told)
    log.notify_verdict(Escalation())
    assert told == []
    log.notify_verdict(Escalation({"blocks.0.down": "fp32", "head": "fp32"}))
    assert told.pop() == ("verdict", "clean", "Began wider, as an earlier run showed: blocks.0.down, head.", "")
    log.note(event_of(CallPosition(1), ORIGIN, "fp16", "fp16_wide", True), ORIGIN, "recovered")
    log.extra_calls = 2
    log.notify_verdict(Escalation())
    assert told[1] == ("verdict", "recovered", "Repaired: 1 step was repeated.", ADVICE["recovered"])
    only_told = GuardLog("report", told)
    only_told.note(event_of(CallPosition(1), ORIGIN, "fp16", "fp16", False), ORIGIN, "stopped")
    only_told.notify_verdict(Escalation())
    assert told[-1][:3] == ("verdict", "stopped", "Told and not repaired, as the guard is set to."), "nothing was stopped"


def test_an_encoder_is_told_of_by_its_dtypes():
    overflow = Origin("VAE decode", "", "overflow", "fp16", math.nan)
    text = sentence(event_of(CallPosition(1), overflow, "fp16", "bf16", True), overflow)
    assert text == "The result became NaN or Inf, first in VAE decode, computed in fp16. Repeated in bf16: no NaN."


EMPTY = re.compile(r"\bnan\b|computed in[,.]|computed in  |, ,|\(\)|\bin [,.]|  |, \.|None")


@pytest.mark.parametrize("kind", ["overflow", "nan", "weights", "unknown", "input", "canary", "saturation"])
@pytest.mark.parametrize(("recovered", "evidence"), [(False, ""), (False, "It holds NaN."), (True, "")])
def test_a_sentence_has_no_empty_or_meaningless_field(kind, recovered, evidence):
    """Whatever is not known of an event is left out."""
    places = [CallPosition(0), CallPosition(3, 2, 0.5, [0, 2]), CallPosition(3, 2, math.nan, [1])]
    origins = [Origin(layer, op, kind, "", largest) for layer in ("latent image", "a.b") for op in ("", "mul") for largest in (math.nan, 7.0)]
    for place, origin, mode in itertools.product(places, origins, ("", "fp16")):
        event = event_of(place, origin, mode, mode or "fp32", recovered, evidence)
        text = sentence(event, origin)
        assert not EMPTY.search(text), text
        assert kind != "input" or "NaN or Inf in the" in text


def test_an_event_of_no_known_origin_is_told_as_the_models():
    event = event_of(CallPosition(1, 0, 1.0, [0]), None, "fp16", "fp16", True, "The same again.")
    assert sentence(event, None) == (
        "Step 0, sigma 1: the result became NaN or Inf in the model, computed in fp16, batch rows 0. Repeated in fp16: no NaN. "
        "The same again."
    )
