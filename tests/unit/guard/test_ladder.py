"""What is decided on a call that failed, whoever made it: a call of a few numbers, damaged in each of the ways there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest
import torch
from halfsafe.precision.base.oom import is_torch_oom
from halfsafe.precision.devices import probes
from halfsafe.precision.devices.random_start import RandomStart
from halfsafe.precision.guard.failed_call import Attempt, FailedCall
from halfsafe.precision.guard.inputs import inputs_not_finite
from halfsafe.precision.guard.ladder import Ladder
from halfsafe.precision.guard.localize import Origin
from halfsafe.precision.guard.log import CallPosition, GuardLog, sentence
from halfsafe.precision.guard.rungs import AS_IT_WAS, EncoderStep, Rung
from halfsafe.precision.guard.verdicts import (
    ANY_GUARD,
    BEGINS_SAFE,
    COMPILED,
    EAGER_IS_FINITE,
    ENCODERS,
    GOES_ON,
    MODEL,
    NOT_HIDDEN_AGAIN,
    NOT_SEARCHED,
    READ_BY_NONE,
    SAME_AGAIN,
    SAME_SEED,
    VERDICTS,
    NonFinite,
)

BAD = torch.full((2, 3), math.inf)
GOOD = torch.ones(2, 3)
OVERFLOW = Origin("blocks.0", "matmul", "overflow", "fp16", 400.0)
FP32 = Rung("fp32", EncoderStep(torch.float32), is_fp32=True)
PROMISED = Rung("fp16_safe", EncoderStep(torch.float16), later=f"{GOES_ON} {SAME_SEED}")
UNKNOWN = Origin("blocks.0", "add", "unknown", "fp16", math.nan)


@dataclass
class OneWeight:
    """A model of one weight, ``blocks.0.weight``."""

    value: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    patch: str = ""
    copied: str = ""

    def bad_copy(self, origin: Origin) -> str:
        return self.copied

    def not_finite(self) -> dict[str, torch.Tensor]:
        return {} if torch.isfinite(self.value).all() else {"blocks.0.weight": self.value}

    def has_nan(self, name: str) -> bool:
        return bool(torch.isnan(self.value).any())

    def sentence(self, name: str) -> str:
        return f"The weight '{name}' holds NaN or Inf."

    def patch_sentence(self, layer: str) -> str:
        return self.patch


class Fake(FailedCall):
    """A call of a dict of tensors; ``made`` gives what it returns, of what it is given, how it is run and what is zeroed.

    ``rungs``: their names, the last one in fp32. ``ran``: how it was run: "as it was", "watched" or a rung, in this order.
    """

    def __init__(
        self,
        made: Callable,
        origin: Origin | None = OVERFLOW,
        weights: OneWeight | None = None,
        rungs=("fp16_safe", "fp32"),
        **about,
    ):
        self.made, self.origin = made, origin
        self.ran: list[str] = []
        self.kept: list[str] = []
        self.origin_in_fp32: Origin | None = None
        cpu = torch.device("cpu")
        ladder = [
            AS_IT_WAS if name == "as it was" else Rung(name, EncoderStep(torch.float32), name == "fp32")
            for name in rungs
        ]
        about["given"] = about.get("given", {"text": GOOD})
        about["sites"] = frozenset(["clamp"] if about.pop("hidden", False) else [])
        values = {"result": BAD, "rungs": ladder, "fp32": FP32, "wording": MODEL} | about
        super().__init__(
            start=RandomStart.of(cpu), position=CallPosition(1, 3, 0.5), images=2, device=cpu,
            weights=weights or OneWeight(), is_out_of_memory=is_torch_oom, **values,
        )  # fmt: skip

    def repeat(self, rung, given, why, zeroed=(), watched=False):
        how = "as it was" if rung.as_it_was else rung.name
        self.ran.append("watched" if watched and rung.as_it_was else how)
        result = self.made(given, self.ran[-1], zeroed)
        origin = self.origin if rung.as_it_was else self.origin_in_fp32
        if self.sites and rung.as_it_was and not torch.isfinite(result).all():
            return Attempt(self.result, 1.0, origin=origin if watched else None, hidden=self.sites)
        return Attempt(result, result.abs().amax().item(), origin=origin if watched else None)

    def maker(self, layer):
        return "SomePack" if layer == "blocks.0" else ""

    def inputs(self):
        return inputs_not_finite(self.given.items())

    def mode(self, origin):
        return f"fp16 of {origin.layer}" if origin else "fp16"

    def keep(self, rung, origin, place):
        self.kept.append(rung.name)
        self.kept_for = origin
        return self.mode(place), rung.name


def resolve(call: Fake, on_nan: str = "retry_higher", most: int | None = 8, given=None):
    """(log, result, error) of a ladder."""
    log = GuardLog(on_nan)
    if given is not None:
        call.given = given
    ladder = Ladder(call, log, most)
    try:
        return log, ladder.resolved(), None
    except NonFinite as error:
        return log, None, error


def finite_at(*hows: str) -> Callable:
    return lambda given, how, zeroed: GOOD if how in hows else BAD


def test_the_first_step_that_is_finite_is_kept_and_none_after_it_runs():
    call = Fake(finite_at("fp16_safe", "fp32"))
    log, result, _ = resolve(call)
    assert torch.equal(result, GOOD) and call.ran == ["watched", "fp16_safe"] and call.kept == ["fp16_safe"]
    (event,) = log.events
    assert log.verdict == "recovered" and (event.layer, event.to_mode, event.recovered) == (
        "blocks.0",
        "fp16_safe",
        True,
    )
    assert (event.step, event.batch_rows, log.extra_calls) == (3, [0, 1], 2)


def test_every_repeat_draws_what_the_call_drew_and_leaves_the_random_numbers():
    drawn = []

    def result(given, how, zeroed):
        drawn.append(torch.rand(()).item())
        return BAD

    before = torch.get_rng_state()
    resolve(Fake(result))
    assert len(drawn) == 4 and len(set(drawn)) == 1 and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("finite", "about", "verdict", "ran"),
    [
        (["watched", "as it was"], {}, "device_fault", ["watched", "as it was"]),
        (["watched"], {"compiled": True}, "device_fault", ["watched", "as it was"]),
        (["watched", "fp32"], {}, "recovered", ["watched", "as it was", "fp16_safe", "fp32"]),
        (["as it was"], {"locates_first": False, "rungs": ["as it was", "fp32"]}, "device_fault", ["as it was"]),
        (["fp32"], {"locates_first": False, "rungs": ["as it was", "fp32"]}, "recovered", ["as it was", "fp32"]),
        ([], {"locates_first": False}, "not_precision", ["fp16_safe", "fp32", "watched", "fp32"]),
        ([], {}, "not_precision", ["watched", "fp16_safe", "fp32", "fp32"]),
        ([], {"rungs": []}, "not_precision", ["watched"]),
    ],
)
def test_a_verdict_follows_from_what_is_finite(finite, about, verdict, ran):
    call = Fake(finite_at(*finite), **about)
    log, _, _ = resolve(call)
    assert log.verdict == verdict and call.ran == ran and log.extra_calls == len(ran)


def test_the_event_of_a_cured_call_names_place_modes_and_what_later_runs_do():
    rung = Rung("fp16_safe", EncoderStep(torch.float16), later=SAME_SEED)
    call = Fake(finite_at("fp16_safe"))
    call.rungs = [rung, FP32]
    log, _, _ = resolve(call)
    (event,) = log.events
    assert (event.layer, event.from_mode, event.to_mode, event.evidence) == (
        "blocks.0",
        "fp16 of blocks.0",
        "fp16_safe",
        SAME_SEED,
    )
    assert (
        event.fell_back is False
        and log.advice == ANY_GUARD.worded(VERDICTS["recovered"].advice)
        and call.kept_for == OVERFLOW
    )


def test_a_kind_of_call_has_advice_of_its_own():
    assert resolve(Fake(finite_at("fp32"), wording=ENCODERS["VAE"]))[0].advice == ENCODERS["VAE"].advice["recovered"]
    assert resolve(Fake(finite_at(), wording=ENCODERS["VAE"]))[2].verdict == "not_precision"
    assert "cures this VAE" in str(resolve(Fake(finite_at(), wording=ENCODERS["VAE"]))[2])


@pytest.mark.parametrize("on_nan", ["off", "report", "stop", "retry_higher"])
def test_the_fallback_of_the_plan_is_tried_whatever_the_guard_is_set_to(on_nan):
    call = Fake(finite_at("fp16_safe"), promised=PROMISED)
    log, result, _ = resolve(call, on_nan)
    (event,) = log.events
    assert (
        torch.equal(result, GOOD)
        and call.ran == ["as it was", "fp16_safe"]
        and call.kept == ["fp16_safe"]
        and event.fell_back
    )
    assert (log.verdict, log.advice, event.evidence) == ("recovered", BEGINS_SAFE, f"{GOES_ON} {SAME_SEED}")


def test_a_call_that_the_fallback_does_not_cure_is_the_guards():
    assert resolve(Fake(finite_at("fp32"), promised=PROMISED, rungs=["fp32"]))[0].events[0].to_mode == "fp32"
    log, result, _ = resolve(Fake(finite_at(), promised=PROMISED), "off")
    assert result is BAD and log.given_up and not log.events


@pytest.mark.parametrize(("about", "finite", "advice", "evidence"), [
    ({}, ["watched", "as it was"], VERDICTS["device_fault"].advice, SAME_AGAIN),
    ({"compiled": True}, ["watched"], COMPILED, EAGER_IS_FINITE),
])  # fmt: skip
def test_a_call_finite_in_the_same_arithmetic_blames_the_device(about, finite, advice, evidence):
    place = Origin("VAE decode", "", "overflow", "fp16", math.nan)
    call = Fake(finite_at(*finite), default_origin=place, **about)
    log, result, _ = resolve(call)
    (event,) = log.events
    assert torch.equal(result, GOOD) and call.kept == [] and event.recovered
    assert (event.layer, event.from_mode, event.to_mode) == ("VAE decode", "fp16 of VAE decode", "fp16 of VAE decode")
    assert (log.verdict, log.advice, event.evidence) == ("device_fault", advice, evidence)


def test_a_device_whose_product_in_fp32_is_wrong_is_blamed_before_the_model(monkeypatch):
    monkeypatch.setattr(probes, "canary", lambda device, dtype: (False, f"{dtype} matmul is wrong"))
    log, _, error = resolve(Fake(finite_at()))
    assert error.verdict == "device_fault" and log.events[0].evidence == "A test operation in fp32 is wrong."


@pytest.mark.parametrize("about", [{}, {"locates_first": False}, {"rungs": []}])
def test_a_weight_whose_copy_on_the_device_is_bad_is_the_devices_fault(about):
    weights = OneWeight(
        torch.tensor([torch.nan]),
        patch="A LoRA of 'blocks.0' holds NaN.",
        copied="The weight is finite in host memory.",
    )
    log, _, error = resolve(Fake(finite_at(), UNKNOWN, weights, **about))
    assert error.verdict == "device_fault" and "finite in host memory" in str(error) and "driver" in log.advice


class StartsAgain(BaseException):
    pass


class Beside(Fake):
    """A call beside a pack that may keep state between steps."""

    def __init__(self, made, **about):
        super().__init__(made, packs="ComfyUI-Cache", **about)

    def start_again(self, rung, place):
        if rung.as_it_was:
            return StartsAgain(), (self.mode(place), self.mode(place))
        return StartsAgain(), self.keep(rung, None, place)


def test_beside_a_pack_the_sampling_starts_again_at_the_first_step_of_the_ladder():
    call, log = Beside(finite_at("fp16_safe")), GuardLog("retry_higher")
    with pytest.raises(StartsAgain):
        Ladder(call, log, 8).resolved()
    assert call.ran == ["watched", "fp16_safe"] and call.kept == ["fp16_safe"] and log.extra_calls == 3
    (event,) = log.events
    assert log.verdict == "recovered" and event.recovered and event.layer == "blocks.0" and not event.fell_back
    assert (event.from_mode, event.to_mode, log.advice) == (
        "fp16 of blocks.0",
        "fp16_safe",
        ANY_GUARD.worded(VERDICTS["recovered"].advice),
    )
    assert (
        event.evidence == "The sampling was restarted in fp16_safe, because ComfyUI-Cache may keep state between steps."
    )


def test_a_sampling_that_starts_again_under_the_fallback_of_its_plan_says_so():
    call, log, told = Beside(finite_at(), promised=PROMISED), GuardLog("stop"), []
    log.notify = lambda *message: told.append(message)
    with pytest.raises(StartsAgain):
        Ladder(call, log, 0).resolved()
    (event,) = log.events
    assert (
        call.ran == ["as it was", "fp16_safe"]
        and event.fell_back
        and event.evidence.endswith(GOES_ON)
        and event.to_mode == "fp16_safe"
    )
    assert log.advice == BEGINS_SAFE and "Repeated in" not in told[0][2], "the sampling is what is repeated"


@pytest.mark.parametrize(("about", "most", "verdict"), [({"rungs": []}, 8, "not_precision"), ({}, 0, "stopped")])
def test_beside_a_pack_nothing_starts_again_without_a_step_or_a_repeat_left(about, most, verdict):
    assert resolve(Beside(finite_at(), **about), most=most)[2].verdict == verdict


def test_where_the_sampling_cannot_start_again_there_is_no_verdict_on_precision():
    call = Beside(finite_at())
    call.can_start_again = False
    _, _, error = resolve(call)
    assert (
        call.ran == ["watched", "fp16_safe", "fp32"] and error.verdict == "stopped" and "remove its node" in str(error)
    )


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 8])
def test_no_more_repeats_are_made_than_allowed_and_without_them_no_verdict_is_given(most):
    call = Fake(finite_at())
    _, _, error = resolve(call, most=most)
    assert len(call.ran) <= most
    assert error.verdict == ("not_precision" if most >= 4 else "stopped")
    assert (f"max_retries is {most}," in str(error)) == (most < 4)


def test_nan_in_one_row_is_blamed_for_that_row_and_the_other_is_cured():
    given = {"text": torch.tensor([[1.0], [math.nan]])}
    seen = []

    def result(given, how, zeroed):
        seen.append(given["text"])
        return GOOD if how == "fp32" else torch.cat([BAD[:1], GOOD[:1]])

    log, result_, _ = resolve(Fake(result), given=given)
    assert torch.equal(result_[0], GOOD[0]) and torch.isnan(result_[1]).all()
    assert all(torch.isfinite(text).all() for text in seen), "a repeat is not given the NaN"
    assert [(event.kind, event.layer, event.batch_rows) for event in log.events] == [
        ("input", "text", [1]),
        ("overflow", "blocks.0", [0]),
    ]
    assert log.verdict == "bad_input" and log.lost == {1}


def test_a_row_that_was_lost_before_is_not_told_again():
    log = GuardLog("retry_higher", lost={1})
    result = torch.cat([GOOD[:1], BAD[:1]])
    call = Fake(finite_at(), result=result)
    assert Ladder(call, log, 8).resolved() is result
    assert not log.events and not call.ran


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop", "report"])
def test_of_two_infinite_inputs_the_one_without_which_it_is_finite_is_named(on_nan):
    given = {"mask": torch.full((1,), -math.inf), "text": torch.full((1,), math.inf)}
    call = Fake(lambda given, how, zeroed: GOOD if torch.isfinite(given["text"]).all() else BAD, UNKNOWN)
    log, _, _ = resolve(call, on_nan, given=given)
    assert log.verdict == "bad_input" and log.events[0].layer == "text" and "but finite if" in log.events[0].evidence
    assert "fp16_safe" not in call.ran, "what came in with the inputs is tried in fp32 alone"


def test_the_limit_of_repeats_does_not_bound_a_guard_that_only_tells():
    given = {"text": torch.full((1,), math.inf)}
    log, _, _ = resolve(
        Fake(lambda given, how, zeroed: GOOD if torch.isfinite(given["text"]).all() else BAD, UNKNOWN),
        "report",
        0,
        given,
    )
    assert log.verdict == "bad_input"


@pytest.mark.parametrize(
    ("given", "verdict"), [({"text": torch.full((1,), math.inf)}, "stopped"), (None, "not_precision")]
)
def test_without_repeats_left_an_infinite_input_forbids_a_verdict_on_precision(given, verdict):
    call = Fake(finite_at(), rungs=[], locates_first=False)
    assert resolve(call, most=0, given=given)[2].verdict == verdict


def test_an_infinite_input_that_does_no_harm_is_not_blamed():
    call = Fake(finite_at("fp16_safe"))
    log, _, _ = resolve(call, given={"mask": torch.full((1,), -math.inf)})
    assert log.verdict == "recovered"


def test_an_input_that_the_sampler_made_is_no_bad_input():
    log, _, _ = resolve(Fake(finite_at()), given={"sigma": torch.full((2,), math.nan)})
    assert log.verdict == "not_precision" and log.events[0].layer == "sigma"


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop"])
def test_a_weight_that_the_failed_operation_reads_is_blamed_for_its_nan_at_once(on_nan):
    origin = Origin("blocks.0", "blocks.0.weight", "weights", "fp16", math.nan)
    call = Fake(finite_at(), origin, OneWeight(torch.tensor([math.nan])))
    _, _, error = resolve(call, on_nan)
    assert error.verdict == "bad_weights" and call.ran == ["watched"] and "holds NaN" in str(error)


def test_a_weight_with_inf_is_blamed_only_where_a_zero_cures():
    weights = OneWeight(torch.tensor([math.inf]))
    call = Fake(lambda given, how, zeroed: GOOD if zeroed == ["blocks.0.weight"] else BAD, weights=weights)
    _, _, error = resolve(call)
    assert error.verdict == "bad_weights" and "set to 0" in str(error)
    assert resolve(Fake(finite_at(), weights=weights))[2].verdict == "not_precision"


def test_a_call_found_finite_in_fp32_is_not_said_to_fail_there():
    """No repeat is left for a rung, after one in fp32 told that the weight with Inf is not at fault."""
    origin = Origin("blocks.0", "blocks.0.weight", "weights", "fp16", math.nan)
    call = Fake(finite_at("fp32"), origin, OneWeight(torch.tensor([math.inf])))
    log, _, error = resolve(call, most=2)
    assert call.ran == ["watched", "fp32"] and error.verdict == "stopped" and "max_retries is 2," in log.advice


def test_a_patch_that_the_failed_operation_reads_is_blamed():
    _, _, error = resolve(Fake(finite_at(), UNKNOWN, OneWeight(patch="A LoRA holds NaN.")))
    assert error.verdict == "bad_weights" and "A LoRA holds NaN." in str(error)


@pytest.mark.parametrize(("on_nan", "raised"), [("stop", True), ("report", False)])
def test_without_retries_the_layer_is_named_and_the_result_stays(on_nan, raised):
    log, result, error = resolve(Fake(finite_at("fp16_safe")), on_nan)
    assert log.verdict == "stopped" and log.events[0].layer == "blocks.0" and not log.events[0].recovered
    assert bool(error) == raised and (raised or result is BAD)


BREAKING = {
    "memory": torch.OutOfMemoryError("no memory"),
    "dtypes": RuntimeError("expected Float but found Half"),
    "code": KeyError("img"),
}


@pytest.mark.parametrize("error", BREAKING)
@pytest.mark.parametrize("how", ["watched", "fp16_safe", "fp32"])
@pytest.mark.parametrize("on_nan", ["retry_higher", "stop", "report"])
def test_a_repeat_that_raises_ends_no_run_that_would_have_gone_on(on_nan, how, error):
    def result(given, run, zeroed):
        if run == how:
            raise BREAKING[error]
        return BAD

    origin, given = (OVERFLOW, GOOD) if how == "fp16_safe" else (UNKNOWN, torch.full((1,), math.inf))
    log, given, raised = resolve(Fake(result, origin), on_nan, given={"text": given})
    assert (given is None if on_nan == "stop" else given is BAD) and bool(raised) == (on_nan == "stop")
    assert log.verdict == "stopped" and not log.events[0].recovered
    if on_nan == "retry_higher" or how == "watched":
        assert ("memory" in log.advice) == (error == "memory") and (
            error == "memory" or str(BREAKING[error]) in log.events[0].evidence
        )
    assert log.given_up and log.events[0].layer == (OVERFLOW.layer if how != "watched" else "")


def test_a_call_whose_inputs_cannot_be_read_goes_on_with_its_first_result():
    call, log = Fake(finite_at("fp32")), GuardLog("retry_higher")
    call.inputs = Mock(side_effect=AttributeError("'list' object has no attribute 'isfinite'"))
    assert (
        Ladder(call, log).resolved() is BAD and log.verdict == "stopped" and "AttributeError" in log.events[0].evidence
    )


OWN = Origin("blocks.0", "matmul", "overflow", "fp16", 400.0, result="fp16")
OF_PACK, OF_OTHERS = (
    "blocks.0 is created by SomePack and computes in its own dtype",
    "blocks.1 computes in its own dtype",
)
UNREACHED = {
    "a pack's layer in fp16": (OWN, "stopped", OF_PACK), "what core's code casts": (Origin("blocks.1", "cast", "overflow", "fp32", 1e6, result="fp16"), "stopped", OF_OTHERS),
    "a pack's kernel unseen": (Origin("blocks.0", "", "unknown", "fp32", 1.0, result="fp32"), "stopped", OF_PACK),
    "fp32": (Origin("blocks.0", "div", "nan", "fp32", 0.0, result="fp32"), "not_precision", "In fp32"), "nothing": (None, "not_precision", "In fp32"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREACHED)
def test_fp32_is_no_evidence_on_a_layer_that_was_not_widened(name):
    origin, verdict, evidence = UNREACHED[name]
    call = Fake(finite_at(), OVERFLOW)
    call.origin_in_fp32 = origin
    log, _, error = resolve(call)
    assert (log.verdict, error.verdict) == (verdict, verdict) and evidence in log.events[0].evidence
    assert ("dtype" in log.advice) or verdict == "stopped"


def hidden(*hows: str, **about) -> Fake:
    """A call of a finite result in which model code replaced what is not finite, and which hides nothing if it is repeated as ``hows``."""
    return Fake(finite_at(*hows), hidden=True, result=GOOD, **about)


@pytest.mark.parametrize("on_nan", ["stop", "report"])
def test_values_that_the_models_own_code_clamps_are_told_once_and_end_nothing(on_nan):
    log, call = GuardLog(on_nan), hidden("fp32")
    for _ in range(2):
        assert Ladder(call, log, 8).resolved() is GOOD
    (event,) = log.events
    assert (log.verdict, event.kind, event.layer, event.ended) == ("stopped", "saturation", "blocks.0", False)
    assert call.ran == ["watched", "fp32"] and "clamped" in sentence(event, OVERFLOW)


def test_values_that_the_models_own_code_clamps_are_cured_as_others_are():
    call = hidden("fp16_safe")
    log, result, _ = resolve(call)
    (event,) = log.events
    assert (
        torch.equal(result, GOOD)
        and (log.verdict, event.kind) == ("recovered", "saturation")
        and call.ran == ["watched", "fp16_safe"]
    )


@pytest.mark.parametrize("on_nan", ["stop", "report", "retry_higher"])
def test_what_is_hidden_and_fails_in_fp32_too_is_no_clamp(on_nan):
    call = hidden()
    log, result, error = resolve(call, on_nan)
    (event,) = log.events
    assert (log.verdict, event.kind, event.batch_rows) == ("not_precision", "overflow", [0, 1])
    assert (result is GOOD) == (on_nan == "report") and bool(error) == (on_nan != "report")


@pytest.mark.parametrize("on_nan", ["stop", "report", "retry_higher"])
def test_a_hidden_weight_with_nan_is_blamed_at_once_and_ends_a_run(on_nan):
    origin = Origin("blocks.0", "blocks.0.weight", "weights", "fp16", math.nan)
    call = Fake(finite_at(), origin, OneWeight(torch.tensor([math.nan])), hidden=True, result=GOOD)
    log, _, error = resolve(call, on_nan)
    assert log.verdict == "bad_weights" and log.events[0].kind == "weights" and call.ran == ["watched"]
    assert bool(error) == (on_nan != "report")


@pytest.mark.parametrize("row", [0, 1])
def test_a_hidden_nan_of_an_input_costs_its_row_and_no_other(row):
    text = torch.ones(2, 1)
    text[row] = math.nan

    def made(given, how, zeroed):
        return GOOD * given["text"]

    call = Fake(made, UNKNOWN, hidden=True, result=GOOD)
    log, result, _ = resolve(call, given={"text": text})
    assert [bool(torch.isfinite(each).all()) for each in result] == [row == 1, row == 0]
    assert [(event.kind, event.batch_rows) for event in log.events] == [("input", [row])] and log.verdict == "bad_input"
    assert call.kept == [] and call.ran == ["as it was", "as it was", "watched", "as it was"]


@pytest.mark.parametrize("on_nan", ["stop", "retry_higher"])
def test_a_hidden_nan_of_every_row_ends_a_run(on_nan):
    call = Fake(lambda given, how, zeroed: GOOD * given["text"], UNKNOWN, hidden=True, result=GOOD)
    log, _, error = resolve(call, on_nan, given={"text": torch.full((2, 1), math.nan)})
    assert error.verdict == "bad_input" and log.events[0].batch_rows == [0, 1]
    assert call.ran == ["as it was"] * 2, "without the NaN, and with it: the two are compared"


def test_a_nan_that_nothing_reads_is_not_blamed_for_what_is_hidden():
    call = hidden("fp16_safe", "fp32")
    log, result, _ = resolve(call, given={"unread": torch.full((2, 1), math.nan)})
    assert log.verdict == "recovered" and torch.equal(result, GOOD) and not log.lost


@pytest.mark.parametrize("on_nan", ["stop", "report", "retry_higher"])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_failure_that_does_not_come_again_is_the_devices(on_nan, is_hidden):
    call = Fake(finite_at("watched", "as it was"), hidden=is_hidden, result=GOOD if is_hidden else BAD)
    log, result, error = resolve(call, on_nan)
    (event,) = log.events
    assert log.verdict == "device_fault" and call.ran == ["watched", "as it was"] and call.kept == []
    assert event.evidence == (NOT_HIDDEN_AGAIN if is_hidden else SAME_AGAIN) and bool(error) == (on_nan == "stop")
    assert on_nan != "retry_higher" or torch.equal(result, GOOD)


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("on_nan", ["off", "report", "stop", "retry_higher"])
def test_no_fallback_is_taken_for_a_failure_that_does_not_come_again(on_nan, is_hidden):
    call = Fake(
        finite_at("as it was", "fp16_safe"), hidden=is_hidden, result=GOOD if is_hidden else BAD, promised=PROMISED
    )
    log, result, _ = resolve(call, on_nan)
    assert torch.equal(result, GOOD) and log.verdict == "device_fault" and call.ran == ["as it was"] and call.kept == []


@pytest.mark.parametrize("about", [{}, {"promised": PROMISED}])
def test_beside_a_pack_the_sampling_starts_again_once_after_a_device_fault(about):
    call, log = Beside(finite_at("watched", "as it was"), **about), GuardLog("retry_higher")
    with pytest.raises(StartsAgain):
        Ladder(call, log, 8).resolved()
    (event,) = log.events
    assert log.verdict == "device_fault" and event.to_mode == event.from_mode and event.evidence.endswith(SAME_AGAIN)
    assert "restarted in fp16" in event.evidence and not event.fell_back
    with pytest.raises(StartsAgain):
        Ladder(call, log, 8).resolved()
    assert log.events[1].to_mode == "fp16_safe", "the second time it is taken for an overflow"


@pytest.mark.parametrize("on_nan", ["stop", "report", "retry_higher"])
def test_what_is_hidden_and_cannot_be_repeated_ends_nothing(on_nan):
    def made(given, how, zeroed):
        raise torch.OutOfMemoryError("no memory")

    log, result, _ = resolve(Fake(made, hidden=True, result=GOOD), on_nan)
    assert result is GOOD and log.verdict == "stopped" and "memory" in log.advice and log.given_up


class Designed(Fake):
    """A call whose code replaces NaN by a number in every dtype."""

    def repeat(self, rung, given, why, zeroed=(), watched=False):
        super().repeat(rung, given, why, zeroed, watched)
        if rung.is_fp32:
            self.by_design |= self.sites
        return Attempt(GOOD, 1.0, origin=OVERFLOW if watched else None, hidden=self.sites - self.by_design)


@pytest.mark.parametrize("about", [{}, {"promised": PROMISED}, {"packs": "SomePack"}])
@pytest.mark.parametrize("on_nan", ["off", "stop", "report", "retry_higher"])
def test_what_is_hidden_in_fp32_too_is_no_failure(on_nan, about):
    if on_nan == "off" and "promised" not in about:
        return
    call = Designed(finite_at("watched", "as it was", "fp16_safe", "fp32"), hidden=True, result=GOOD, **about)
    log, result, error = resolve(call, on_nan)
    assert result is GOOD and error is None and log.verdict == "clean" and not log.events and not call.kept
    assert call.ran[-1] == "fp32" and len(call.ran) <= 3 and call.by_design


@pytest.mark.parametrize("most", [0, 8])
def test_weights_that_no_call_reads_are_not_at_fault(most):
    call = Fake(finite_at("watched"), None, OneWeight(torch.tensor([math.nan])), result=GOOD, nan_weights=True)
    log, result, _ = resolve(call, most=most)
    assert result is GOOD and log.verdict == "clean" and call.ran == ["watched"] * bool(most)
    assert log.remarks == {READ_BY_NONE if most else NOT_SEARCHED}


@pytest.mark.parametrize("on_nan", ["stop", "report", "retry_higher"])
def test_a_weight_that_a_call_reads_is_at_fault_although_its_result_is_finite(on_nan):
    origin = Origin("blocks.0", "blocks.0.weight", "weights", "fp16", math.nan)
    call = Fake(finite_at("watched"), origin, OneWeight(torch.tensor([math.nan])), result=GOOD, nan_weights=True)
    log, _, error = resolve(call, on_nan)
    assert log.verdict == "bad_weights" and (error is None) == (on_nan == "report") and call.ran == ["watched"]
