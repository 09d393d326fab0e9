"""The report of a guarded run names the arithmetic that was used, in layers outside of the model's calls and in those of its own classes."""

import pytest
from support import families, rare_families
from support.families import load
from support.guarding import guarded, plain_fp16
from support.matmul_spy import MatmulSpy, differences


@pytest.fixture(scope="module")
def file(models_dir):
    return lambda family: rare_families.write(family, models_dir / "diffusion_models" / f"guarded_{family}.safetensors")


def reported(comfy, model, family):
    """The report's layers after two runs, of which the second is compared with its products."""
    rare_families.sample(model, family)
    with MatmulSpy(model.model.diffusion_model) as spy:
        rare_families.sample(model, family)
    layers = families.report(comfy, model)["layers"]
    assert differences(layers, spy) == []
    return {layer["name"]: layer for layer in layers}


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "family,layer",
    [("ltxav", "audio_embeddings_connector.transformer_1d_blocks.0.ff.net.2"), ("minimax_h3", "condition_proj")],
)
def test_a_text_adapter_is_reported_in_fp32(comfy, file, family, layer, compute):
    layers = reported(comfy, guarded(comfy, load(comfy, file(family), "as_file", compute)), family)
    assert (layers[layer]["mode"], layers[layer]["stream"], layers[layer]["reason"]) == (
        "fp32",
        "fp32",
        "widened by the guard",
    )
    assert compute in {layer["mode"] for layer in layers.values()}


@pytest.mark.parametrize("family", ["hidream", "stable_audio"])
def test_widened_values_are_reported_for_layers_of_all_classes(comfy, file, family):
    """HiDream's routers multiply by a weight of their own class; stable audio's operands outgrow their scale in the second step."""
    source = file(family)
    path = families.write_scaled(
        source, source.with_name(f"loud_{source.name}"), rare_families.OVERFLOWS[family]["ffn"]
    )
    layers = reported(comfy, guarded(comfy, plain_fp16(comfy, path)), family)
    assert {layer["stream"] for layer in layers.values()} == {"fp32"}
