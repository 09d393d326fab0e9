"""What the guard's check leaves as it is: the picture, random numbers, flags, the model; and which calls it checks."""

import pytest
import torch
from halfsafe.nodes.host.check.drift import NOT_A_RESULT
from halfsafe.precision.report.report_text import report_text
from support import families
from support.families import load
from support.guarding import (
    Counted,
    core,
    guarded,
    inside,
    int8_attention,
    left_on,
    nan_at,
    raising_at,
    report_of,
    sample,
)
from support.summing import accumulation

ARITHMETICS = [("fp16", "fp16"), ("fp16", "fp16_safe"), ("int8", "int8")]


def wrong(model):
    """A clone with an attention kernel of another pack that is coarse, so that the check finds a drift."""
    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = int8_attention
    return clone


@pytest.mark.parametrize(("storage", "compute"), ARITHMETICS)
def test_the_latent_is_the_same_to_the_bit_with_the_check_and_without(comfy, wan, flags_as_before, storage, compute):
    latents = []
    for check in ("off", "every 5th step"):
        model = guarded(comfy, wrong(load(comfy, wan, storage, compute)), check=check)
        torch.manual_seed(5)
        latents += [families.sample(model, "wan", steps=6, sampler="euler_ancestral")]
        after = torch.rand(())
        latents += [after]
        assert not any("forward" in own for own in left_on(model.model.diffusion_model).values())
        assert not any(module._forward_hooks for module in model.model.diffusion_model.modules())
    events = report_of(model).events
    assert len(report_of(model).checks) == len(events) == 2 and events[0].kind == "drift"
    assert torch.equal(latents[0], latents[2]) and torch.equal(latents[1], latents[3])


@pytest.mark.not_as_on_cuda("nothing is multiplied in another dtype than without the check")
def test_accumulation_learns_nothing_of_a_check(comfy, wan, ampere):
    latents = []
    for check in ("off", "first step"):
        fast = accumulation(comfy, wrong(load(comfy, wan, "fp16", "fp16")), fp16_accumulation="auto", attention="auto")
        with torch.inference_mode():
            latents.append(families.sample(guarded(comfy, fast, check=check), "wan", steps=3))
    assert torch.equal(*latents)


CALLS = {
    "off": (("euler", 6, 1.0), 0, []),
    "first step": (("euler", 6, 1.0), 1, [0]),
    "every 5th step": (("euler", 12, 1.0), 3, [0, 5, 10]),
}


@pytest.mark.parametrize("check", CALLS)
def test_the_calls_a_clean_run_costs(comfy, wan, check):
    (sampler, steps, cfg), extra, checked = CALLS[check]
    model = guarded(comfy, load(comfy, wan, "fp32", "fp32"), check=check)
    with Counted(model) as calls:
        sample(model, families.conditioning("wan"), cfg=cfg, steps=steps, sampler=sampler)
    report = report_of(model)
    assert calls.count == steps + extra and report.extra_calls == extra
    assert [entry.step for entry in report.checks] == checked and report.calls == steps


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_a_sampler_that_calls_twice_a_step_is_checked_once_for_each(comfy, wan, cfg):
    model = guarded(comfy, load(comfy, wan, "fp32", "fp32"), check="every 5th step")
    with Counted(model) as calls:
        sample(model, families.conditioning("wan"), cfg=cfg, steps=7, sampler="heun", batch=2)
    report = report_of(model)
    assert [entry.step for entry in report.checks] == [0, 5] and calls.count == report.calls + 2


def test_each_run_of_a_sampler_begins_anew(comfy, wan):
    model, other = (
        guarded(comfy, load(comfy, wan, "fp32", compute), check="first step") for compute in ("fp32", "bf16")
    )
    for one in (model, other, model):
        families.sample(one, "wan", steps=1)
    assert len(report_of(other).checks) == 1 and report_of(other).checks[0].arithmetic == "bf16"
    assert len(report_of(model).checks) == 1 and report_of(model).checks[0].arithmetic == "fp32"


def test_a_check_without_memory_is_left_out(comfy, wan, flags_as_before, caplog):
    plain = wrong(load(comfy, wan, "fp16", "fp16"))
    expected = families.sample(plain, "wan", steps=2)
    model = guarded(
        comfy, inside(plain, raising_at(torch.OutOfMemoryError("CUDA out of memory"), 2)), check="first step"
    )
    with caplog.at_level("INFO", "halfsafe"):
        assert torch.equal(expected, families.sample(model, "wan", steps=2))
    (check,) = report_of(model).checks
    assert "Not enough memory" in check.left_out and "Not enough memory" in caplog.text
    assert not any("forward" in own for own in left_on(model.model.diffusion_model).values())


def test_a_repeated_call_is_left_out_and_the_next_of_its_step_checked(comfy, wan):
    model = guarded(comfy, inside(load(comfy, wan, "fp16", "fp16"), nan_at(1)), check="first step")
    sample(
        model, families.conditioning("wan", length=16), families.conditioning("wan", length=79)
    )  # too unlike for one call
    report = report_of(model)
    assert report.verdict == "device_fault" and report.calls == 4
    assert [event.call for event in report.events] == [1]
    assert [(check.call, check.step, check.left_out) for check in report.checks] == [(1, 0, NOT_A_RESULT), (2, 0, "")]


def test_an_interrupt_in_a_check_ends_the_check_and_stays_an_interrupt(comfy, wan, flags_as_before):
    stop = comfy_management().InterruptProcessingException()
    model = guarded(comfy, inside(load(comfy, wan, "fp16", "fp16"), raising_at(stop, 2)), check="first step")
    try:
        families.sample(model, "wan", steps=1)
        assert comfy_management().processing_interrupted()
    finally:
        comfy_management().interrupt_current_processing(False)
    assert report_of(model).checks[0].left_out == "The comparison was interrupted."


def comfy_management():
    return core("comfy.model_management")


def test_the_text_of_the_report_has_the_figures(comfy, wan):
    model = guarded(comfy, wrong(load(comfy, wan, "fp16", "fp16")), check="first step")
    families.sample(model, "wan", steps=1)
    report = families.report(comfy, model)
    event, check = report["guard"]["events"][0], report["guard"]["checks"][0]
    assert (
        event["kind"] == "drift" and event["snr_db"] == check["snr_db"] < check["threshold_db"] == event["threshold_db"]
    )
    text = " ".join(report_text(report).split())
    assert f"{check['snr_db']:.1f} dB from fp32 (fp16" in text and "drift" in text and "Farthest:" in text
