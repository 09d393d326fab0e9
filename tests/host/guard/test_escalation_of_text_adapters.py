"""Text adapters: layers of a diffusion model that ComfyUI runs once per run, before any call of the model, always in fp32 under a guard."""

import math

import pytest
import torch
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, rare_families, tiny_models
from support.families import load
from support.guarding import guarded, is_finite, left_on, plain_fp16, report_of
from support.measures import relative_error

LOUD = {
    "anima": {r"llm_adapter\.blocks\.1\.mlp\.0\.weight": 64.0, r"llm_adapter\.blocks\.1\.mlp\.2\.weight": 4096.0},
    "ltxav": {r"^video_embeddings_connector\.transformer_1d_blocks\.0\.ff\.net\.2\.weight$": 1e6},
    "minimax_h3": {r"^token_refiner\.blocks\.0\.mlp\.fc2\.weight$": 1e6},
}


@pytest.fixture(scope="module", params=LOUD)
def loud(request, models_dir):
    """(family, file) of a model whose adapter overflows in fp16; a norm makes the text small again."""
    path = models_dir / "diffusion_models" / f"adapter_{request.param}.safetensors"
    clean = tiny_models.anima(path) if request.param == "anima" else rare_families.write(request.param, path)
    return request.param, families.write_scaled(clean, clean.with_name(f"loud_{clean.name}"), LOUD[request.param])


def text(family, value=1.0):
    if family != "anima":
        cond = rare_families.conditioning(family)
        cond[0][0][0, 3] *= value
        return cond
    states = torch.randn(1, 8, 1024, generator=torch.Generator().manual_seed(1)) * value
    return [[states, {"t5xxl_ids": torch.arange(6), "t5xxl_weights": torch.ones(6)}]]


def run(model, family, value=1.0):
    if family == "anima":
        return families.sample(model, "anima", cond=text(family, value), steps=2)
    return rare_families.sample(model, family, cond=text(family, value))


def test_an_adapter_runs_in_fp32_under_a_guard_and_by_its_plan_without_one(comfy, loud):
    family, path = loud
    reference, plain = run(load(comfy, path, "fp32", "fp32"), family), plain_fp16(comfy, path)
    assert not is_finite(run(plain, family)), "the adapter overflows"
    before, model = left_on(plain.model), guarded(comfy, plain)
    assert relative_error(reference, run(model, family)) < 0.02
    assert (report_of(model).verdict, report_of(model).extra_calls) == ("clean", 0) and left_on(plain.model) == before
    assert relative_error(reference, run(load(comfy, path, "as_file", "fp16_safe"), family)) < 0.01


def test_a_text_with_nan_is_still_blamed(comfy, loud):
    family, path = loud
    with pytest.raises(NonFinite, match="positive conditioning") as error:
        run(guarded(comfy, load(comfy, path, "as_file", "bf16")), family, math.nan)
    assert error.value.verdict == "bad_input"
