"""Settings of layers in a file's header, which names them with the tensors' prefix or without: read as from ``comfy_quant`` tensors."""

import json

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.readers import UNKNOWN_PREFIXES
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import dialects
from support.storing import in_storages, tensors_in

FP8 = "float8_e4m3fn"
FORMATS_OF_FILES = [FP8, *dialects.NATIVE]
PREFIXES = ["", "model.diffusion_model.", "model.model.", "net.", "model.", "diffusion_model.", "transformer."]
FULL = "full_precision_matrix_mult"


def marked(folder, format, more=None):
    """A file whose layers are in a format, with ``comfy_quant`` tensors that say ``more`` than the format needs."""
    weights, biases = dialects.reference()
    path = folder / "model.safetensors"
    if format == FP8:
        return dialects.comfy_quant(path, weights, biases, settings=more)
    dialects.in_format(path, weights, biases, format)
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".comfy_quant")]:
        tensors[name] = dialects.comfy_quant_bytes(json.loads(tensors[name].numpy().tobytes()) | (more or {}))
    save_file(tensors, path)
    return path


def read(path):
    file = open_checkpoint(path)
    return read_checkpoint(file, file.metadata, path)


def settings_in(tensors):
    found = {name: tensor for name, tensor in tensors.items() if name.endswith(".comfy_quant")}
    return {name: json.loads(tensor.numpy().tobytes()) for name, tensor in found.items()}


def assert_same(one, two, prefix=""):
    assert {prefix + name for name in one} == set(two)
    for name, tensor in one.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), two[prefix + name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("named", ["with", "without"])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("format", FORMATS_OF_FILES)
def test_the_header_names_layers_with_the_tensors_prefix_or_without(tmp_path, format, prefix, named):
    path = marked(tmp_path, format, {FULL: True})
    expected, _ = in_storages(read(path), {})
    dialects.with_settings_in_header(path, prefix, prefix if named == "with" else "")
    checkpoint = read(path)
    assert checkpoint.notes == [] and not checkpoint.undecided
    assert_same(expected, in_storages(checkpoint, {})[0], prefix)
    assert inspect_file(path).scales["full_precision"] == 2
    convert_file(path, tmp_path / "converted.safetensors", "as_file", rules_from())
    written = "" if prefix in UNKNOWN_PREFIXES else prefix  # ComfyUI loads no model with these
    assert_same(expected, load_file(tmp_path / "converted.safetensors"), written)


def test_the_name_without_the_prefix_wins_and_both_over_the_tensor(tmp_path):
    """As ComfyUI overwrites the one by the other (``convert_old_quants`` in comfy/utils.py)."""
    weights, biases = dialects.reference(("blocks.0.ffn.0",))
    path = dialects.in_format(tmp_path / "a.safetensors", weights, biases, "int8")
    tensors = {f"net.{name}": tensor for name, tensor in load_file(path).items()}
    one, other = ({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size} for size in (64, 16))
    for layers, group in (
        ({}, 64),
        ({"net.blocks.0.ffn.0": other}, 16),
        ({"blocks.0.ffn.0": one, "net.blocks.0.ffn.0": other}, 64),
    ):
        tensors["net.blocks.0.ffn.0.comfy_quant"] = dialects.comfy_quant_bytes(one)
        metadata = {"_quantization_metadata": json.dumps({"layers": layers})}
        checkpoint = read_checkpoint(tensors, metadata, path)
        assert checkpoint.weights["net.blocks.0.ffn.0.weight"].group == group
        assert bool(checkpoint.undecided) is bool(layers), "told where two differ"


def test_a_name_of_no_layer_is_told(tmp_path):
    path = dialects.with_settings_in_header(marked(tmp_path, "int8"), "net.", "another.")
    assert any(
        note.startswith("2 tensors: named in _quantization_metadata, but not in the file") for note in read(path).notes
    )


@pytest.mark.parametrize("format", [FP8, "int8"])
def test_full_precision_stays_with_a_weight_that_is_patched_and_stored_as_before(tmp_path, format):
    weight = read(marked(tmp_path, format, {FULL: True})).weights["blocks.0.ffn.0.weight"]
    patched = weight.with_values(weight.dequantize(torch.float32) + 1)
    settings = settings_in(tensors_in(patched, weight.storage))
    assert all(found[FULL] for found in settings.values()) and len(settings) == 1


def test_full_precision_of_fp8_does_not_say_that_int8_products_are_too_coarse(tmp_path):
    weight = read(marked(tmp_path, FP8, {FULL: True})).weights["blocks.0.ffn.0.weight"]
    (settings,) = settings_in(tensors_in(weight, "int8")).values()
    assert FULL not in settings
    (settings,) = settings_in(tensors_in(weight, "fp8_e5m2")).values()
    assert settings[FULL]


@pytest.mark.parametrize("format", [FP8, "int8", "nvfp4"])
def test_settings_without_a_format_are_read_where_the_data_show_it(tmp_path, format):
    """As in the official text encoder of MiniMax H3 (ComfyUI issue 15400), which ComfyUI cannot load."""
    path = marked(tmp_path, format)
    expected, tensors = in_storages(read(path), {})[0], load_file(path)
    for name in [name for name in tensors if name.endswith(".comfy_quant")]:
        said = json.loads(tensors[name].numpy().tobytes())
        tensors[name] = dialects.comfy_quant_bytes(
            {key: value for key, value in said.items() if key != "format"} | {FULL: False}
        )
    save_file(tensors, path)
    checkpoint = read(path)
    assert any("without a format, read as" in note for note in checkpoint.notes) and not checkpoint.undecided
    found = in_storages(checkpoint, {})[0]
    leaves = [name for name in expected if not name.endswith(".comfy_quant")]
    assert_same({name: expected[name] for name in leaves}, {name: found[name] for name in leaves})


@pytest.mark.parametrize("format", ["bf16", FP8, "int8", "mxfp8", "nvfp4"])
def test_settings_of_zero_bytes_say_nothing(tmp_path, format):
    """Of a layer that is not quantized they are a placeholder (ComfyUI issue 15400), of a quantized one damage (issue 15567): what stays certain is read."""
    if format == "bf16":
        weights, biases = dialects.reference()
        path = dialects.plain(tmp_path / "model.safetensors", weights, biases)
    else:
        path = marked(tmp_path, format)
    tensors = load_file(path)
    tensors |= {
        name.replace("weight", "comfy_quant"): torch.zeros(29, dtype=torch.uint8)
        for name in tensors
        if name.endswith(".weight")
    }
    save_file(tensors, path)
    if format == "nvfp4":
        with pytest.raises(CheckpointError, match="scale"):
            read(path)
        return
    checkpoint = read(path)
    assert any("2 tensors: comfy_quant of zero bytes" in note for note in checkpoint.notes)
    assert not any(name.endswith("comfy_quant") for name in checkpoint.weights)
    assert bool(checkpoint.undecided) is (format in ("int8", "mxfp8"))


def test_a_rotation_that_settings_without_a_format_do_not_name_is_left_open(tmp_path):
    path = marked(tmp_path, "int8")
    tensors = load_file(path)
    tensors |= {
        name: dialects.comfy_quant_bytes({"per_row": True}) for name in tensors if name.endswith(".comfy_quant")
    }
    save_file(tensors, path)
    assert len(read(path).undecided) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("format", ["int8", "int4", "nvfp4"])
def test_scales_are_held_in_fp32_whatever_dtype_a_tool_wrote_them_in(tmp_path, format, dtype):
    """CUDA kernels take no other, ComfyUI's general ones no fp64."""
    path = marked(tmp_path, format)
    tensors = load_file(path)
    scales = {
        name: tensor.to(dtype) for name, tensor in tensors.items() if "scale" in name and tensor.dtype == torch.float32
    }
    save_file(tensors | scales, path)
    weight = read(path).weights["blocks.0.ffn.0.weight"]
    assert {tensor.dtype for leaf, tensor in weight.tensors.items() if f"blocks.0.ffn.0.{leaf}" in scales} == {
        torch.float32
    }
    assert (
        torch.equal(
            weight.tensors["weight_scale"].float().flatten(),
            tensors["blocks.0.ffn.0.weight_scale"].to(dtype).float().flatten(),
        )
        or format == "nvfp4"
    )
