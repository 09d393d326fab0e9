"""What a guard's log tells, and when it ends a run."""

import functools

import pytest
from halfsafe.precision.guard.localize import Origin
from halfsafe.precision.guard.log import CallPosition, GuardLog, encoder_sentence, event_of
from halfsafe.precision.guard.policy import ADVICE, NonFinite

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
            log.give_up(position, ORIGIN, "not_precision", mode="fp16")
        assert error.value.verdict == "not_precision"
    else:
        log.give_up(position, ORIGIN, "not_precision", mode="fp16")
    assert log.given_up and len(log.events) == 1
    ((kind, verdict, message, advice, event),) = told
    assert (kind, verdict, advice, event) == ("event", "not_precision", ADVICE["not_precision"], log.events[0])
    assert "blocks.0.down" in message


def test_a_verdict_is_told_once_with_the_counts():
    told = Told()
    log = GuardLog(notify=told)
    log.tell_verdict()
    assert told == []
    log.note(event_of(CallPosition(1), ORIGIN, "fp16", "fp16_wide", True), ORIGIN, "recovered")
    log.extra_calls = 2
    log.tell_verdict()
    assert told[1] == ("verdict", "recovered", "Guard: recovered, 1 event, 2 repeated calls.", ADVICE["recovered"])


def test_an_encoder_is_told_of_by_its_kind_and_dtypes():
    told = Told()
    log = GuardLog(notify=told, describe=functools.partial(encoder_sentence, kind="VAE"))
    overflow = Origin("VAE decode", "", "overflow", "fp16", 0.0)
    log.note(event_of(CallPosition(1), overflow, "fp16", "bf16", True), overflow, "recovered", "")
    log.give_up(CallPosition(2), Origin("decoder.up", "add", "overflow", "fp16", 0.0), "not_precision", "Another file.", "fp16")
    assert [message[2:4] for message in told] == [
        ("VAE decode: the result was NaN or Inf in fp16. Repeated in bf16: finite.", ""),
        ("VAE: the result is NaN or Inf, computed in fp16, first in decoder.up (add).", "Another file."),
    ]
