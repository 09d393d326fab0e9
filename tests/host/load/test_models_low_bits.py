"""Files in 6 and 4 bits and in scaled blocks: ours in stock ComfyUI, made on load; or refused where this ComfyUI lacks them."""

import json
import re

import comfy.quant_ops
import pytest
import torch
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from halfsafe.precision.base.errors import StorageNotHeld
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file
from support.families import stock
from support.measures import relative_error

LOW = ("w6a8", "w4a8", "nvfp4", "mxfp8")
ERROR = {"w6a8": 0.025, "w4a8": 0.09, "nvfp4": 0.12, "mxfp8": 0.04}


def held(storage):
    if storage not in held_storages():
        pytest.skip(f"this ComfyUI does not run {storage}")


def load(comfy, path, storage="as_file", compute="fp32", **more):
    return comfy.run("HalfsafeLoadDiffusionModel", model_name=path.name, storage=storage, compute=compute, **more)[0]


def report(comfy, model) -> dict:
    return json.loads(comfy.run("HalfsafeReport", model=model)[1])


def quantized(model) -> dict[str, torch.Tensor]:
    modules = model.model.diffusion_model.named_modules()
    weights = {name: getattr(module, "weight", None) for name, module in modules}
    return {name: weight for name, weight in weights.items() if isinstance(weight, comfy.quant_ops.QuantizedTensor)}


def saved(comfy, model, storage) -> str:
    import folder_paths

    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    return f"{folder_paths.get_output_directory()}/{node.execute(model, 'low', storage, None).args[0]}"


@pytest.fixture(scope="module")
def converted(wan):
    paths = {storage: wan.with_name(f"{storage}.safetensors") for storage in LOW if storage in held_storages()}
    for storage, path in paths.items():
        convert_file(wan, path, storage, rules_from())
    return paths


@pytest.mark.parametrize("storage", LOW)
def test_stock_comfyui_dequantizes_the_weights_that_we_wrote_as_we_do(converted, wan, storage):
    held(storage)
    file, exact = open_checkpoint(converted[storage]), load_file(wan)
    stored = read_checkpoint(file, file.metadata, "m").weights
    weights = quantized(stock(converted[storage], torch.float32))
    assert len(weights) > 3
    for layer, weight in weights.items():
        found = stored[f"{layer}.weight"].dequantize(torch.float32)
        assert relative_error(found, weight.to(torch.float32).dequantize().cpu()) < 1e-6
        assert 0.2 * ERROR[storage] < relative_error(exact[f"{layer}.weight"], found) < ERROR[storage]


@pytest.mark.parametrize("storage", LOW)
def test_made_on_load_is_the_converted_file_and_gives_what_stock_gives(comfy, converted, wan, storage):
    held(storage)
    model = load(comfy, wan, storage)
    theirs = quantized(stock(converted[storage], torch.float32))
    ours = quantized(model)
    assert set(ours) == set(theirs)
    for layer, weight in ours.items():
        assert torch.equal(weight._qdata.cpu(), theirs[layer]._qdata.cpu())
    layers = {layer["name"]: layer["storage"] for layer in report(comfy, model)["layers"]}
    assert {layers[name] for name in ours} == {storage}


@pytest.mark.parametrize("storage", LOW)
def test_a_saved_model_is_the_loaded_one(comfy, converted, wan, storage):
    held(storage)
    model = load(comfy, converted[storage])
    before, after = open_checkpoint(converted[storage]), open_checkpoint(saved(comfy, model, storage))
    low = [key for key in before if key.rpartition(".")[0] in quantized(model)]
    assert len(low) > 9
    for key in (key for key in low if not key.endswith("bias")):
        assert torch.equal(before[key].reshape(-1).view(torch.uint8), after[key].reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("storage", LOW)
@pytest.mark.parametrize("node", ["load", "rule", "save"])
def test_a_comfyui_without_the_format_refuses_it_and_names_the_one_that_has_it(comfy, wan, storage, node, monkeypatch):
    for module in ("load.models", "load.save"):
        monkeypatch.setattr(f"halfsafe.nodes.host.{module}.held_storages", lambda: held_storages() - {*LOW})
    format = FORMAT_OF_STORAGE[storage]
    with pytest.raises(
        StorageNotHeld,
        match=rf"storage={storage}: this ComfyUI does not run {re.escape(format.title)}.*ComfyUI {re.escape(format.since)}",
    ):
        if node == "load":
            load(comfy, wan, storage)
        elif node == "rule":
            rules = comfy.run("HalfsafeLayerRules", rules=f"*ffn* storage={storage}", preset="none")[0]
            load(comfy, wan, "bf16", rules=rules)
        else:
            saved(comfy, load(comfy, wan), storage)


def test_a_kitchen_without_6_bits_holds_only_4(monkeypatch):
    held("w4a8")
    layout = comfy.quant_ops.get_layout_class("AsymW4A8Int8Layout")
    monkeypatch.setattr(layout, "quantize", classmethod(lambda cls, tensor, group_size=16: None))
    assert "w6a8" not in held_storages() and "w4a8" in held_storages()
