"""What the guard decides from the magnitudes that a repeat has shown."""

import pytest
from halfsafe.precision.base.dtypes import FP16_MAX
from halfsafe.precision.guard.localize import Origin
from halfsafe.precision.guard.log import CallPosition, GuardLog
from halfsafe.precision.guard.policy import plan_after
from halfsafe.precision.plan.in_use import PlanInUse

MODES = {
    "embed": "fp16",
    "blocks.0.up": "fp16",
    "blocks.0.down": "fp16",
    "blocks.1.up": "fp16",
    "blocks.1.down": "fp16",
}
SMALL = dict.fromkeys([*MODES, "blocks.0", "blocks.1"], 10.0)
PLAN = PlanInUse(MODES, "fp16")


def widened(present, largest, origin):
    """The plan of later calls after the safe repeat in fp16 was finite."""
    return plan_after(present.safe(), present, {**SMALL, **largest}, origin)


def product(layer, mode="fp16"):
    return Origin(layer, "matmul", "overflow", mode, 100.0, multiplies=True)


@pytest.mark.parametrize(("size", "too_large"), [(FP16_MAX / 2 - 1, False), (FP16_MAX / 2 + 1, True)])
def test_a_value_past_half_of_fp16s_range_widens_its_layer_and_the_stream(size, too_large):
    grown = widened(PLAN, {"blocks.1.up": size}, product("blocks.0.down"))
    assert (
        grown.stream is too_large and ("blocks.1.up" in grown.layers) is too_large and "blocks.0.down" in grown.layers
    )
    assert widened(PLAN, {"blocks.1": size}, product("blocks.0.down")).stream is too_large


def test_a_residual_add_widens_the_stream_and_no_layer():
    grown = widened(PLAN, {"blocks.1": 9e4}, Origin("blocks.1", "add", "overflow", "fp16", 6e4))
    assert grown == PLAN.wider({}, stream=True) and grown.named() == {"residual stream": "fp32"}


@pytest.mark.parametrize(
    ("mode", "wider"), [("fp16_acc16", "fp16"), ("int8", "fp16"), ("fp8", "fp16"), ("fp16", "fp16_wide")]
)
def test_a_layer_whose_values_all_fit_fp16_is_widened_alone(mode, wider):
    """Its fp16 sums or its 8-bit operands are what fails."""
    plan = PlanInUse({**MODES, "blocks.1.up": mode}, "fp16")
    assert widened(plan, {}, product("blocks.1.up")) == plan.wider({"blocks.1.up": wider})


def test_an_attention_that_overflows_widens_the_stream():
    origin = Origin("blocks.0.attn", "attention by sage", "overflow", "fp16", 500.0)
    assert widened(PLAN, {}, origin) == PLAN.wider({}, stream=True)


def test_what_was_learned_stays():
    first = widened(PLAN, {"blocks.0.down": 1e6}, product("blocks.0.down"))
    second = widened(first, {"blocks.1.up": 1e6}, product("blocks.1.up"))
    assert second.layers.keys() == {"blocks.0.down", "blocks.1.up"}


@pytest.mark.parametrize("origin", [product("blocks.0.down"), Origin("blocks.1", "add", "overflow", "fp16", 6e4), None])
def test_it_always_goes_up_and_ends(origin):
    present, steps = PLAN, 0
    while not present.whole:
        grown = widened(present, {}, origin)
        assert grown != present
        present, steps = grown, steps + 1
    assert steps <= 4


def test_the_whole_model_runs_in_fp32_if_only_fp32_helped():
    assert plan_after(PLAN.fp32(), PLAN, SMALL, product("blocks.1.up", "fp8")) == PLAN.fp32()


def test_the_worst_verdict_of_a_run_stays():
    log, event = GuardLog(), CallPosition(1, 0, 1.0, [0]).event(None, "fp16", "fp32", True)
    log.note(event, None, "recovered")
    log.note(event, None, "bad_weights", "Leave it out.")
    log.note(event, None, "recovered")
    assert (log.verdict, log.advice) == ("bad_weights", "Leave it out.")
    report = log.report(PlanInUse(layers={"blocks.0.down": "fp16_wide"}))
    assert report.escalations == {"blocks.0.down": "fp16_wide"} and len(report.events) == 3
