"""Beside packs that may keep state between steps: a failed call starts its sampling again, and a check is left out."""

import random
from types import SimpleNamespace

import pytest
import torch
from halfsafe.nodes.host.comfyui.code_owner import code_owner
from halfsafe.nodes.host.compute.per_model import runs_in
from halfsafe.nodes.host.replay.restart import MOST_RESTARTS, Sampling, StartAgain
from halfsafe.precision.guard.verdicts import BEGINS_SAFE, GOES_ON
from support import families
from support.custom_nodes import step_caches
from support.custom_nodes.step_caches import PACKS
from support.guarding import core, guarded, inside, is_finite, loaded_once, nan_at, raising_at, report_of
from support.measures import relative_error

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
    assert report.verdict == "not_precision" and [event.recovered for event in report.events] == [True, True, False]
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


def test_a_sampling_without_memory_to_start_again_is_stopped_and_says_so(comfy, models):
    failing = inside(
        step_caches.magcache(models("wan", "ffn", "fp16")), raising_at(torch.OutOfMemoryError("CUDA out of memory"), 3)
    )
    model = guarded(comfy, failing)
    with pytest.raises(torch.OutOfMemoryError):
        run(model)
    report = report_of(model)
    assert report.verdict == "stopped" and "Not enough memory" in report.advice and report.escalations == {}


def test_an_interrupt_after_auto_started_again_is_an_interrupt_without_rules(comfy, models, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    interrupt = core("comfy.model_management").InterruptProcessingException
    plain = families.with_compute(comfy, step_caches.cache_dit(models("wan", "ffn", "fp16")), "auto")
    model = guarded(comfy, inside(plain, raising_at(interrupt(), 3)))
    with pytest.raises(interrupt):
        run(model)
    (event,) = report_of(model).events
    assert event.evidence == f"{STARTED.format('fp16_safe')} {GOES_ON}" and report_of(model).advice == BEGINS_SAFE


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
