"""Text adapters: layers of a diffusion model that ComfyUI runs once per run, before any call of the model."""

import math

import pytest
import torch
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, tiny_models
from support.families import load
from support.guarding import guarded, is_finite, left_on, plain_fp16, report_of
from support.matmul_spy import MatmulSpy
from support.measures import relative_error

OVERFLOWING = {r"llm_adapter\.blocks\.2\.mlp\.0\.weight": 64.0, r"llm_adapter\.blocks\.2\.mlp\.2\.weight": 4096.0}


@pytest.fixture(scope="module")
def clean(models_dir):
    """An Anima that is finite in fp16."""
    return tiny_models.anima(models_dir / "diffusion_models" / "adapter_clean.safetensors")


@pytest.fixture(scope="module")
def overflowing(clean, models_dir):
    """The same with an adapter that overflows in fp16; its last norm makes the text small again."""
    return families.write_scaled(clean, models_dir / "diffusion_models" / "adapter_overflowing.safetensors", OVERFLOWING)


def text(value: float = 1.0) -> list:
    """A conditioning as of Anima's encoder: hidden states of one model and tokens of another."""
    states = torch.randn(1, 8, 1024, generator=torch.Generator().manual_seed(1)) * value
    return [[states, {"t5xxl_ids": torch.arange(6), "t5xxl_weights": torch.ones(6)}]]


def run(model, cond=None) -> torch.Tensor:
    return families.sample(model, "anima", cond=cond or text(), steps=2)


@pytest.fixture(scope="module")
def reference(comfy, overflowing):
    """The overflowing model's result in fp32."""
    return run(load(comfy, overflowing, "fp32", "fp32"))


def test_an_overflow_in_the_adapter_is_cured_and_not_blamed_on_the_text(comfy, overflowing, reference):
    plain = plain_fp16(comfy, overflowing)
    assert not is_finite(run(plain)), "the adapter overflows"
    before = left_on(plain.model)
    model = guarded(comfy, plain)
    assert relative_error(reference, run(model)) < 0.02
    report = report_of(model)
    assert report.verdict == "recovered" and report.events[0].layer.startswith("llm_adapter.blocks.2.mlp")
    assert {event.kind for event in report.events} == {"overflow"} and report.escalations == {"text adapter": "fp32"}
    run(model)
    assert report_of(model).extra_calls == 0, "the adapter stays in fp32"
    assert left_on(plain.model) == before


def test_the_plan_holds_for_the_adapter_too(comfy, overflowing, reference, monkeypatch):
    model, spy = load(comfy, overflowing, "as_file", "fp16_safe"), MatmulSpy(torch.nn.Module())
    adapter = model.model.diffusion_model
    adapt = adapter.preprocess_text_embeds

    def watched(*args, **kwargs):
        with spy:
            return adapt(*args, **kwargs)

    monkeypatch.setattr(adapter, "preprocess_text_embeds", watched, raising=False)
    assert relative_error(reference, run(model)) < 0.01
    products = [product for product in spy.seen if product.op in ("mm", "addmm")]
    assert len(products) > 50 and all(product.rounded and product.result == "fp32" for product in products)
    layers = families.report(comfy, model)["layers"]
    modes = {layer["mode"] for layer in layers if layer["name"].startswith("llm_adapter.blocks") and layer["class"] == "Linear"}
    assert modes <= {"fp16_wide", "fp16_scaled"}


@pytest.mark.parametrize("on_nan", ["stop", "report"])
def test_stop_and_report_name_the_layer_of_the_adapter(comfy, overflowing, on_nan):
    model = guarded(comfy, plain_fp16(comfy, overflowing), on_nan)
    if on_nan == "stop":
        with pytest.raises(NonFinite, match="llm_adapter.blocks.2.mlp"):
            run(model)
    else:
        assert not is_finite(run(model))
    report = report_of(model)
    assert report.verdict == "stopped" and len(report.events) == 1


def test_a_text_with_nan_is_still_blamed(comfy, clean):
    model = guarded(comfy, plain_fp16(comfy, clean))
    with pytest.raises(NonFinite, match="positive conditioning") as error:
        run(model, text(math.nan))
    assert error.value.verdict == "bad_input"


def flaky(model, monkeypatch, bad_calls: set[int], change=lambda text: text * math.nan) -> list[int]:
    """Damage the text that the model's adapter gives in some of its calls; returns the numbers of the calls made so far."""
    adapter, made = model.model.diffusion_model, []
    adapt = adapter.preprocess_text_embeds

    def run(*args, **kwargs):
        made.append(len(made) + 1)
        text = adapt(*args, **kwargs)
        return change(text) if made[-1] in bad_calls else text

    monkeypatch.setattr(adapter, "preprocess_text_embeds", run, raising=False)
    return made


def test_an_adapter_that_is_finite_the_second_time_is_the_device(comfy, clean, monkeypatch):
    plain = plain_fp16(comfy, clean)
    expected = run(plain)
    flaky(plain, monkeypatch, {1})
    model = guarded(comfy, plain)
    assert torch.equal(run(model), expected), "the result of the same arithmetic is taken"
    report = report_of(model)
    assert report.verdict == "device_fault" and "driver" in report.advice and not report.escalations
    (event,) = report.events
    assert event.recovered and event.from_mode == event.to_mode == "fp16" and "The same call" in event.evidence
    assert report.extra_calls == 2, "once watched, once as it was"


def test_an_adapter_that_is_finite_only_while_it_is_watched_is_no_device_fault(comfy, clean, monkeypatch):
    plain = plain_fp16(comfy, clean)
    flaky(plain, monkeypatch, {1, 3})
    model = guarded(comfy, plain)
    assert is_finite(run(model))
    assert report_of(model).verdict == "recovered"


def test_an_adapters_weight_that_became_nan_after_it_was_read_is_named(comfy, clean):
    plain = plain_fp16(comfy, clean)
    weight = plain.model.diffusion_model.llm_adapter.blocks[1].mlp[0].weight
    kept = weight[0, 0].clone()
    weight[0, 0] = math.nan
    try:
        with pytest.raises(NonFinite, match=r"llm_adapter\.blocks\.1\.mlp\.0\.weight") as error:
            run(guarded(comfy, plain))
    finally:
        weight[0, 0] = kept
    assert error.value.verdict == "transfer"


def test_an_adapter_that_no_precision_cures_is_told_so(comfy, clean, monkeypatch):
    plain = plain_fp16(comfy, clean)
    flaky(plain, monkeypatch, set(range(1, 99)))
    with pytest.raises(NonFinite, match="fp32 too") as error:
        run(guarded(comfy, plain))
    assert error.value.verdict == "not_precision"


def test_without_repeats_the_adapter_says_that_they_are_what_is_missing(comfy, overflowing):
    model = guarded(comfy, plain_fp16(comfy, overflowing), max_retries=0)
    with pytest.raises(NonFinite, match="max_retries") as error:
        run(model)
    assert error.value.verdict == "stopped" and report_of(model).extra_calls == 0
