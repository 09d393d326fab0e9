"""Sums in fp16 only where they are proven: the bound against emulated tensor cores, the plan per device, threads."""

import threading
from functools import partial

import pytest
import torch
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION, ProvenSums, SumBound
from halfsafe.precision.base import flags
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from halfsafe.precision.plan.accumulation import PARTS, MatmulProfile, Request, plan_accumulation
from hypothesis import given, settings
from hypothesis import strategies as st
from support.page_words import untranslated
from support.plain_weights import plain_weights

GAINING = ("sm_75", "sm_86", "sm_89", "sm_120")
CUBLAS = ("sm_70", *GAINING, "sm_80", "sm_90", "sm_100")
TF32 = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
FAST_FP8 = ("sm_89", "sm_90")


def bounded(module):
    calibration = Calibration()
    sums = calibration.add(SumBound("layer"))
    return partial(ProvenSums(module, sums, calibration, plain_weights), module.forward), sums, calibration


def half_linear(weight, bias=None):
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    module.weight = torch.nn.Parameter(weight.half(), requires_grad=False)
    if bias is not None:
        module.bias = torch.nn.Parameter(bias.half(), requires_grad=False)
    return module


def test_a_layer_takes_an_input_without_rows():
    """An expert that no token reaches."""
    operation, sums, calibration = bounded(half_linear(torch.ones(4, 512), torch.zeros(4)))
    calibration.run(lambda: operation(torch.ones(2, 512).half()))
    assert sums.proven
    assert calibration.run(lambda: operation(torch.zeros(0, 512).half())).shape == (0, 4)


def fp16_sums(products, group):
    """Partial sums along the last axis as an fp16 accumulator keeps them, ``group`` exact products at a time."""
    pad = -products.shape[-1] % group
    groups = torch.nn.functional.pad(products, (0, pad)).unflatten(-1, (-1, group)).sum(-1)
    total, largest = torch.zeros_like(groups[..., 0]).half(), 0.0
    for part in groups.unbind(-1):
        total = (total.double() + part).half()
        largest = max(largest, total.abs().max().item())
    return total, largest


ORDERS = {
    "as stored": lambda p: p,
    "reversed": lambda p: p.flip(-1),
    "positives first": lambda p: p.sort(-1, descending=True).values,
    "negatives first": lambda p: p.sort(-1).values,
    "small first": lambda p: p.gather(-1, p.abs().argsort(-1)),
    "large first": lambda p: p.gather(-1, p.abs().argsort(-1, descending=True)),
}
SHAPES = {
    "normal": torch.randn,
    "constant": lambda *size, generator: torch.ones(size),
    "signs": lambda *size, generator: torch.randn(*size, generator=generator).sign(),
    "one large": lambda *size, generator: torch.randn(*size, generator=generator) * 0.01 + torch.eye(*size) * 10,
}


@given(
    st.integers(1, 300), st.sampled_from(sorted(SHAPES)), st.sampled_from(sorted(SHAPES)), st.floats(2.0, 24.0),
    st.floats(-6.0, 3.0), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_no_order_of_adding_overflows_a_layer_called_safe(terms, of_x, of_w, bound_bits, weight_bits, lora, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = SHAPES[of_w](4, terms, generator=generator) * 2.0**weight_bits
    if lora:
        up, down = (torch.randn(4, 2, generator=generator), torch.randn(2, terms, generator=generator))
        weight = weight + up @ down * 2.0**weight_bits
    x = SHAPES[of_x](3, terms, generator=generator)
    x = x * (2.0**bound_bits / (x.abs().max() * weight.half().float().abs().sum(1).max() + 1e-6))
    x = x.clamp(-65504, 65504).half()
    operation, sums, calibration = bounded(half_linear(weight))
    with torch.inference_mode():
        calibration.run(lambda: operation(x))
    if not sums.proven:
        return
    products = x.double().unsqueeze(1) * weight.half().double().unsqueeze(0)
    for order in ORDERS.values():
        for group in (1, 16):
            sums, largest = fp16_sums(order(products), group)
            assert torch.isfinite(sums).all() and largest <= 65504


def test_what_is_not_called_safe_does_overflow_in_a_bad_order():
    x, weight = torch.full((2, 4096), 16.0).half(), torch.full((3, 4096), 16.0)
    weight[:, 2048:] = -16.0
    operation, sums, calibration = bounded(half_linear(weight))
    calibration.run(lambda: operation(x))
    products = x.double().unsqueeze(1) * weight.double().unsqueeze(0)
    assert not torch.isfinite(fp16_sums(products, 16)[0]).all()
    assert not sums.proven


@pytest.mark.parametrize(
    ("bound", "proven"), {100: True, 32752: True, 32768: False, 65504: False, 1e12: False, float("inf"): False}.items()
)
def test_a_bound_needs_a_margin_of_two(bound, proven):
    sums = SumBound("layer")
    sums.prove(10.0, bound / 10, 5)
    assert sums.proven is proven


def test_the_numbers_of_a_bound_are_told():
    sums = SumBound("layer")
    sums.prove(100.0, 50.0, 1536)
    assert str(sums.evidence) == "bound 5000 of 65504 (||x|| 100, ||w||2 50, K 1536)"


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("size", [1.0, 40.0])
def test_the_result_is_the_layers_own_proven_or_not(size, with_bias):
    torch.manual_seed(0)
    bias = torch.randn(24) if with_bias else None
    module = half_linear(torch.randn(24, 64) * 16, bias)
    x = (torch.randn(2, 5, 64) * size).half()
    operation, sums, calibration = bounded(module)
    with torch.inference_mode():
        own = module(x)
        for _ in range(2):
            assert torch.equal(own, calibration.run(lambda: operation(x)))
    assert sums.proven is (size == 1)


def watched(module, seen):
    forward = module.forward

    def run(x):
        seen.append(flags.is_on(FP16_ACCUMULATION))
        return forward(x)

    module.forward = run
    return module


def test_the_flag_is_on_for_a_proven_layer_and_for_no_other():
    seen, wild = [], []
    safe_op, _, calibration = bounded(watched(half_linear(torch.ones(4, 8)), seen))
    module = watched(half_linear(torch.full((4, 8), 6e4)), wild)
    wild_op = partial(ProvenSums(module, SumBound("wild"), calibration, plain_weights), module.forward)
    x = torch.full((2, 8), 6e3).half()

    def call():
        with flags.flags_set({FP16_ACCUMULATION: False}):
            safe_op(x / 100)
            wild_op(x)

    for _ in range(3):
        calibration.run(call)
    assert seen == [True, True] and wild == [False] * 2, (
        "the first call multiplies by itself the weight that it measured"
    )
    assert flags.is_on(FP16_ACCUMULATION) is False


def test_an_error_inside_a_layer_leaves_the_flag_off():
    module = half_linear(torch.ones(4, 8))
    operation, _, calibration = bounded(module)
    calibration.run(lambda: operation(torch.ones(2, 8).half()))

    def fail(x):
        assert flags.is_on(FP16_ACCUMULATION) is True
        raise KeyboardInterrupt

    with flags.flags_set({FP16_ACCUMULATION: False}):
        with pytest.raises(KeyboardInterrupt):
            operation.func(fail, torch.ones(2, 8).half())
        assert flags.is_on(FP16_ACCUMULATION) is False


def test_a_call_that_outgrows_its_proof_is_repeated_and_proven_anew():
    operation, sums, calibration = bounded(half_linear(torch.ones(4, 64)))
    with torch.inference_mode():
        calibration.run(lambda: operation(torch.ones(2, 64).half()))
        assert sums.proven
        for size, repeats in ((400.0, 0), (600.0, 1), (1000.0, 1), (1.0, 1), (6e4, 1)):
            result = calibration.run(lambda size=size: operation(torch.full((2, 64), size).half()))
            assert calibration.repeats == repeats, size
    assert not sums.proven and result.isinf().all(), "the result itself is past fp16"


def test_a_nan_input_teaches_nothing():
    operation, sums, calibration = bounded(half_linear(torch.ones(4, 8)))
    calibration.run(lambda: operation(torch.ones(2, 8).half()))
    assert calibration.run(lambda: operation(torch.full((2, 8), float("nan")).half())).isnan().all()
    assert calibration.repeats == 1 and sums.proven
    calibration.run(lambda: operation(torch.ones(2, 8).half()))
    assert calibration.repeats == 1


def test_inputs_that_are_not_fp16_are_left_alone():
    operation, sums, calibration = bounded(torch.nn.Linear(8, 4))
    for _ in range(2):
        calibration.run(lambda: operation(torch.ones(2, 8)))
    assert not sums.proven and sums.terms == 0


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(profile="sm_86", modes=("fp16",), **request):
    work = {name: request.pop(name) for name in ("compiled", "parallel") if name in request}
    return plan_accumulation(
        Request(**request), detect(torch.device("cpu"), profile), MatmulProfile(frozenset(modes), **work)
    )


OTHER_MODES = [("fp16", "fp32"), ("bf16",), ("fp32",), ("fp16_wide",), ("fp8", "bf16")]


@pytest.mark.parametrize(
    ("profile", "modes"), [(name, ("fp16",)) for name in PROFILE_NAMES] + [("sm_86", modes) for modes in OTHER_MODES]
)
def test_fp16_sums_by_device_and_compute(profile, modes):
    auto, on, off = (plan(profile, modes, fp16_accumulation=value) for value in ("auto", "on", "off"))
    helps, acts = profile in GAINING and "fp16" in modes, profile in CUBLAS and "fp16" in modes
    assert auto.proving is helps and auto.flags == off.flags == {FP16_ACCUMULATION: False}
    assert on.flags == ({FP16_ACCUMULATION: True} if acts else {})
    assert bool(on.without_effect) is bool(off.without_effect) is not acts
    assert bool(auto.without_effect) is not helps
    assert auto.reasons[FP16_ACCUMULATION].startswith("fp16 sums in the layers") is helps
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
    assert found.proving is (value == "auto" and not execution)
    assert (True in found.flags.values()) is (value == "on" and not execution)
    assert any("cannot be switched per layer" in entry.reason for entry in found.without_effect) is bool(execution)


@pytest.mark.parametrize("execution", [{"compiled": True}, {"parallel": True}])
def test_auto_acts_only_where_fp16_sums_can_be_switched_by_layer(execution):
    auto, on = (plan("sm_86", fp16_accumulation=value, **execution) for value in ("auto", "on"))
    assert (
        not auto.proving
        and auto.flags == {FP16_ACCUMULATION: False}
        and "cannot be switched per layer" in auto.without_effect[0].reason
    )
    assert on.flags == {FP16_ACCUMULATION: True} and not on.without_effect


def test_auto_keeps_fp8_sums_full_and_unchanged_holds_nothing():
    assert not plan("sm_89", ("fp8",), fp8_fast_accumulation="auto").fp8_fast
    found = plan("sm_86", ("fp16",))
    assert (found.flags, found.proving, found.without_effect) == ({}, False, ())


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

    monkeypatch.setitem(flags.SETTINGS, name, flags.FlagSetting(name, absent, lambda v: pytest.fail("written"), bool))
    setting = next(setting for setting, parts in PARTS.items() if name in parts)
    found = plan("sm_86", ("fp16", "fp32"), **{setting: "on"})
    assert any(entry.setting == f"{setting}=on" and "has no" in entry.reason for entry in found.without_effect)
    assert not found.proving
    with flags.flags_set(found.flags):
        pass


def test_a_later_request_keeps_what_it_leaves_unchanged():
    merged = Request(tf32="on").over(Request(fp16_accumulation="off", tf32="off"))
    assert merged == Request(fp16_accumulation="off", tf32="on")


# --- threads ----------------------------------------------------------------------------------------------------------


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
        found = plan_accumulation(request, detect(profile=profile), MatmulProfile(frozenset({"fp16", "fp8"})))
        assert untranslated([[*found.reasons.values()], [idle.reason for idle in found.without_effect]]) == []
