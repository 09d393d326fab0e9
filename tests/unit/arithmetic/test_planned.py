"""A plan on layers: what runs around each, and the mode that was planned beside the one that was observed."""

import torch
from halfsafe.precision.arithmetic.planned import PlannedLayers, chain_of
from halfsafe.precision.base.patching import patched
from halfsafe.precision.plan.compute import ComputeDecision
from support.plain_weights import PlainLayers

DECISIONS = {
    "0": ComputeDecision("fp16_wide", "fp32", ""),
    "1": ComputeDecision("bf16", "same", ""),
    "2": ComputeDecision("bf16", "fp32", ""),
}
CHAINS = {
    "0": ["CastResult(fp32)", "SafeOperation(fp16_wide)"],
    "1": ["CastResult(as input)", "CastOperation(bf16)", "Linear.forward"],
    "2": ["CastResult(fp32)", "CastOperation(bf16)", "Linear.forward"],
}


def planned(**how):
    layers = {name: torch.nn.Linear(16, 16, bias=False) for name in DECISIONS}
    return layers, PlannedLayers(DECISIONS, layers, PlainLayers(), **how)


def test_the_chain_of_a_layer_is_listed_from_the_outside_in():
    layers, plan = planned()
    assert {name: plan.chain(name) for name in layers} == CHAINS
    assert [line.strip() for line in repr(plan).splitlines()[1:-1]] == [
        f"1 layers, such as {name}: {' > '.join(chain)}" for name, chain in CHAINS.items()
    ]
    with patched(plan.patches):
        assert {name: chain_of(layer.forward) for name, layer in layers.items()} == CHAINS
    assert chain_of(layers["0"].forward) == ["Linear"]


def test_results_of_a_safe_plan_are_left_as_they_are():
    _, plan = planned(safe=True)
    assert plan.chain("0") == ["SafeOperation(fp16_wide)"] and plan.chain("1") == CHAINS["1"]


def test_what_calls_show_changes_the_observed_mode_and_not_the_planned_one():
    layers, plan = planned()
    expected = {name: decision.mode for name, decision in DECISIONS.items()}
    assert plan.planned_modes() == plan.observed_modes() == expected
    x = torch.full((2, 16), 1e6)
    with torch.inference_mode(), patched(plan.patches):
        plan.calibration.run(lambda: layers["0"](x))
    assert plan.planned_modes() == expected
    assert plan.observed_modes() == {**expected, "0": "fp16_scaled"}
    assert plan.fp16_flops == plan.calibration.flops["0"] == 2 * 2 * 16 * 16


def test_each_layer_has_the_dtype_it_was_planned_with():
    layers, plan = planned(results=torch.float16)
    with torch.inference_mode(), patched(plan.patches):
        found = plan.calibration.run(lambda: [layer(torch.ones(2, 16)).dtype for layer in layers.values()])
    assert found == [torch.float32, torch.float16, torch.float32]
