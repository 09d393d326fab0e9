"""Text adapters: layers of a diffusion model that ComfyUI runs once per run, before any call of the model."""

import math

import pytest
import torch
from halfsafe.precision.guard.policy import NonFinite
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
