"""The text adapters of LTX-AV and MiniMax H3, which ComfyUI runs once per run, before any call of the model."""

import math

import pytest
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, rare_families
from support.families import load
from support.guarding import guarded, is_finite, left_on, plain_fp16, report_of
from support.measures import relative_error
from support.rare_families import sample

LOUD = {
    "ltxav": "video_embeddings_connector.transformer_1d_blocks.0.ff.net.2",
    "minimax_h3": "token_refiner.blocks.0.mlp.fc2",
}


@pytest.fixture(scope="module", params=LOUD)
def loud(request, models_dir):
    """(family, file) of a model whose adapter overflows in fp16; a norm makes the text small again."""
    clean = rare_families.write(request.param, models_dir / "diffusion_models" / f"adapter_{request.param}.safetensors")
    pattern = f"^{LOUD[request.param]}.weight$".replace(".", r"\.")
    return request.param, families.write_scaled(clean, clean.with_name(f"loud_{clean.name}"), {pattern: 1e6})


def test_an_overflow_in_the_adapter_is_cured_and_its_layer_named(comfy, loud):
    family, path = loud
    reference = sample(load(comfy, path, "fp32", "fp32"), family)
    plain = plain_fp16(comfy, path)
    assert not is_finite(sample(plain, family, steps=1)), "the adapter overflows"
    before, model = left_on(plain.model), guarded(comfy, plain)
    assert relative_error(reference, sample(model, family)) < 0.01
    report = report_of(model)
    assert report.verdict == "recovered" and report.events[0].layer == LOUD[family]
    assert report.escalations == {"text adapter": "fp32"}
    assert left_on(plain.model) == before


def test_the_plan_holds_for_the_adapter(comfy, loud, ampere):
    family, path = loud
    reference = sample(load(comfy, path, "fp32", "fp32"), family, steps=1)
    for storage, bound in (("as_file", 0.005), ("int8", 0.05)):
        assert relative_error(reference, sample(load(comfy, path, storage, "fp16_safe"), family, steps=1)) < bound


def test_a_text_with_nan_is_blamed(comfy, loud):
    family, path = loud
    cond = rare_families.conditioning(family)
    cond[0][0][0, 3] = math.nan
    model = guarded(comfy, load(comfy, path, "as_file", "bf16"))
    with pytest.raises(NonFinite, match="positive conditioning") as error:
        sample(model, family, steps=1, cond=cond)
    assert error.value.verdict == "bad_input"
