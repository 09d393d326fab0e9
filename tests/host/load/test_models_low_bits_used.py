"""6- and 4-bit weights in use: products, LoRAs, the guard and saving.

They need a ComfyUI that runs the formats: 0.31 or later with comfy-kitchen 0.2.31 for w4a8, 0.2.36 for w6a8.
"""

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files
from support.families import load
from support.guarding import guarded, report_of
from support.int8_models import layers_of
from support.matmul_spy import Products
from support.measures import relative_error

FAMILIES = ("wan", "sdxl")
LOSS = {"w6a8": 0.06, "w4a8": 0.2}
TOLD = "transformer_blocks.0.attn2.to_k"
CULPRIT = "blocks.0.ffn.2"


@pytest.fixture(params=["w6a8", "w4a8"])
def storage(request):
    if request.param not in held_storages():
        pytest.skip(f"this ComfyUI does not run {request.param}")
    return request.param


@pytest.fixture(scope="module")
def files(models_dir):
    return families.files_in(models_dir / "diffusion_models", "low")


def layers_in(comfy, model) -> dict[str, dict]:
    return {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}


def products(model, call):
    """Layer -> the mode of its own product; the one before it rotates its input."""
    families.replay(model, call)
    with Products(layers_of(model)) as seen:
        result = families.replay(model, call)
    return {name: made[-1] for name, made in seen.made.items()}, result


def with_lora(model, tensors):
    return load_lora_for_models(model, None, dict(tensors), 1.0, 0.0)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_as_reported_and_a_lora_stays_beside_the_weight(comfy, files, family, storage):
    exact, model = load(comfy, files(family), "fp32"), load(comfy, files(family), storage, "int8")
    call = families.capture(exact, family)
    made, result = products(model, call)
    layers = layers_in(comfy, model)
    assert len(made) > 3 and set(made.values()) == {"int8"}
    assert {(layers[name]["mode"], layers[name]["kernel"]) for name in made} == {("int8", "eager")}
    assert {layers[name]["storage"] for name in made if not name.endswith(TOLD)} == {storage}
    error = relative_error(families.replay(exact, call), result)
    with_8_bits = families.replay(load(comfy, files(family), "int8", "int8"), call)
    assert 0 < error < LOSS[storage] + relative_error(families.replay(exact, call), with_8_bits)
    weights = {name: module.weight._qdata.clone() for name, module in layers_of(model).items()}
    tensors = model_files.lora(
        {name: tuple(module.weight.shape) for name, module in layers_of(model).items()}, size=0.05
    )
    changed = families.replay(with_lora(exact, tensors), call)
    again, adapted = products(with_lora(model, tensors), call)
    assert relative_error(result, adapted) > 0.01 and relative_error(changed, adapted) < 1.2 * error
    assert again == made and all(
        torch.equal(module.weight._qdata, weights[name]) for name, module in layers_of(model).items()
    )


def load_int8(comfy, path, storage):
    """With fp16 between layers, which rules alone ask for."""
    return load(comfy, path, storage, "fp16", rules_from("* compute=int8"))


def test_a_layer_that_overflows_is_dequantized_by_itself(comfy, overflowing, call, storage, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "gfx1201")
    exact = families.replay(load(comfy, overflowing, "fp32", "fp32"), call)
    model = guarded(comfy, load_int8(comfy, overflowing, storage))
    assert relative_error(exact, families.replay(model, call)) < LOSS[storage]
    (event,) = report_of(model).events
    assert (event.layer, event.kind, event.from_mode, event.recovered) == (CULPRIT, "overflow", "int8", True)
    made, result = products(model, call)
    layers = layers_in(comfy, model)
    assert layers[CULPRIT]["kernel"] == "dequantized" and made.pop(CULPRIT) != "int8"
    assert set(made.values()) == {"int8"} and {layers[name]["kernel"] for name in made} == {"eager"}
    assert relative_error(exact, result) < LOSS[storage]


@pytest.mark.parametrize("family", ["sdxl"])
def test_the_weight_that_comfyui_tells_the_model_by_is_not_packed(comfy, files, family, storage):
    model = load(comfy, files(family), storage, "fp32")
    layers = layers_in(comfy, model)
    told = [name for name in layers if name.endswith(TOLD)]
    assert told and {layers[name]["storage"] for name in told} == {"int8"}
    assert "ComfyUI detects the architecture from" in layers[told[0]]["reason"]
    assert storage in {layers[name]["storage"] for name in layers if "transformer_blocks.0.attn1" in name}
