"""What a guard's log tells, and when it ends a run."""

import itertools
import math
import re

import pytest
import torch
from halfsafe.precision.base.oom import is_torch_oom
from halfsafe.precision.guard.inputs import Diagnosis, NotFiniteInput
from halfsafe.precision.guard.localize import Origin
from halfsafe.precision.guard.log import (
    CallPosition,
    GuardLog,
    sentence,
)
from halfsafe.precision.guard.verdicts import ANY_GUARD, BEGAN_WIDER, BETWEEN_CALLS, MODEL, VERDICTS, NonFinite, Place
from halfsafe.precision.plan.in_use import PlanInUse

ORIGIN = Origin("blocks.0.down", "matmul", "overflow", "fp16", 489.2)


class Told(list):
    """Keeps what a log tells: (kind, verdict, message, advice, event)."""

    def __call__(self, *message):
        self.append(message)


@pytest.mark.parametrize(
    ("on_nan", "spoils_all", "stops"),
    [
        ("stop", False, True),
        ("stop", True, True),
        ("retry_higher", False, False),
        ("retry_higher", True, True),
        ("report", True, False),
    ],
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
    assert (kind, verdict, advice, event) == ("event", "not_precision", VERDICTS["not_precision"].advice, log.events[0])
    assert "blocks.0.down" in message


def test_a_verdict_is_told_once_with_the_counts():
    told = Told()
    log = GuardLog(notify=told)
    log.notify_verdict(PlanInUse())
    assert told == []
    log.notify_verdict(PlanInUse(layers={"blocks.0.down": "fp32", "head": "fp32"}))
    assert told.pop() == (
        "verdict",
        "clean",
        "Started as the last repair ended, with these in a higher precision: blocks.0.down, head.",
        "",
    )
    log.note(CallPosition(1).event(ORIGIN, "fp16", "fp16_wide", True), ORIGIN, "recovered")
    log.extra_calls = 2
    log.notify_verdict(PlanInUse())
    assert told[1] == (
        "verdict",
        "recovered",
        "Repaired: 1 step was repeated.",
        ANY_GUARD.worded(VERDICTS["recovered"].advice),
    )
    only_told = GuardLog("report", told)
    only_told.note(CallPosition(1).event(ORIGIN, "fp16", "fp16", False), ORIGIN, "stopped")
    only_told.notify_verdict(PlanInUse())
    assert told[-1][:3] == ("verdict", "stopped", ("Not repaired, because the guard is set to report.")), (
        "nothing was stopped"
    )


def test_an_encoder_is_told_of_by_its_dtypes():
    overflow = Origin("VAE decode", "", "overflow", "fp16", math.nan)
    text = sentence(CallPosition(1).event(overflow, "fp16", "bf16", True), overflow)
    assert text == "The result became NaN or Inf, first in VAE decode, computed in fp16. Repeated in bf16: no NaN."


EMPTY = re.compile(r"\bnan\b|computed in[,.]|computed in  |, ,|\(\)|\bin [,.]|  |, \.|None")


@pytest.mark.parametrize("kind", ["overflow", "nan", "weights", "unknown", "input", "canary", "saturation"])
@pytest.mark.parametrize(("recovered", "evidence"), [(False, ""), (False, "It holds NaN."), (True, "")])
def test_a_sentence_has_no_empty_or_meaningless_field(kind, recovered, evidence):
    """Whatever is not known of an event is left out."""
    places = [CallPosition(0), CallPosition(3, 2, 0.5, [0, 2]), CallPosition(3, 2, math.nan, [1])]
    origins = [
        Origin(layer, op, kind, "", largest)
        for layer in ("latent image", "a.b")
        for op in ("", "mul")
        for largest in (math.nan, 7.0)
    ]
    for place, origin, mode in itertools.product(places, origins, ("", "fp16")):
        event = place.event(origin, mode, mode or "fp32", recovered, evidence)
        text = sentence(event, origin)
        assert not EMPTY.search(text), text
        assert kind != "input" or "NaN or Inf in the" in text


def test_the_page_is_told_an_event_in_brief_with_the_labels_of_modes():
    told = []
    log = GuardLog(notify=lambda *message: told.append(message))
    event = CallPosition(4, 3, 0.7031, [0, 2]).event(
        Origin("blocks.0", "mul", "overflow", "", 7e4),
        "fp16_wide",
        "fp32",
        True,
        "Why.",
    )
    log.note(event, Origin("blocks.0", "mul", "overflow", "", 7e4), "recovered")
    ((_, _, message, _, event),) = told
    assert (
        message
        == "Step 3, sigma 0.7031: The result became NaN or Inf in blocks.0 (mul), computed in fp16_wide, largest input 7e+04, batch rows 0, 2. Repeated in fp32: no NaN. Why."
    )
    assert (
        event.brief
        == "Step 3: The result became NaN or Inf in blocks.0, computed in fp16 with fp32 results. Repeated in fp32: no NaN. Why."
    )


def test_an_event_of_no_known_origin_is_told_as_the_models():
    event = CallPosition(1, 0, 1.0, [0]).event(None, "fp16", "fp16", True, "The same again.")
    assert sentence(event, None) == (
        "Step 0, sigma 1: The result became NaN or Inf in the model, computed in fp16, batch rows 0. Repeated in fp16: no NaN. "
        "The same again."
    )


def test_a_failure_that_is_given_up_keeps_the_mode_it_had():
    log = GuardLog("report")
    log.give_up(CallPosition(1, batch_rows=[1]), Diagnosis(ORIGIN, "stopped", evidence="Why."), "fp16")
    (event,) = log.events
    assert (event.from_mode, event.to_mode, event.recovered, event.evidence) == ("fp16", "fp16", False, "Why.")
    assert log.lost == {1} and not log.given_up


@pytest.mark.parametrize(("on_nan", "verdict", "steps", "expected"), [
    ("retry_higher", "recovered", 1, "Repaired: 1 step was repeated."),
    ("retry_higher", "recovered", 2, "Repaired: 2 steps were repeated."),
    ("stop", "stopped", 1, "set to"),
    ("report", "stopped", 1, "set to"),
    ("retry_higher", "stopped", 1, "Guard: "),
    ("stop", "bad_weights", 1, "Guard: "),
])  # fmt: skip
def test_a_run_with_nan_is_summed_up_by_what_became_of_it(on_nan, verdict, steps, expected):
    told = Told()
    log = GuardLog(on_nan, told)
    for step in range(steps):
        event = CallPosition(1 + step, step).event(ORIGIN, "fp16", "fp32", verdict == "recovered")
        log.note(event, ORIGIN, verdict)
    told.clear()
    log.notify_verdict(PlanInUse())
    ((kind, of, message, advice),) = told
    assert (kind, of, advice) == (
        "verdict",
        verdict,
        ANY_GUARD.worded(VERDICTS[verdict].advice),
    ) and expected in message
    assert ("set to" in message) == (expected == "set to"), message


def test_the_report_of_a_clean_run_says_that_it_began_wider():
    log, wider = GuardLog(), PlanInUse(layers={"a": "fp32"})
    assert (log.report(wider).advice, log.report(PlanInUse()).advice) == (BEGAN_WIDER, "")
    assert log.report(wider).rules == "a compute=fp32"
    log.calls, log.extra_calls = 3, 2
    log.note(CallPosition(1).event(ORIGIN, "fp16", "fp32", True), ORIGIN, "recovered")
    report = log.report(wider)
    assert (report.verdict, report.calls, report.extra_calls, report.advice) == (
        "recovered",
        3,
        2,
        ANY_GUARD.worded(VERDICTS["recovered"].advice),
    )


@pytest.mark.parametrize(
    ("rows", "on_nan", "raised"),
    [([0], "retry_higher", False), ([0, 1], "retry_higher", True), ([0], "stop", True), ([0, 1], "report", False)],
)
def test_an_input_with_nan_of_a_sampling_is_blamed_for_its_rows(rows, on_nan, raised):
    value = torch.zeros(2, 3)
    value[rows] = math.nan
    log, given = GuardLog(on_nan), NotFiniteInput("latent image", (value,))
    if raised:
        with pytest.raises(NonFinite) as error:
            log.blame_inputs([given], 2)
        assert error.value.verdict == "bad_input"
    else:
        log.blame_inputs([given], 2)
    (event,) = log.events
    assert (event.layer, event.kind, event.batch_rows) == ("latent image", "input", rows) and log.lost == set(rows)


@pytest.mark.parametrize(
    ("bad", "lost", "blamed"), [([], set(), []), ([1], set(), [1]), ([1], {1}, []), ([0, 1], {0}, [1])]
)
def test_what_arises_between_calls_is_blamed_on_no_layer_and_once(bad, lost, blamed):
    log, result = GuardLog("report", lost=set(lost), calls=4), torch.zeros(2, 3)
    result[bad] = math.nan
    log.blame_between_calls(result, torch.tensor([1.0, 0.25]))
    assert [event.batch_rows for event in log.events] == ([blamed] if blamed else [])
    for event in log.events:
        assert (event.layer, event.kind, event.call, event.step, event.sigma) == ("sampler", "nan", 4, 1, 0.25)
        assert event.evidence == BETWEEN_CALLS and log.verdict == "not_precision" and log.given_up == (lost == {0})


def test_between_calls_nothing_is_blamed_on_a_run_that_was_given_up():
    log = GuardLog("report", given_up=True)
    log.blame_between_calls(torch.full((1, 2), math.nan), torch.tensor([1.0]))
    assert not log.events


@pytest.mark.parametrize(("on_nan", "cured"), [("retry_higher", True), ("report", False), ("stop", False)])
def test_a_device_whose_product_is_wrong_is_repaired_in_fp32(on_nan, cured):
    log = GuardLog(on_nan)

    def blamed():
        return log.blame_device(CallPosition(1), torch.device("cpu"), "fp16", "fp16 matmul gives zeros")

    if on_nan == "stop":
        with pytest.raises(NonFinite, match="test operation on cpu"):
            blamed()
    else:
        assert blamed() is cured
    (event,) = log.events
    assert (event.op, event.kind, event.from_mode, event.to_mode, event.recovered) == (
        "matmul",
        "canary",
        "fp16",
        "fp32" if cured else "fp16",
        cured,
    )
    assert log.verdict == "device_fault" and log.advice == f"fp16 matmul gives zeros. {VERDICTS['device_fault'].advice}"


@pytest.mark.parametrize("verdict", ["recovered", "clean", "bad_input"])
def test_a_run_that_found_no_memory_has_a_verdict_only_if_something_was_at_fault_before(verdict):
    told = Told()
    log = GuardLog("retry_higher", told, calls=7)
    if verdict != "clean":
        log.note(CallPosition(1).event(ORIGIN, "fp16", "fp32", True), ORIGIN, verdict)
    log.blame_end(torch.OutOfMemoryError("no memory"), is_torch_oom)
    assert log.verdict == ("bad_input" if verdict == "bad_input" else "stopped")
    if verdict == "recovered":
        assert (log.events[-1].call, log.advice) == (7, MODEL.no_memory)
    if verdict == "clean":
        log.notify_verdict(PlanInUse())
        assert log.advice.endswith("(OutOfMemoryError: no memory).") and not log.events and not told, (
            "nothing was NaN, and ComfyUI tells the error"
        )


def test_advice_names_the_setting_and_the_button_that_are_on_the_screen():
    log = GuardLog("report", place=lambda: Place("Guard every run", "Click Guard this workflow."))
    origin = Origin("blocks.0.down", "matmul", "overflow", "fp16", 489.2)
    stopped = log.note(CallPosition(1).event(origin, "fp16", "fp16", False), origin, "stopped")
    assert log.advice.startswith("Set Guard every run to retry_higher") and str(stopped).endswith(log.advice)
    cured = GuardLog(place=log.place)
    cured.note(CallPosition(1).event(origin, "fp16", "fp32", True), origin, "recovered")
    assert cured.advice == "No NaN or Inf is left. Click Guard this workflow."


@pytest.mark.parametrize("kind", ["saturation", "overflow"])
@pytest.mark.parametrize("worse", ["bad_input", "bad_weights", "not_precision", "device_fault"])
def test_any_failure_is_worse_than_values_that_were_clamped(kind, worse):
    log = GuardLog("report")
    clamped = CallPosition(1).event(ORIGIN, "fp16", "fp16", False)
    clamped.kind = kind
    log.note(clamped, ORIGIN, "stopped")
    log.note(CallPosition(2).event(ORIGIN, "fp16", "fp16", False), ORIGIN, worse)
    assert log.verdict == (worse if kind == "saturation" else "stopped")


@pytest.mark.parametrize("error", [ValueError("of a pack"), torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_the_end_of_a_run_that_was_repaired_is_told_with_its_verdict(error):
    told = Told()
    log = GuardLog("report", told)
    event = CallPosition(1).event(ORIGIN, "fp16", "fp32", True)
    log.note(event, ORIGIN, "recovered")
    log.restarts.append(event)
    log.take_back()
    log.blame_end(error, is_torch_oom)
    log.notify_verdict(PlanInUse())
    assert [message[0] for message in told] == ["event", "taken_back", "event", "verdict"] and not event.recovered
    assert told[-1][1:3] == ("stopped", told[-2][2]) and "guard is set to" not in told[-1][2]
