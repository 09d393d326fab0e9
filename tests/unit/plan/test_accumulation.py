"""How products are summed: the plan per device, what cannot act, threads."""

import threading
from dataclasses import replace

import pytest
import torch
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from halfsafe.precision.base import flags
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from halfsafe.precision.plan.accumulation import PARTS, MatmulProfile, Request
from support.page_words import untranslated

GAINING = ("sm_75", "sm_86", "sm_89", "sm_120")
CUBLAS = ("sm_70", *GAINING, "sm_80", "sm_90", "sm_100")
TF32 = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
FAST_FP8 = ("sm_89", "sm_90")


def plan(profile="sm_86", modes=("fp16",), **request):
    work = {name: request.pop(name) for name in ("compiled", "parallel") if name in request}
    return Request(**request).plan(detect(torch.device("cpu"), profile), MatmulProfile(frozenset(modes), **work))


OTHER_MODES = [("fp16", "fp32"), ("bf16",), ("fp32",), ("fp16_wide",), ("fp8", "bf16")]


@pytest.mark.parametrize(
    ("profile", "modes"), [(name, ("fp16",)) for name in PROFILE_NAMES] + [("sm_86", modes) for modes in OTHER_MODES]
)
def test_fp16_sums_by_device_and_compute(profile, modes):
    auto, on, off = (plan(profile, modes, fp16_accumulation=value) for value in ("auto", "on", "off"))
    helps, acts = profile in GAINING and "fp16" in modes, profile in CUBLAS and "fp16" in modes
    assert auto.trying is helps and auto.flags == off.flags == {FP16_ACCUMULATION: False}
    assert on.flags == ({FP16_ACCUMULATION: True} if acts else {})
    assert bool(on.without_effect) is bool(off.without_effect) is not acts
    assert bool(auto.without_effect) is not helps
    assert auto.reasons[FP16_ACCUMULATION].startswith("fp16 sums in each layer") is helps
    if acts and not helps:
        device = detect(torch.device("cpu"), profile)
        assert on.reasons[FP16_ACCUMULATION] == f"Switched on while this model runs. {device.reason(FP16_ACCUMULATION)}"


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_tf32_reduction_and_fp8_by_device(profile):
    nvidia = profile.startswith("sm_")
    for modes, setting, flags_held, acts in (
        (("fp32",), "tf32", PARTS["tf32"], profile in TF32),
        (("fp16",), "tf32", PARTS["tf32"], False),
        (("bf16",), "reduced_precision_reduction", PARTS["reduced_precision_reduction"], nvidia),
        (("fp32",), "reduced_precision_reduction", PARTS["reduced_precision_reduction"], False),
        (("fp8", "bf16"), "fp8_fast_accumulation", (), profile in FAST_FP8),
        (("bf16",), "fp8_fast_accumulation", (), False),
    ):
        for value in ("on", "off"):
            found = plan(profile, modes, **{setting: value})
            assert found.flags == (dict.fromkeys(flags_held, value == "on") if acts or value == "off" else {})
            assert [entry.setting for entry in found.without_effect] == ([] if acts else [f"{setting}={value}"])
            assert found.fp8_fast is (acts and setting == "fp8_fast_accumulation" and value == "on")


@pytest.mark.parametrize("execution", [{"compiled": True}, {"parallel": True}, {}])
@pytest.mark.parametrize("value", ["auto", "on"])
def test_fp32_results_rule_out_fp16_sums_where_they_cannot_be_switched_by_layer(value, execution):
    found = plan("sm_86", ("fp16", "fp16_wide"), fp16_accumulation=value, **execution)
    assert found.trying is (value == "auto" and not execution)
    assert (True in found.flags.values()) is (value == "on" and not execution)
    assert any("cannot be switched per layer" in entry.reason for entry in found.without_effect) is bool(execution)


@pytest.mark.parametrize("execution", [{"compiled": True}, {"parallel": True}])
def test_auto_acts_only_where_fp16_sums_can_be_switched_by_layer(execution):
    auto, on = (plan("sm_86", fp16_accumulation=value, **execution) for value in ("auto", "on"))
    assert (
        not auto.trying
        and auto.flags == {FP16_ACCUMULATION: False}
        and "cannot be switched per layer" in auto.without_effect[0].reason
    )
    assert on.flags == {FP16_ACCUMULATION: True} and not on.without_effect


def test_auto_keeps_fp8_sums_full_and_unchanged_holds_nothing():
    assert not plan("sm_89", ("fp8",), fp8_fast_accumulation="auto").fp8_fast
    found = plan("sm_86", ("fp16",))
    assert (found.flags, found.trying, found.without_effect) == ({}, False, ())


@pytest.mark.parametrize(
    ("modes", "acts"), [(("fp16",), True), (("fp16_wide",), True), (("bf16",), False), (("fp32",), False)]
)
@pytest.mark.parametrize("value", ["auto", "fp32"])
def test_attention_is_watched_only_where_it_runs_in_fp16(modes, acts, value):
    found = plan("sm_86", modes, attention=value)
    assert found.attention == (value if acts else "unchanged")
    assert bool(found.without_effect) is not acts


@pytest.mark.parametrize("name", flags.SETTINGS)
def test_a_flag_this_torch_lacks_is_said_not_raised(monkeypatch, name):
    def absent():
        raise AttributeError(name)

    monkeypatch.setitem(
        flags.SETTINGS, name, replace(flags.SETTINGS[name], read=absent, write=lambda v: pytest.fail("written"))
    )
    setting = next(setting for setting, parts in PARTS.items() if name in parts)
    found = plan("sm_86", ("fp16", "fp32"), **{setting: "on"})
    assert any(entry.setting == f"{setting}=on" and "has no" in entry.reason for entry in found.without_effect)
    assert not found.trying
    with flags.flags_set(found.flags):
        pass


def test_a_later_request_keeps_what_it_leaves_unchanged():
    merged = Request(tf32="on").over(Request(fp16_accumulation="off", tf32="off"))
    assert merged == Request(fp16_accumulation="off", tf32="on")


def test_threads_that_disagree_get_the_more_precise_value_and_switch_nothing():
    seen = []

    def other():
        for held in (False, True):
            with flags.flags_set({FP16_ACCUMULATION: held}):
                seen.append(flags.is_on(FP16_ACCUMULATION))
                with flags.flags_set({FP16_ACCUMULATION: True}):
                    seen.append(flags.is_on(FP16_ACCUMULATION))

    for held in (True, False):
        with flags.flags_set({FP16_ACCUMULATION: held}):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert flags.is_on(FP16_ACCUMULATION) is held
    assert seen == [False, True, True, True, False, False, False, False]


@pytest.mark.parametrize("profile", PROFILE_NAMES[1:])
def test_why_a_setting_has_no_effect_is_said_in_chinese(profile):
    for value in ("auto", "on"):
        request = Request(
            fp16_accumulation=value, reduced_precision_reduction="on", tf32="on", fp8_fast_accumulation=value
        )
        found = request.plan(detect(profile=profile), MatmulProfile(frozenset({"fp16", "fp8"})))
        assert untranslated([[*found.reasons.values()], [idle.reason for idle in found.without_effect]]) == []
