"""The plan that calls run under, and the wider plans of the guard."""

import pytest
from halfsafe.precision.plan.in_use import STREAM, WHOLE_MODEL, PlanInUse
from halfsafe.precision.plan.rules import rules_from

MODES = {"up": "fp16", "down": "int8", "head": "fp32"}
PLAN = PlanInUse(MODES, "fp16")


@pytest.mark.parametrize(
    ("plan", "modes"),
    [
        (PLAN, {}),
        (PLAN.wider({}, patches=frozenset("p")), {}),
        (PLAN.wider({"up": "fp16_wide"}), {"up": "fp16_wide"}),
        (PLAN.wider({"up": "fp16_wide"}, stream=True), {**MODES, "up": "fp16_wide"}),
        (PLAN.safe(), dict.fromkeys(MODES, "fp16_wide")),
        (PLAN.fp32(), dict.fromkeys(MODES, "fp32")),
    ],
)
def test_a_wider_plan_exchanges_what_it_widens_or_all_for_the_stream(plan, modes):
    assert plan.exchanged() == modes and plan.is_wider is (plan != PLAN)


def test_safe_widens_the_stream_and_fp32_the_whole_model():
    assert PLAN.safe() == PlanInUse(MODES, "fp16", dict.fromkeys(MODES, "fp16_wide"), stream=True)
    assert PLAN.fp32() == PlanInUse(MODES, "fp16", dict.fromkeys(MODES, "fp32"), whole=True)


def test_wider_keeps_what_was_wider_before():
    first = PLAN.wider({"up": "fp16_wide"}, stream=True, patches=frozenset("p"))
    assert first == PlanInUse(MODES, "fp16", {"up": "fp16_wide"}, stream=True, patches=frozenset("p"))
    second = first.wider({"down": "fp32"}, patches=frozenset("q"))
    assert second == PlanInUse(MODES, "fp16", {"up": "fp16_wide", "down": "fp32"}, stream=True, patches=frozenset("pq"))


@pytest.mark.parametrize("wider", ["safe", "fp32"])
def test_safe_and_fp32_hold_nothing_of_what_was_wider_before(wider):
    before = PLAN.wider({"up": "fp32"}, patches=frozenset("p"))
    assert getattr(before, wider)() == getattr(PLAN, wider)()


@pytest.mark.parametrize(
    "plan",
    [
        PlanInUse(layers={"blocks.0.down": "fp16_wide"}),
        PlanInUse(layers={"blocks.0.down": "fp16_scaled"}, stream=True),
        PlanInUse(stream=True),
        PlanInUse(layers={"a": "fp32"}),
        PlanInUse(whole=True),
    ],
)
def test_what_is_wider_than_planned_is_rules(plan):
    rules = rules_from(plan.rules(), "none")
    for layer, mode in plan.layers.items():
        assert rules.setting("compute", layer, "Linear")[0] == {"fp32": "fp32"}.get(mode, "fp16_safe")
    assert (rules.setting("stream", "other.layer", "Linear") is not None) is plan.everywhere


def test_two_plans_merge_into_what_either_widens():
    one = PlanInUse(layers={"a": "fp16_wide", "b": "fp32"}, stream=True, patches=frozenset("p"))
    other = PlanInUse(layers={"a": "fp32", "c": "fp16"}, whole=True, patches=frozenset("q"))
    either = PlanInUse(layers={"a": "fp32", "b": "fp32", "c": "fp16"}, stream=True, whole=True, patches=frozenset("pq"))
    assert one | other == other | one == either
    assert (PlanInUse() | one) == one and (one | PlanInUse()) == one


def test_the_report_names_each_part_with_its_mode():
    plan = PlanInUse(layers={"a": "fp16_wide"}, patches=frozenset(["a patch"]))
    assert plan.named() == {"a": "fp16_wide", "a patch": "fp32"}
    assert plan.wider({}, stream=True).named() == {"a": "fp16_wide", "a patch": "fp32", STREAM: "fp32"}
    assert plan.fp32().named() == {WHOLE_MODEL: "fp32"}


def test_the_page_names_the_widest_part():
    assert PlanInUse(layers={"b": "fp32", "a": "fp16"}).parts() == ["a", "b"]
    assert (PlanInUse(layers={"a": "fp32"}, stream=True).parts(), PlanInUse(stream=True, whole=True).parts()) == (
        ["residual stream"],
        ["whole model"],
    )
