"""Failures that no precision cures: each is named, is bounded in calls, and comes with what to do."""

import math

import pytest
import torch
from halfsafe.nodes.host.guard import causes
from halfsafe.precision.guard.verdicts import NonFinite
from safetensors.torch import save_file
from support import families
from support.guarding import Counted, core, guarded, is_finite, plain_fp16, report_of

MOST_CALLS = 4


def stopped_by(model, most: int = MOST_CALLS, **options) -> NonFinite:
    """The error that ends a run, which took at most ``most`` calls of the model."""
    with Counted(model) as calls, pytest.raises(NonFinite) as error:
        families.sample(model, "wan", **options)
    assert calls.count <= most
    assert report_of(model).verdict == error.value.verdict
    return error.value


def test_a_lora_with_nan_is_named_with_its_file(comfy, wan, models_dir, monkeypatch):
    delta = torch.zeros(256, 1024)
    delta[0, 0] = math.nan
    save_file({"diffusion_model.blocks.0.ffn.2.diff": delta}, str(models_dir / "loras" / "broken_lora.safetensors"))
    save_file({"fine": torch.zeros(2)}, str(models_dir / "loras" / "fine_lora.safetensors"))
    prompt = {
        "7": {"inputs": {"lora_name": "broken_lora.safetensors"}},
        "8": {"inputs": {"lora_name": "fine_lora.safetensors"}},
    }
    monkeypatch.setattr(causes, "running_prompt", lambda: prompt)
    model = plain_fp16(comfy, wan).clone()
    model.add_patches({"diffusion_model.blocks.0.ffn.2.weight": ("diff", (delta,))}, 1.0)
    error = stopped_by(guarded(comfy, model))
    assert error.verdict == "bad_weights"
    assert "blocks.0.ffn.2" in str(error) and "broken_lora.safetensors" in str(error)
    assert "fine_lora" not in str(error)


@pytest.mark.parametrize(("positive", "name"), [(True, "positive conditioning"), (False, "negative conditioning")])
def test_a_bad_conditioning_is_told_from_the_other(comfy, wan, positive, name):
    good, bad = families.conditioning("wan"), families.conditioning("wan", seed=2)
    bad[0][0][0, 3] = math.inf
    model = guarded(comfy, plain_fp16(comfy, wan))
    noise = families.noise(model)
    conds = (bad, good) if positive else (good, bad)
    with Counted(model) as calls, pytest.raises(NonFinite) as error:
        core("comfy.sample").sample(model, noise, 4, 3.0, "euler", "simple", *conds, torch.zeros_like(noise), seed=1)
    assert calls.count <= MOST_CALLS
    assert error.value.verdict == "bad_input" and name in str(error.value)


def test_a_bad_latent_is_named_before_any_call(comfy, wan):
    model = guarded(comfy, plain_fp16(comfy, wan))
    noise, cond = families.noise(model), families.conditioning("wan")
    latent = torch.full_like(noise, math.nan)
    with Counted(model) as calls, pytest.raises(NonFinite, match="latent image") as error:
        core("comfy.sample").sample(model, noise, 4, 1.0, "euler", "simple", cond, cond, latent, seed=1)
    assert calls.count == 0 and error.value.verdict == "bad_input"


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "A LoRA or other patch of 'blocks.0.ffn.2.weight'"), (1e6, "With its LoRA, weight")]
)
def test_a_lora_of_a_hook_is_not_blamed_on_the_model_s_file(comfy, wan, value, words):
    hooks, delta = core("comfy.hooks"), torch.zeros(256, 1024)
    delta[0, 0] = value
    group = hooks.create_hook_lora({"diffusion_model.blocks.0.ffn.2.diff": delta}, 1.0, 0.0)
    cond = hooks.set_conds_props([families.conditioning("wan")], 1.0, "default", hooks=group)[0]
    error = stopped_by(guarded(comfy, plain_fp16(comfy, wan)), cond=cond)
    assert error.verdict == "bad_weights" and words in str(error)


def test_a_sampler_that_makes_nan_between_calls(comfy, wan):
    samplers = core("comfy.samplers")

    def broken(model, x, sigmas, extra_args=None, callback=None, disable=None):
        for sigma in sigmas[:-1]:
            x = (x - model(x, sigma * x.new_ones([x.shape[0]]), **extra_args)) * (
                math.nan if sigma < sigmas[0] else 1.0
            )
        return x

    model = guarded(comfy, plain_fp16(comfy, wan))
    noise, cond = families.noise(model), families.conditioning("wan")
    sample = core("comfy.sample").sample_custom
    sigmas = torch.tensor([1.0, 0.7, 0.4, 0.0])
    with pytest.raises(NonFinite) as error:
        sample(model, noise, 1.0, samplers.KSAMPLER(broken), sigmas, cond, cond, torch.zeros_like(noise), seed=1)
    assert error.value.verdict == "not_precision" and "sampler" in str(error.value)
    assert report_of(model).extra_calls == 0


def test_on_nan_stop_names_all_there_is_to_know(comfy, overflowing):
    error = stopped_by(guarded(comfy, plain_fp16(comfy, overflowing), "stop"))
    assert error.verdict == "stopped"
    for part in ("Step 0", "sigma 1", "blocks.0.ffn.2", "matmul", "fp16", "largest input", "retry_higher"):
        assert part in str(error)


def test_on_nan_report_changes_nothing(comfy, overflowing):
    plain = plain_fp16(comfy, overflowing)
    expected = families.sample(plain, "wan")
    model = guarded(comfy, plain, "report")
    result = families.sample(model, "wan")
    assert torch.equal(result.nan_to_num(1e9), expected.nan_to_num(1e9)) and not is_finite(result)
    report = report_of(model)
    assert report.events[0].layer == "blocks.0.ffn.2" and not report.events[0].recovered
    assert len(report.events) == 1 and report.extra_calls == 1 and not report.escalations
