"""Beside packs that may keep state between steps: a failed call starts its sampling again, and a check is left out."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from halfsafe.nodes.host.comfyui.code_owner import code_owner
from halfsafe.nodes.host.compute.per_model import runs_in
from halfsafe.nodes.host.guard import notices
from halfsafe.nodes.host.replay.restart import MOST_RESTARTS, Sampling, StartAgain
from halfsafe.precision.guard.verdicts import ENDED_IN, INTERRUPTED, NonFinite
from support import families
from support.custom_nodes import step_caches
from support.custom_nodes.step_caches import PACKS
from support.guarding import core, guarded, inside, is_finite, loaded_once, nan_at, raising_at, report_of
from support.measures import relative_error
from support.rows import all_of, rotated, the_rest_before_a_release

STEPS = 4
pytestmark = pytest.mark.not_as_on_cuda("packs read noise levels back by themselves")
STARTED = "The sampling was restarted in {}, because step_caches may keep state between steps."


@pytest.fixture(scope="module")
def models(comfy, models_dir):
    return loaded_once(comfy, families.files_in(models_dir / "diffusion_models", "packs"))


def run(model, sampler="euler", steps=STEPS, callback=None):
    start = families.noise(model)
    cond = families.conditioning("wan")
    sample = core("comfy.sample").sample
    random.seed(5)
    torch.manual_seed(5)
    with torch.inference_mode():
        return sample(
            model, start, steps, 1.0, sampler, "simple", cond, cond, torch.zeros_like(start), seed=1, callback=callback
        )


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("check", ["first step", "every 5th step"])
def test_a_check_is_left_out_with_one_sentence_and_the_picture_is_the_same(comfy, models, name, check):
    model = PACKS[name](models("wan", None, "bf16"))
    checked = guarded(comfy, model, check=check)
    assert torch.equal(run(guarded(comfy, model), steps=7), run(checked, steps=7))
    (left_out,) = report_of(checked).checks
    assert "step_caches has code on this model" in left_out.left_out and report_of(checked).extra_calls == 0


@pytest.mark.parametrize("name", PACKS)
def test_an_overflow_starts_the_sampling_again_as_a_run_in_that_precision(comfy, models, name):
    expected = run(PACKS[name](models("wan", "ffn", "fp32")))
    model, steps = guarded(comfy, PACKS[name](models("wan", "ffn", "fp16"))), []
    found = run(model, callback=lambda step, *_: steps.append(step))
    report = report_of(model)
    assert relative_error(expected, found) < 0.02 and report.verdict == "recovered"
    (event,) = report.events
    assert event.evidence == STARTED.format("fp16_safe") and steps == [*range(STEPS)]
    assert event.layer.startswith("blocks.0.ffn") or name == "CacheDiT", (
        "which gives the repeat that is watched the failed result"
    )
    assert torch.equal(found, run(model)) and report_of(model).extra_calls == 0


@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_2m_sde", "uni_pc", "dpm_adaptive", "lcm"])
def test_samplers_begin_anew_from_their_first_step_with_their_own_random_numbers(comfy, models, sampler):
    """A call in the midst of the run is NaN once; the picture is that of the next run, which is in fp16_safe from its first step."""
    plain, steps = models("wan", None, "fp16"), []
    failing = inside(step_caches.cache_dit(plain), nan_at(2), key="test.last")
    model = guarded(comfy, failing)
    found = run(model, sampler, callback=lambda step, *_: steps.append(step))
    assert (
        report_of(model).verdict == "recovered" and STARTED.format("fp16_safe") in report_of(model).events[0].evidence
    )
    assert is_finite(found) and torch.equal(found, run(model, sampler)) and steps.count(0) == 2


def test_what_fp16_safe_does_not_cure_starts_again_in_fp32_and_then_no_more(comfy, models):
    calls = []

    def change(executor, args, kwargs):
        calls.append(len(calls))
        return executor(*args, **kwargs) * torch.nan

    model = guarded(comfy, inside(step_caches.magcache(models("wan", None, "fp16")), change))
    with pytest.raises(Exception, match="In fp32 the call is NaN or Inf too"):
        run(model)
    report = report_of(model)
    assert report.verdict == "not_precision" and not any(event.recovered for event in report.events)
    assert [event.evidence for event in report.events[:2]] == [STARTED.format("fp16_safe"), STARTED.format("fp32")]
    assert report.escalations == {} and not any(plan.is_wider for plan in runs_in(model.model).wider.values()), (
        "what cured nothing is not kept"
    )


def test_an_ip_adapter_starts_the_sampling_again_and_has_no_check(comfy, models):
    def sample(model):
        with torch.inference_mode():
            return families.sample(model, "sdxl", steps=2)

    expected = sample(step_caches.ip_adapter(models("sdxl", "ffn", "fp32"), torch.float32))
    model = guarded(comfy, step_caches.ip_adapter(models("sdxl", "ffn", "fp16"), torch.float16), check="first step")
    assert relative_error(expected, sample(model)) < 0.05
    report = report_of(model)
    assert (
        report.verdict == "recovered"
        and report.events[0].evidence == STARTED.format("fp16_safe")
        and len(report.checks) == 1
    )


MAKES = {
    "rung": lambda comfy, model: guarded(comfy, model),
    "auto": lambda comfy, model: families.with_compute(comfy, model, "auto"),
    "auto, stop": lambda comfy, model: guarded(comfy, families.with_compute(comfy, model, "auto"), "stop"),
    "auto, report": lambda comfy, model: guarded(comfy, families.with_compute(comfy, model, "auto"), "report"),
    "auto, retry_higher": lambda comfy, model: guarded(comfy, families.with_compute(comfy, model, "auto")),
}
"""What restarts the sampling: a rung of the guard, or the fallback that the plan promised, beside each setting of a guard."""
ERRORS = {
    "a dtype": lambda: RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Half"),
    "a value": lambda: ValueError("of another pack"),
    "no memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "an interrupt": lambda: core("comfy.model_management").InterruptProcessingException(),
}
BESIDE = the_rest_before_a_release(rotated(MAKES, ERRORS, whole=["rung"]), all_of(MAKES, ERRORS))
TRIED, RESTARTED = 3, 5
"""The number of the call that tries the precision on the failed call, and of the second call of the restarted run."""


def failing(comfy, models, monkeypatch, how: str, change):
    """(a model that overflows beside a pack, whose calls go through ``change``, what the page is told)"""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    told = []
    monkeypatch.setattr(
        notices, "send", lambda event, data: told.append((data["kind"], data["verdict"], data["message"]))
    )
    plain = models("wan", "ffn", "fp16")
    return MAKES[how](comfy, inside(step_caches.magcache(plain), change)), told


def starts_as_the_first(model, told) -> bool:
    """Whether the next prompt fails, and is repaired, as if there had been none before."""
    told.clear()
    found = run(model)
    return is_finite(found) and [message[:2] for message in told if message[0] == "event"] == [("event", "recovered")]


def is_as_planned(model) -> bool:
    runs = runs_in(model.model)
    return not runs.fallback and not any(plan.is_wider for plan in runs.wider.values())


@pytest.mark.parametrize(("how", "error"), BESIDE)
def test_a_restarted_run_that_ends_in_an_error_is_not_recovered_and_leaves_nothing(
    comfy, models, monkeypatch, how, error
):
    raised = ERRORS[error]()
    model, told = failing(comfy, models, monkeypatch, how, raising_at(raised, RESTARTED))
    with pytest.raises(type(raised)) as found:
        run(model)
    report = families.report(comfy, model)["guard"]
    last = report["events"][-1]
    assert found.value is raised and report["verdict"] == "stopped" and is_as_planned(model)
    assert [event["recovered"] for event in report["events"]] == [False, False]
    assert last["evidence"] == (
        INTERRUPTED if error == "an interrupt" else ENDED_IN.format(f"{type(raised).__name__}: {raised}")
    )
    assert ("memory" in report["advice"]) == (error == "no memory")
    kinds = [message[:2] for message in told if message[0] != "calls"]
    assert kinds == [("event", "recovered"), ("taken_back", "recovered"), ("event", "stopped"), ("verdict", "stopped")]
    assert told[-1][2] == last["evidence"], "the toast, the log and the report say the same"
    assert starts_as_the_first(model, told)


@pytest.mark.parametrize(("how", "error"), BESIDE)
def test_a_precision_that_raises_is_tried_before_the_sampling_starts_again_in_it(
    comfy, models, monkeypatch, how, error
):
    raised = ERRORS[error]()
    model, told = failing(comfy, models, monkeypatch, how, raising_at(raised, TRIED))
    if error == "an interrupt" or how == "auto, stop":
        with pytest.raises(type(raised) if error == "an interrupt" else NonFinite):
            run(model)
    else:
        assert not is_finite(run(model))
    report = families.report(comfy, model)["guard"]
    assert report["verdict"] == ("off" if error == "an interrupt" and how == "auto" else "stopped")
    assert is_as_planned(model) and not any("restarted" in event["evidence"] for event in report["events"])
    if error in ("a dtype", "a value"):
        assert str(raised) in report["events"][-1]["evidence"]
    assert starts_as_the_first(model, told)


@pytest.mark.parametrize("how", MAKES)
def test_a_second_nan_in_the_restarted_run_is_not_recovered_and_leaves_nothing(comfy, models, monkeypatch, how):
    calls = []

    def change(executor, args, kwargs):
        calls.append(1)
        return executor(*args, **kwargs) * (torch.nan if calls_before < len(calls) else 1)

    calls_before = RESTARTED
    model, told = failing(comfy, models, monkeypatch, how, change)
    if how in ("auto", "auto, report"):
        assert not is_finite(run(model))
    else:
        with pytest.raises(NonFinite):
            run(model)
    report = families.report(comfy, model)["guard"]
    assert report["verdict"] == ("not_precision" if how in ("rung", "auto, retry_higher") else "stopped")
    assert not any(event["recovered"] for event in report["events"]) and is_as_planned(model)
    calls_before = math.inf
    assert starts_as_the_first(model, told)


@pytest.mark.parametrize("error", ["a value", "an interrupt"])
def test_a_run_that_was_repaired_without_a_restart_and_ends_in_an_error_is_not_recovered(comfy, models, error):
    raised = ERRORS[error]()
    model = guarded(comfy, inside(models("wan", "ffn", "fp16"), raising_at(raised, 5)))
    with pytest.raises(type(raised)):
        run(model)
    report = report_of(model)
    assert report.verdict == "stopped" and is_as_planned(model) and report.events[0].recovered, "that call was"
    assert is_finite(run(model)) and report_of(model).verdict == "recovered"


def test_a_run_inside_of_one_that_starts_again_keeps_nothing(comfy, models):
    outer = Sampling(SimpleNamespace(conds={}, model_patcher=None, model_options={}), SimpleNamespace())
    model = guarded(comfy, inside(models("wan", "ffn", "fp16"), raising_at(StartAgain(outer, "fp32"), 4)))
    with pytest.raises(StartAgain):
        run(model)
    assert is_as_planned(model) and len(report_of(model).events) == 1, "it is no error of this run"


class OthersSampler:
    """A sampler of a pack's, which no one knows how to begin anew."""

    def __init__(self, own):
        self.own = own

    def sample(self, *args, **kwargs):
        return self.own.sample(*args, **kwargs)

    def max_denoise(self, *args):
        return self.own.max_denoise(*args)


def test_a_sampler_of_a_pack_is_not_started_again_and_the_call_alone_repeated(comfy, models, monkeypatch):
    monkeypatch.setattr(OthersSampler, "__module__", step_caches.__name__)
    plain = models("wan", "ffn", "fp16")
    samplers, start, cond = core("comfy.samplers"), families.noise(plain), families.conditioning("wan")
    model = guarded(comfy, step_caches.cache_dit(plain))
    sigmas = samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
    sampler = OthersSampler(samplers.sampler_object("euler"))
    with torch.inference_mode():
        found = core("comfy.sample").sample_custom(
            model, start, 1.0, sampler, sigmas, cond, cond, torch.zeros_like(start), seed=1
        )
    report = families.report(comfy, model)
    assert is_finite(found) and report["guard"]["verdict"] == "recovered"
    assert any("the sampling could not restart" in note for note in report["notes"])


def test_a_clean_run_of_a_pack_costs_no_call(comfy, models):
    model = guarded(comfy, step_caches.cache_dit(models("wan", None, "bf16")))
    assert torch.equal(run(model), run(step_caches.cache_dit(models("wan", None, "bf16"))))
    assert (report_of(model).calls, report_of(model).extra_calls) == (STEPS, 0)


def test_the_code_on_a_model_is_told_apart_by_the_file_it_stands_in(comfy, models):
    easycache = core("comfy_extras.nodes_easycache")
    ours = guarded(comfy, models("wan", None, "bf16")).attachments["halfsafe.guard"]
    for own in (
        easycache.easycache_forward_wrapper,
        easycache.EasyCacheHolder,
        ours,
        ours.around_call,
        torch.relu,
        random.random,
        print,
    ):
        assert code_owner(own) == ""
    for other in (
        step_caches.teacache,
        step_caches.CacheDiT().call,
        step_caches.Kept,
        step_caches.Adapter(torch.float32),
    ):
        assert code_owner(other) == "step_caches"


def test_a_sampling_starts_again_at_most_three_times(models):
    guider = SimpleNamespace(conds={}, model_patcher=models("wan", None, "bf16"), model_options={})
    sampling, runs = Sampling(guider, SimpleNamespace()), []

    def fails_as_long_as_it_may(*args):
        runs.append(args)
        if sampling.can_start_again:
            raise StartAgain(sampling, "fp32")

    sampling.run(fails_as_long_as_it_may, torch.zeros(1), None, None, torch.zeros(STEPS + 1))
    assert (MOST_RESTARTS, len(runs)) == (3, 4)
