"""6- and 4-bit weights in use: products, LoRAs, the guard, accumulation, badges, saving, text encoders and ControlNets.

They need a ComfyUI that runs the formats: 0.31 or later with comfy-kitchen 0.2.31 for w4a8, 0.2.36 for w6a8.
"""

import folder_paths
import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.badge import model_words
from halfsafe.nodes.host.facts.model_facts import held_storages
from halfsafe.nodes.host.guard.model import guard_of
from halfsafe.nodes.host.load.control_runs import loaded_control
from halfsafe.nodes.host.report import control_report
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.guard.policy import Escalation
from halfsafe.precision.plan.rules import rules_from
from support import control_files, families, model_files, tiny_models
from support.families import load
from support.guarding import guarded, report_of
from support.int8_models import layers_of
from support.measures import relative_error
from support.products import Products

FAMILIES = ("wan", "flux", "sdxl", "qwen_image")
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
    tensors = model_files.lora({name: tuple(module.weight.shape) for name, module in layers_of(model).items()}, size=0.05)
    changed = families.replay(with_lora(exact, tensors), call)
    again, adapted = products(with_lora(model, tensors), call)
    assert relative_error(result, adapted) > 0.01 and relative_error(changed, adapted) < 1.2 * error
    assert again == made and all(torch.equal(module.weight._qdata, weights[name]) for name, module in layers_of(model).items())


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


def test_a_model_that_the_guard_widens_whole_is_dequantized(comfy, wan, call, storage):
    model = guarded(comfy, load(comfy, wan, storage, "int8"))
    families.replay(model, call)
    guard_of(model).states.last(model.model).grow(Escalation(whole=True))
    made, result = products(model, call)
    layers = layers_in(comfy, model)
    assert {(made[name], layers[name]["mode"], layers[name]["kernel"]) for name in made} == {("fp32", "fp32", "dequantized")}
    assert relative_error(families.replay(load(comfy, wan, "fp32"), call), result) < LOSS[storage]


def test_sums_stay_exact_whatever_the_accumulation(comfy, wan, call, storage, ampere):
    plain = load(comfy, wan, storage, "int8")
    settings = {"reduced_precision_reduction": "on", "fp8_fast_accumulation": "on", "attention": "unchanged"}
    model = comfy.run("HalfsafeAccumulation", model=plain, fp16_accumulation="on", tf32="on", **settings)[0]
    assert storage in model_words(plain)[0].split(" + ")
    before, after = products(plain, call), products(model, call)
    assert before[0] == after[0] and set(after[0].values()) == {"int8"}
    assert relative_error(before[1], after[1]) < LOSS[storage] / 10
    layers = layers_in(comfy, model)
    assert all("int32" in layers[name]["reason"] for name in after[0])


def test_a_16_bit_model_in_memory_is_saved_as_its_file_is_converted(comfy, wan, storage, tmp_path):
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    (name,) = node.execute(load(comfy, wan, "as_file", "bf16"), "low", storage, None).args
    convert_file(wan, tmp_path / "file.safetensors", storage, rules_from())
    made, expected = open_checkpoint(f"{folder_paths.get_output_directory()}/{name}"), open_checkpoint(tmp_path / "file.safetensors")
    low = [key for key in expected if "weight_s_rel" in key]
    assert len(low) > 9 and set(low) == {key for key in made if "weight_s_rel" in key}
    for key in (key.replace("weight_s_rel", leaf) for key in low for leaf in ("weight", "weight_s_rel", "weight_s_channel", "comfy_quant")):
        assert torch.equal(made[key].view(torch.uint8), expected[key].view(torch.uint8)), key


@pytest.mark.parametrize("family", ["sdxl", "ltxv"])
def test_the_weight_that_comfyui_tells_the_model_by_is_not_packed(comfy, files, family, storage):
    model = load(comfy, files(family), storage, "fp32")
    layers = layers_in(comfy, model)
    told = [name for name in layers if name.endswith(TOLD)]
    assert told and {layers[name]["storage"] for name in told} == {"int8"}
    assert "ComfyUI tells the model by" in layers[told[0]]["reason"]
    assert storage in {layers[name]["storage"] for name in layers if "transformer_blocks.0.attn1" in name}


def test_a_text_encoder(comfy, models_dir):
    if "w6a8" not in held_storages():
        pytest.skip("this ComfyUI does not run w6a8")
    path = tiny_models.clip_l(models_dir / "text_encoders" / "clip_l_low_bits.safetensors")

    def encoded(storage):
        inputs = {"clip_name1": path.name, "type": "stable_diffusion", "storage": storage, "compute": "auto"}
        clip = comfy.run("HalfsafeLoadCLIP", **inputs)[0]
        return clip.encode_from_tokens(clip.tokenize("a lighthouse")), clip

    exact, (found, clip) = encoded("fp32")[0], encoded("w6a8")
    layouts = {getattr(module.weight, "_layout_cls", "") for module in clip.cond_stage_model.modules() if hasattr(module, "weight")}
    assert "AsymW4A8Int8Layout" in layouts
    assert 0 < relative_error(exact, found) < 2 * LOSS["w6a8"]


@pytest.mark.parametrize("kind", ["sd15", "flux"])
def test_a_controlnet(comfy, models_dir, storage, kind, monkeypatch):
    control_files.narrow(monkeypatch)
    path = control_files.KINDS[kind](models_dir / "controlnet" / f"low_{kind}.safetensors")
    exact, control, in_int8 = (
        comfy.run("HalfsafeLoadControlNet", control_net_name=path.name, storage=held, compute=compute)[0]
        for held, compute in (("as_file", "fp32"), (storage, "fp32"), (storage, "int8"))
    )
    assert 0 < relative_error(control_files.give(exact, kind), control_files.give(control, kind)) < LOSS[storage]
    control_files.give(in_int8, kind)
    low = [layer for layer in control_report(loaded_control(in_int8)).layers if layer.storage == storage]
    assert len(low) >= 4 and {(layer.mode, layer.kernel) for layer in low} == {("int8", "eager")}
