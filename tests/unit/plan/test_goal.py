"""Plans of models in memory, with what cannot act on them, and the accumulation a goal implies."""

from halfsafe.precision.devices.detect import detect
from halfsafe.precision.plan.accumulation import Request
from halfsafe.precision.plan.compute import plan_compute
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.goal import GOALS, SUMS, on_loaded
from halfsafe.precision.plan.rules import rules_from

LAYERS = (LayerSpec("a", "Linear", (32, 32)), LayerSpec("b", "Linear", (32, 32)), LayerSpec("norm", "LayerNorm", (32,)))
FACTS = ModelFacts(LAYERS, 2048, "bf16", ("bf16", "fp32"))


def loaded(compute="fp16_safe", text="", foreign=()):
    rules = rules_from(text, "none")
    plan = plan_compute(FACTS, detect(profile="sm_86"), compute, rules, {})
    return on_loaded(plan, FACTS, rules, dict.fromkeys(foreign, "other.pack"))


def test_layers_of_another_loader_run_in_fp32_and_are_named_once():
    found = loaded(foreign=("a", "norm"))
    assert {name: (d.mode, d.stream) for name, d in found.decisions.items()} == {"a": ("fp32", "same"), "b": ("fp16_wide", "same")}
    assert found.decisions["a"].reason == "other.pack multiplies in its own way: run in fp32"
    assert [setting for setting, _ in found.without_effect] == ["compute=fp16_safe"]


def test_foreign_layers_keep_any_other_arithmetic():
    assert loaded("bf16", foreign=("a", "b")).decisions == {}


def test_rules_that_cannot_act_on_a_loaded_model_are_listed():
    found = loaded("bf16", "nowhere compute=fp32\na storage=fp8_e4m3fn")
    assert [setting for setting, _ in found.without_effect] == ["nowhere compute=fp32", "a storage=fp8_e4m3fn"]
    assert "Save Model" in found.without_effect[1][1]


def test_quality_and_speed_imply_their_accumulation():
    assert {goal: SUMS[goal][0] for goal in GOALS if goal in SUMS} == {
        "quality": Request(fp16_accumulation="off", reduced_precision_reduction="off", tf32="off"),
        "speed": Request(fp16_accumulation="auto", tf32="on"),
    }
