"""ComfyUI's own quantization formats unpacked, beside comfy-kitchen's eager functions where it has them."""

import json

import pytest
import torch
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file, scan_file
from halfsafe.precision.errors import CheckpointError, NonFiniteWeight, UnconsumedScale
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.plan.rules import Rules
from support import dialects
from support.measures import relative_error
from support.storing import normal_weight

layouts = pytest.importorskip("comfy_kitchen.tensor")
LAYER = "blocks.0.ffn.0"
NAME = f"{LAYER}.weight"
SHAPES = ((256, 384), (48, 128), (130, 320))
ERRORS = {"int8": 0.012, "mxfp8": 0.04, "nvfp4": 0.12, "int4": 0.22, "w4a8": 0.13, "w6a8": 0.03, "awq4": 0.12}
"""What a normal weight loses in each format: these writers round to nearest, with no search for scales."""


def read(tensors, **more):
    return read_checkpoint({f"{LAYER}.{leaf}": tensor for leaf, tensor in (tensors | more).items()}, {}, "m").weights[NAME]


def in_format(name, shape=(256, 384)):
    return dialects.NATIVE[name](normal_weight(shape))


def by_kitchen(name: str, weight: torch.Tensor):
    """A weight as comfy-kitchen quantizes it, its tensors, and as it unpacks them."""
    layout, options = {
        "int8": (layouts.TensorWiseINT8Layout, {"per_channel": True, "convrot": True, "convrot_groupsize": 64}),
        "int4": (layouts.TensorCoreConvRotW4A4Layout, {"convrot_groupsize": 64}),
        "nvfp4": (layouts.TensorCoreNVFP4Layout, {}),
        "mxfp8": (layouts.TensorCoreMXFP8Layout, {}),
    }[name]
    data, params = layout.quantize(weight, **options)
    settings = {"format": FORMAT_OF_STORAGE[name].name} | options
    settings.pop("per_channel", None)
    tensors = {f"weight{suffix}": tensor for suffix, tensor in layout.state_dict_tensors(data, params).items()}
    return tensors | {"comfy_quant": dialects.comfy_quant_bytes(settings)}, layout.dequantize(data, params)


@pytest.mark.parametrize("shape", [(256, 384), (64, 128), (160, 320)])
@pytest.mark.parametrize("name", ["int8", "int4", "nvfp4", "mxfp8"])
def test_what_comfy_kitchen_quantized_is_unpacked_as_it_does(name, shape):
    tensors, expected = by_kitchen(name, normal_weight(shape))
    stored = read(tensors)
    assert stored.storage == name and stored.shape == shape
    assert relative_error(expected, stored.dequantize(torch.float32)) < 2e-7


def test_awq_is_unpacked_as_comfy_kitchen_does():
    tensors = in_format("awq4")
    layout = layouts.TensorCoreAWQW4A16Layout
    scale, zeros = tensors["weight_scale"].float(), tensors["weight_zeros"].float()
    params = layout.Params(scale=scale, zeros=zeros, group_size=64, orig_dtype=torch.float32, orig_shape=(256, 384))
    assert relative_error(layout.dequantize(tensors["weight"], params), read(tensors).dequantize(torch.float32)) < 2e-7


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("codebook", [False, True])
def test_w4a8_follows_its_formula_number_by_number(bits, codebook):
    """comfy-kitchen has the format from 0.2.31 on; this is its definition, written with Python's numbers."""
    if bits == 6 and codebook:
        pytest.skip("6-bit codes are their own values")
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, 64), generator=generator)
    low = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8)
    high = sum((codes[:, j::4] >> 4) << 2 * j for j in range(4)).to(torch.uint8)
    tensors = {
        "weight": (torch.cat((low, high), 1) if bits == 6 else low).view(torch.int8),
        "weight_s_rel": (torch.rand(3, 4, generator=generator) * 4 + 0.1).to(torch.float8_e4m3fn),
        "weight_s_channel": torch.rand(3, generator=generator) + 0.01,
        "comfy_quant": dialects.comfy_quant_bytes({"format": "asym_w4a8_int8", "params": {"group_size": 16, "convrot_groupsize": 16}}),
    }
    table = torch.linspace(-9, 9, 16)
    if codebook:
        tensors["weight_codebook"] = table
    turned = torch.zeros(3, 64, dtype=torch.float64)
    for r in range(3):
        for c in range(64):
            value = table[codes[r, c]].item() if codebook else codes[r, c].item() - (1 << bits - 1)
            steps = round(torch.tensor(value * tensors["weight_s_rel"][r, c // 16].item()).item())
            turned[r, c] = max(-127, min(127, steps)) * tensors["weight_s_channel"][r].double()
    expected = (turned.reshape(-1, 16) @ dialects.rotation(16).double()).reshape(3, 64)
    assert relative_error(expected, read(tensors).dequantize(torch.float32)) < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", dialects.NATIVE)
def test_values_are_the_weight_they_were_made_of(name, shape):
    stored = read(in_format(name, shape))
    assert stored.shape == shape and relative_error(normal_weight(shape), stored.dequantize(torch.float32)) < ERRORS[name]
    assert stored.dequantize(torch.float32).abs().max() <= stored.encoding.bound()


@pytest.mark.parametrize("name", dialects.NATIVE)
def test_parts_are_the_whole(monkeypatch, name):
    stored = read(in_format(name))
    whole = stored.dequantize(torch.float32)
    monkeypatch.setattr("halfsafe.precision.formats.stored_weight.CHUNK", 5 * 384)
    assert torch.allclose(stored.dequantize(torch.float32), whole, atol=1e-7)


@pytest.mark.parametrize("storage", ["as_file", "bf16", "fp8_e4m3fn", "int8"])
@pytest.mark.parametrize("name", dialects.NATIVE)
def test_conversion_between_formats(tmp_path, name, storage):
    weights, biases = dialects.reference()
    source = dialects.in_format(tmp_path / "in.safetensors", weights, biases, name)
    summary = convert_file(source, tmp_path / "out.safetensors", storage, Rules())
    held = name if storage == "as_file" else storage
    assert summary.weights[held] in (2, 4) and not scan_file(tmp_path / "out.safetensors").problems
    before, after = (read_checkpoint(file, file.metadata, "m").weights for file in map(open_checkpoint, (source, tmp_path / "out.safetensors")))
    cost = {"as_file": 0, "bf16": 0.002, "fp8_e4m3fn": 0.03, "int8": 0.012 if name != "int8" else 0}[storage]
    for key, weight in before.items():
        assert relative_error(weight.dequantize(torch.float32), after[key].dequantize(torch.float32)) <= cost


@pytest.mark.parametrize("name", dialects.NATIVE)
def test_an_unchanged_layer_keeps_every_byte(tmp_path, name):
    weights, biases = dialects.reference()
    source = dialects.in_format(tmp_path / "in.safetensors", weights, biases, name)
    convert_file(source, tmp_path / "out.safetensors", "as_file", Rules())
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out.safetensors")
    assert set(before) == set(after)
    assert all(before[key].reshape(-1).view(torch.uint8).tolist() == after[key].reshape(-1).view(torch.uint8).tolist() for key in before)


@pytest.mark.parametrize("name", dialects.NATIVE)
def test_inspect_names_the_format_and_the_comfyui_that_reads_it(tmp_path, name):
    found = inspect_file(dialects.in_format(tmp_path / "in.safetensors", *dialects.reference(), name))
    row = FORMAT_OF_STORAGE[name]
    assert found.scales == {name: 2} and found.parameters == 2 * (256 * 384 + 256) and not found.problems
    assert any(row.title in line and row.since in line for line in found.in_comfyui)


@pytest.mark.parametrize(
    "settings",
    [
        {"convrot": True, "convrot_groupsize": 64, "per_row": True},
        {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 64}},
    ],
)
def test_int8_settings_of_other_tools_are_read_and_written_as_comfyui_reads_them(tmp_path, settings):
    weights, biases = dialects.reference(shape=(256, 320))
    source = dialects.in_format(tmp_path / "in.safetensors", weights, biases, "int8", settings)
    convert_file(source, tmp_path / "out.safetensors", "as_file", Rules())
    file = open_checkpoint(tmp_path / "out.safetensors")
    written = json.loads(bytes(file[f"{LAYER}.comfy_quant"].tolist()))
    assert (written["format"], written["convrot"], written["convrot_groupsize"]) == ("int8_tensorwise", True, 64)
    stored = read_checkpoint(file, file.metadata, "m").weights[NAME]
    assert relative_error(weights[LAYER], stored.dequantize(torch.float32)) < ERRORS["int8"]


@pytest.mark.parametrize(("scale", "shape"), [(torch.full((1,), 0.5), ()), (torch.full((256,), 0.5), (256, 1)), (torch.tensor(0.5), ())])
def test_int8_scales_of_every_shape_become_what_comfyui_multiplies_by(scale, shape):
    codes = torch.randint(-127, 128, (256, 64), dtype=torch.int8)
    stored = read({"weight": codes, "weight_scale": scale, "comfy_quant": dialects.comfy_quant_bytes({"format": "int8_tensorwise"})})
    assert stored.auxiliary[f"{LAYER}.weight_scale"].shape == shape
    assert torch.equal(stored.dequantize(torch.float32), codes * 0.5)


def test_smoothing_of_nvfp4_inputs_is_part_of_the_weight():
    tensors, smoothing = in_format("nvfp4"), torch.linspace(0.5, 2, 384)
    plain = read(tensors).dequantize(torch.float32)
    assert torch.allclose(read(tensors, pre_quant_scale=smoothing).dequantize(torch.float32), plain * smoothing)


@pytest.mark.parametrize("name", [*dialects.NATIVE, "fp8_e4m3fn"])
def test_a_bank_of_experts_is_each_of_them(name):
    each = [normal_weight((128, 384)), normal_weight((128, 384)).flip(0)]
    if name == "fp8_e4m3fn":
        made = [dict(zip(("weight", "weight_scale"), dialects.per_tensor(w), strict=True)) for w in each]
        settings = {"format": "float8_e4m3fn"}
    else:
        made = [dialects.NATIVE[name](w) for w in each]
        settings = json.loads(bytes(made[0].pop("comfy_quant").tolist()))
    tensors = {leaf: torch.stack([m[leaf] for m in made]) for leaf in made[0]}
    stored = read(tensors, comfy_quant=dialects.comfy_quant_bytes(settings | {"num_experts": 2}))
    assert stored.shape == (2, 128, 384) and stored.storage == name
    one = read(made[1], comfy_quant=dialects.comfy_quant_bytes(settings))
    assert torch.allclose(stored.dequantize(torch.float32)[1], one.dequantize(torch.float32))


@pytest.mark.parametrize("name", dialects.NATIVE)
def test_a_missing_or_misshapen_scale_is_an_error_that_names_it(name):
    for leaf in [leaf for leaf in in_format(name) if "scale" in leaf or "_s_" in leaf or "zeros" in leaf]:
        if leaf == "input_scale":
            continue
        tensors = in_format(name)
        wrong = tensors | {leaf: tensors[leaf].reshape(-1)[:1].expand(3).clone()}
        with pytest.raises((CheckpointError), match=leaf):
            read(wrong)
        del tensors[leaf]
        with pytest.raises(CheckpointError, match=leaf):
            read(tensors)


@pytest.mark.parametrize("name", dialects.NATIVE)
@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_scale_that_is_no_number_is_an_error(name, value):
    leaf = {"mxfp8": "weight_scale", "w4a8": "weight_s_channel", "w6a8": "weight_s_channel"}.get(name, "weight_scale_2" if name == "nvfp4" else "weight_scale")
    tensors = in_format(name)
    if name == "mxfp8":
        tensors[leaf] = torch.full_like(tensors[leaf], 255)
    elif name == "awq4" and value < 0:
        pytest.skip("AWQ's scales have a sign")
    else:
        tensors[leaf] = torch.full_like(tensors[leaf], value)
    with pytest.raises(NonFiniteWeight, match=leaf):
        read(tensors)


def test_a_scale_that_the_format_has_no_use_for_is_an_error():
    with pytest.raises(UnconsumedScale, match="weight_scale_2"):
        read(in_format("int8"), weight_scale_2=torch.tensor(1.0))


@pytest.mark.parametrize("settings", [{"format": "svdquant_w4a4"}, {"format": "x" * 500}, {"format": "float8_x", "num_experts": 1}])
def test_an_unknown_format_is_refused_with_the_comfyui_it_may_need(settings):
    tensors = in_format("int8") | {"comfy_quant": dialects.comfy_quant_bytes(settings)}
    with pytest.raises(CheckpointError, match="no ComfyUI up to") as error:
        read(tensors)
    assert "Update ComfyUI" in str(error.value)
