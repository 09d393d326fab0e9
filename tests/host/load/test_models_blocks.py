"""Models stored in ``nvfp4`` and ``mxfp8``: products, LoRAs, rules that mix, the guard, and every loader that has the options."""

from __future__ import annotations

import re
from pathlib import Path

import comfy.quant_ops
import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui.layers import matrix_layers
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files
from support.families import load
from support.guarding import guarded, report_of
from support.int8_models import layers_of
from support.matmul_spy import Products
from support.measures import relative_error
from support.rows import rotated

FAMILIES = ("wan", "sdxl")
LOSS = {"nvfp4": 0.25, "mxfp8": 0.12}
WIDTH_TELLS_THE_MODEL = "transformer_blocks.0.attn2.to_k"


@pytest.fixture(params=["nvfp4", "mxfp8"])
def storage(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def files(models_dir):
    return families.files_in(models_dir / "diffusion_models", "blocks")


def layers_in(comfy, model) -> dict[str, dict]:
    return {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}


def held_in(model) -> dict[str, str]:
    """Layer -> the layout of its weight."""
    return {
        name: module.weight._layout_cls
        for name, module in layers_of(model).items()
        if isinstance(module.weight, comfy.quant_ops.QuantizedTensor)
    }


@pytest.mark.parametrize(("family", "compute"), rotated(FAMILIES, ["fp16_safe", "bf16", "fp32"], whole=["wan"]))
def test_weights_are_unpacked_for_products_in_the_dtype_asked_for(
    comfy, files, family: str, storage: str, compute: str
) -> None:
    exact, model = load(comfy, files(family), "fp32"), load(comfy, files(family), storage, compute)
    call = families.capture(exact, family)
    families.replay(model, call)
    with Products(layers_of(model)) as seen:
        result = families.replay(model, call)
    layers, packed = layers_in(comfy, model), held_in(model)
    told = [name for name in layers if name.endswith(WIDTH_TELLS_THE_MODEL)]
    assert len(packed) > 3 and {layers[name]["storage"] for name in packed if name not in told} == {storage}
    assert {layers[name]["kernel"] for name in packed if name not in told} == {"dequantized"}, (
        "no CPU multiplies the format"
    )
    assert {seen.made[name][-1] for name in packed if name in seen.made} <= {compute, "fp16_wide", "fp16_scaled"}
    assert 0 < relative_error(families.replay(exact, call), result) < LOSS[storage]


@pytest.mark.parametrize("family", ["sdxl"])
def test_the_width_that_comfyui_detects_the_model_by_is_not_packed(comfy, files, family: str) -> None:
    layers = layers_in(comfy, load(comfy, files(family), "nvfp4", "fp32"))
    told = [name for name in layers if name.endswith(WIDTH_TELLS_THE_MODEL)]
    assert told and {layers[name]["storage"] for name in told} == {"int8"}
    assert "ComfyUI detects the architecture from" in layers[told[0]]["reason"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lora_changes_the_result_and_no_weight(comfy, files, family: str, storage: str) -> None:
    exact, model = load(comfy, files(family), "fp32"), load(comfy, files(family), storage, "bf16")
    call = families.capture(exact, family)
    plain = families.replay(model, call)
    weights = {
        name: module.weight._qdata.clone() for name, module in layers_of(model).items() if name in held_in(model)
    }
    tensors = model_files.lora(
        {name: tuple(module.weight.shape) for name, module in layers_of(model).items()}, size=0.05
    )
    theirs, ours = (load_lora_for_models(each, None, dict(tensors), 1.0, 0.0)[0] for each in (exact, model))
    adapted = families.replay(ours, call)
    assert relative_error(plain, adapted) > 0.01
    assert (
        relative_error(families.replay(theirs, call), adapted)
        < 1.3 * relative_error(families.replay(exact, call), plain) + 0.02
    )
    assert all(torch.equal(layers_of(model)[name].weight._qdata, data) for name, data in weights.items())


def test_rules_mix_formats(comfy, files) -> None:
    rules = rules_from("*ffn* storage=nvfp4\n*self_attn* storage=int8\n*cross_attn* storage=mxfp8")
    model = load(comfy, files("wan"), "bf16", "bf16", rules)
    held = held_in(model)
    wanted = {
        "ffn": "TensorCoreNVFP4Layout",
        "self_attn": "TensorWiseINT8Layout",
        "cross_attn": "TensorCoreMXFP8Layout",
    }
    for part, layout in wanted.items():
        found = {held.get(name) for name in layers_of(model) if f".{part}." in name}
        assert found == {layout}, part
    exact = load(comfy, files("wan"), "fp32")
    call = families.capture(exact, "wan")
    assert relative_error(families.replay(exact, call), families.replay(model, call)) < LOSS["nvfp4"]


@pytest.mark.parametrize("page", ["nodes.md", "nodes.zh.md"])
def test_the_mix_of_formats_that_is_documented_loads_as_it_says(comfy, files, page: str) -> None:
    """For Wan 14B, whose last block is 39: the small one has blocks 0 and 1."""
    (lines,) = re.findall(
        r"```\n([^`]*storage=nvfp4[^`]*)```", (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8")
    )
    rules = comfy.run("HalfsafeLayerRules", rules=lines, preset="keep sensitive layers")[0]
    model = load(comfy, files("wan"), "as_file", "auto", rules)
    held = held_in(model)
    wanted = {"ffn": "TensorCoreNVFP4Layout", "self_attn": "TensorWiseINT8Layout", "cross_attn": "TensorWiseINT8Layout"}
    inner = [name for name, _ in matrix_layers(model.model) if name.startswith("blocks.1.")]
    assert len(inner) > 5 and {name: held.get(name) for name in inner} == {
        name: wanted[name.split(".")[2]] for name in inner
    }
    edge = [module.weight for name, module in matrix_layers(model.model) if name.startswith("blocks.0.")]
    assert (
        len(edge) > 5
        and {weight.dtype for weight in edge} == {torch.bfloat16}
        and not any(name.startswith("blocks.0.") for name in held)
    )
    call = families.capture(exact := load(comfy, files("wan"), "fp32"), "wan")
    assert relative_error(families.replay(exact, call), families.replay(model, call)) < LOSS["nvfp4"]


def test_an_overflow_is_cured(comfy, overflowing, call, storage: str) -> None:
    exact = families.replay(load(comfy, overflowing, "fp32", "fp32"), call)
    model = guarded(comfy, load(comfy, overflowing, storage, "fp16"))
    assert relative_error(exact, families.replay(model, call)) < LOSS[storage]
    assert [event.recovered for event in report_of(model).events] == [True]
