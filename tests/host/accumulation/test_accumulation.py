"""How a model's products are summed, in a real ComfyUI: set inside its calls, exactly as before outside of them."""

import pytest
from halfsafe.nodes.host.accumulation.executor import Accumulation
from halfsafe.nodes.host.replay.interceptor import ACCUMULATION, Interceptor
from halfsafe.precision.base import flags
from halfsafe.precision.plan.accumulation import PARTS
from support import families
from support.families import load, report
from support.summing import FP16_ACCUMULATION, SETTINGS, accumulation, raising, spied, started_with, states

pytestmark = pytest.mark.usefixtures("flags_as_before")


@pytest.fixture(scope="module")
def of_dtype(comfy, wan):
    """Dtype -> two models whose products the switches act on: TF32 on fp32, the others on fp16."""
    return {dtype: [load(comfy, wan, dtype, dtype) for _ in range(2)] for dtype in ("fp16", "fp32")}


def succeed(comfy, model, another, call, look):
    families.replay(spied(model, look), call)


def fail_with(error):
    def situation(comfy, model, another, call, look):
        with pytest.raises(type(error)):
            families.replay(spied(spied(model, look), raising(error)), call)

    return situation


def opposite(comfy, model, another):
    request = Accumulation.on(model).request
    return accumulation(
        comfy, another, **{n: {"on": "off", "off": "on"}.get(getattr(request, n), "unchanged") for n in SETTINGS[:3]}
    )


def alternate_with_another_model(comfy, model, another, call, look):
    other, before, inside = opposite(comfy, model, another), states(), []
    for _ in range(2):
        families.replay(spied(model, look), call)
        families.replay(spied(other, lambda: inside.append(states())), call)
        assert states() == before
    held = Accumulation.on(other).plan_for(other).flags
    assert all(flags.SETTINGS[name].is_on(state[name]) is value for state in inside for name, value in held.items())


SITUATIONS = {
    "success": succeed,
    "error": fail_with(ValueError("broken")),
    "two models": alternate_with_another_model,
}
CASES = [
    (setting, situation, ("on", "off")[(row + column) % 2], bool((row + column // 2) % 2))
    for row, situation in enumerate(SITUATIONS)
    for column, setting in enumerate(SETTINGS[:3])
]
"""Each setting in each situation, either value and either state outside with each of both."""


@pytest.mark.parametrize(("setting", "situation", "value", "start"), CASES)
def test_set_inside_and_exactly_as_before_outside(comfy, of_dtype, call, ampere, setting, situation, value, start):
    base, another = of_dtype["fp32" if setting == "tf32" else "fp16"]
    with started_with(PARTS[setting], start) as before:
        inside = []
        model = accumulation(comfy, base, **{setting: value})
        assert states() == before, "the node itself changed a flag"
        SITUATIONS[situation](comfy, model, another, call, lambda: inside.append(states()))
        assert states() == before
    on = [flags.SETTINGS[part].is_on(state[part]) for state in inside for part in PARTS[setting]]
    assert set(on) == {value == "on"}
    pairs = [
        state[part]
        for state in inside
        for part in PARTS[setting]
        if setting != "tf32" and isinstance(state[part], tuple)
    ]
    assert all(pair == (value == "on", True) for pair in pairs), "cuBLAS refuses half products without split-k"


@pytest.mark.parametrize(
    ("profile", "compute", "setting", "value", "why"),
    [
        ("sm_86", "bf16", FP16_ACCUMULATION, "on", "affects fp16 products only"),
        ("sm_86", "fp32", FP16_ACCUMULATION, "auto", "affects fp16 products only"),
        ("sm_90", "fp16", FP16_ACCUMULATION, "auto", "adds the risk of overflow"),
        ("gfx1100", "fp16", FP16_ACCUMULATION, "on", "NVIDIA"),
        ("mps_m1", "fp16", FP16_ACCUMULATION, "auto", "NVIDIA"),
        ("xpu", "fp16", FP16_ACCUMULATION, "on", "NVIDIA"),
        ("cpu", "fp16", FP16_ACCUMULATION, "auto", "NVIDIA"),
        ("sm_75", "fp32", "tf32", "on", "does not support it"),
        ("sm_89", "bf16", "fp8_fast_accumulation", "on", "no layer multiplies in fp8"),
        ("sm_86", "bf16", "fp8_fast_accumulation", "auto", ""),
        ("sm_86", "bf16", "attention", "fp32", "no attention runs in fp16"),
    ],
)
def test_a_setting_that_cannot_act_says_why(comfy, wan, call, monkeypatch, profile, compute, setting, value, why):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    ours = accumulation(comfy, load(comfy, wan, "as_file", compute), **{setting: value})
    for _ in range(2):
        found = report(comfy, ours)
        reasons = [e["reason"] for e in found["without_effect"] if e["setting"] == f"{setting}={value}"]
        assert len(reasons) == 1 and why in reasons[0]
        assert reasons[0][:80] in " ".join(comfy.run("HalfsafeReport", model=ours)[0].split())
        families.replay(ours, call)


def test_tf32_acts_on_the_layer_that_wan_itself_calls_in_fp32(comfy, wan, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    found = report(comfy, accumulation(comfy, load(comfy, wan, "as_file", "bf16"), tf32="on"))
    assert [layer["name"] for layer in found["layers"] if layer["mode"] == "fp32" and layer["class"] == "Conv3d"] == [
        "patch_embedding"
    ]
    assert not [e for e in found["without_effect"] if e["setting"] == "tf32=on"]


def test_unchanged_adds_nothing(comfy, wan):
    model = load(comfy, wan)
    ours = accumulation(comfy, model)
    assert ours is not model and ours.wrappers == model.wrappers and ours.attachments.keys() == model.attachments.keys()
    assert report(comfy, ours)["flags"] == report(comfy, model)["flags"]
    accumulation(comfy, model, tf32="on")
    assert ACCUMULATION not in model.attachments and ACCUMULATION not in Interceptor.on(model).stages
