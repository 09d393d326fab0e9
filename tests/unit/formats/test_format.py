"""ComfyUI's own quantization formats: read, unpacked as comfy-kitchen does, refused in words, and written."""

import json
from dataclasses import replace

import pytest
import torch
from halfsafe.precision.base.dtypes import FP8_NAMES, QUANTIZED_NAMES
from halfsafe.precision.base.errors import CheckpointError, NonFiniteWeight, StorageNotHeld
from halfsafe.precision.base.modes import FP8, INT8
from halfsafe.precision.base.options import COMPUTE_OPTIONS, STORAGE_OPTIONS
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats import format as format_module
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE, FORMATS, format_of, fp8_dtypes
from halfsafe.precision.plan.auto import auto_storage
from halfsafe.precision.plan.compute import WEIGHTS_FOR, plan_compute
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.layers import LoadTarget, plan_weights
from halfsafe.precision.plan.rules import Rules
from halfsafe.precision.report.view import STORAGE_COLOURS
from safetensors.torch import save_file
from support import dialects
from support.measures import relative_error
from support.storing import normal_weight

layouts = pytest.importorskip("comfy_kitchen.tensor")
LAYER = "blocks.0.ffn.0"
NAME = f"{LAYER}.weight"
HERE = [name for name in dialects.NATIVE if FORMAT_OF_STORAGE[name].unpacks]
"""The formats that the installed comfy-kitchen unpacks; ``test_w4a8.py`` runs this file with a newer one."""
WRITTEN = [name for name, row in FORMAT_OF_STORAGE.items() if row.can_write]
CALIBRATED = [name for name in WRITTEN if FORMAT_OF_STORAGE[name].calibrates]
ERRORS = {"int8": 0.012, "mxfp8": 0.04, "nvfp4": 0.12, "int4": 0.22, "w4a8": 0.13, "w6a8": 0.03, "awq4": 0.12}
"""What a normal weight loses in each format: these writers round to nearest, with no search for scales."""
MULTIPLES = {"nvfp4": 16, "mxfp8": 32}
every_format = pytest.mark.parametrize("name", dialects.NATIVE)
unpacked = pytest.mark.parametrize("name", HERE)
padding = pytest.mark.parametrize("name", MULTIPLES)


def read(tensors, **more):
    return read_checkpoint({f"{LAYER}.{leaf}": tensor for leaf, tensor in (tensors | more).items()}, {}, "m").weights[
        NAME
    ]


def in_format(name, shape=(256, 384)):
    return dialects.NATIVE[name](normal_weight(shape))


# the table


def test_every_format_has_names_a_colour_and_a_writer_in_the_tests():
    assert all(row.name == name for name, row in FORMATS.items())
    assert all(row.storage == storage for storage, row in FORMAT_OF_STORAGE.items())
    assert all(format_of(row.name, row.bits * 4, 32) is row for row in FORMAT_OF_STORAGE.values())
    assert {*dialects.NATIVE, *FP8_NAMES} == set(FORMAT_OF_STORAGE)
    assert set(FORMAT_OF_STORAGE) | {"fp16", "bf16", "fp32"} == set(STORAGE_COLOURS)
    assert len(set(STORAGE_COLOURS.values())) == len(STORAGE_COLOURS)


def test_what_can_be_made_is_an_option_and_a_format():
    assert QUANTIZED_NAMES == ("fp8_e4m3fn", "fp8_e5m2", "int8", "w6a8", "w4a8", "nvfp4", "mxfp8")
    assert (
        {row.storage for row in FORMAT_OF_STORAGE.values() if row.writes} == set(QUANTIZED_NAMES) <= {*STORAGE_OPTIONS}
    )
    assert WEIGHTS_FOR == {"fp8": FP8_NAMES, "int8": ("int8", "w6a8", "w4a8")} and set(WEIGHTS_FOR) <= set(
        COMPUTE_OPTIONS
    )
    assert {row.mode for row in FORMAT_OF_STORAGE.values()} == {FP8, INT8, None}


@pytest.mark.parametrize("row", FORMAT_OF_STORAGE.values(), ids=FORMAT_OF_STORAGE)
def test_devices_and_plans_follow_the_table(row):
    """Files that need fp8 are unpacked on a device without it, and a dtype that is asked for unpacks what multiplies
    quantized operands."""
    apple = detect(profile="mps_m1")
    storage, reason = auto_storage(
        replace(apple, capabilities={**apple.capabilities, "fp8_storage": False}), 1 << 30, row.storage, None
    )
    assert (storage == "as_file") == (not fp8_dtypes(row.storage)) and row.storage in reason
    assert bool(fp8_dtypes(row.storage)) == ("float8" in str((row.dtypes, row.byte_scale)))
    facts = ModelFacts([LayerSpec("layer", "Linear", (64, 64))], 64 * 64, "bf16", ("fp16", "bf16", "fp32"))
    found = plan_compute(facts, detect(profile="sm_80"), "bf16", Rules(), {"layer": row.storage}).decisions
    assert ("layer" in found) == (row.quantizes_operands and row.mode is not FP8)


# reading


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


@pytest.mark.parametrize("shape", [(256, 384), (160, 320)])
@pytest.mark.parametrize("name", ["int8", "int4", "nvfp4", "mxfp8"])
def test_what_comfy_kitchen_quantized_is_unpacked_as_it_does(name, shape):
    tensors, expected = by_kitchen(name, normal_weight(shape))
    stored = read(tensors)
    assert stored.storage == name and stored.shape == shape
    assert relative_error(expected, stored.dequantize(torch.float32)) < 2e-7


@pytest.mark.parametrize("shape", [(256, 384), (48, 128), (130, 320)])
@unpacked
def test_values_are_the_weight_they_were_made_of_whatever_the_parts(monkeypatch, name, shape):
    stored = read(in_format(name, shape))
    whole = stored.dequantize(torch.float32)
    assert stored.shape == shape and relative_error(normal_weight(shape), whole) < ERRORS[name]
    assert whole.abs().max() <= stored.bound()
    monkeypatch.setattr("halfsafe.precision.formats.stored_weight.CHUNK", 5 * 384)
    assert torch.allclose(stored.dequantize(torch.float32), whole, atol=1e-7)


@pytest.mark.parametrize("storage", ["bf16", "fp8_e4m3fn", "int8"])
@unpacked
def test_conversion_between_formats(tmp_path, name, storage):
    source = dialects.in_format(tmp_path / "in.safetensors", *dialects.reference(), name)
    summary = convert_file(source, tmp_path / "out.safetensors", storage, Rules())
    assert summary.weights[storage] in (2, 4) and not inspect_file(tmp_path / "out.safetensors", values=True).problems
    before, after = (
        read_checkpoint(file, file.metadata, "m").weights
        for file in map(open_checkpoint, (source, tmp_path / "out.safetensors"))
    )
    cost = {"bf16": 0.002, "fp8_e4m3fn": 0.03, "int8": 0.012 if name != "int8" else 0}[storage]
    for key, weight in before.items():
        assert relative_error(weight.dequantize(torch.float32), after[key].dequantize(torch.float32)) <= cost


@every_format
def test_an_unchanged_file_keeps_every_byte_and_is_inspected_and_scanned(tmp_path, name):
    source = dialects.in_format(tmp_path / "in.safetensors", *dialects.reference(), name)
    convert_file(source, tmp_path / "out.safetensors", "as_file", Rules())
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out.safetensors")
    assert set(before) == set(after)
    assert all(
        before[key].reshape(-1).view(torch.uint8).tolist() == after[key].reshape(-1).view(torch.uint8).tolist()
        for key in before
    )
    found, row = inspect_file(source), FORMAT_OF_STORAGE[name]
    assert found.scales == {name: 2} and found.parameters == 2 * (256 * 384 + 256)
    assert not found.problems and not inspect_file(source, values=True).problems
    assert any(row.title in line and row.since in line for line in found.in_comfyui)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int4", "w4a8", "w6a8", "awq4"])
def test_a_format_that_comfy_kitchen_lacks_stays_or_is_refused_by_name(tmp_path, monkeypatch, name):
    monkeypatch.setattr(format_module, "kitchen_function", lambda name: None)
    row = FORMAT_OF_STORAGE[name]
    source = dialects.in_format(tmp_path / "in.safetensors", *dialects.reference(), name)
    refused = rf"in\.safetensors: tensor '{LAYER}\.weight'.*cannot unpack.*ComfyUI {row.since}"
    with pytest.raises(CheckpointError, match=refused):
        convert_file(source, tmp_path / "out.safetensors", "bf16", Rules())
    file = open_checkpoint(source)
    with pytest.raises(CheckpointError, match=refused):
        plan_weights(
            read_checkpoint(file, {}, source).weights, {}, source, LoadTarget(detect(profile="cpu"), formats=())
        )
    with pytest.raises(StorageNotHeld, match=rf"comfy-kitchen of ComfyUI {row.since}"):
        read(in_format(name)).dequantize(torch.float32)


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


@pytest.mark.parametrize(("scale", "shape"), [(torch.full((1,), 0.5), ()), (torch.full((256,), 0.5), (256, 1))])
def test_int8_scales_of_every_shape_become_what_comfyui_multiplies_by(scale, shape):
    codes = torch.randint(-127, 128, (256, 64), dtype=torch.int8)
    stored = read(
        {
            "weight": codes,
            "weight_scale": scale,
            "comfy_quant": dialects.comfy_quant_bytes({"format": "int8_tensorwise"}),
        }
    )
    assert stored.auxiliary[f"{LAYER}.weight_scale"].shape == shape
    assert torch.equal(stored.dequantize(torch.float32), codes * 0.5)


def test_smoothing_of_nvfp4_inputs_is_part_of_the_weight():
    tensors, smoothing = in_format("nvfp4"), torch.linspace(0.5, 2, 384)
    plain = read(tensors).dequantize(torch.float32)
    assert torch.allclose(read(tensors, pre_quant_scale=smoothing).dequantize(torch.float32), plain * smoothing)


@pytest.mark.parametrize("name", [*HERE, "fp8_e4m3fn"])
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


# refusals


@every_format
def test_a_missing_or_misshapen_scale_is_an_error_that_names_it(name):
    for leaf in [
        leaf
        for leaf in in_format(name)
        if ("scale" in leaf or "_s_" in leaf or "zeros" in leaf) and leaf != "input_scale"
    ]:
        tensors = in_format(name)
        with pytest.raises(CheckpointError, match=leaf):
            read(tensors | {leaf: tensors[leaf].reshape(-1)[:1].expand(3).clone()})
        del tensors[leaf]
        with pytest.raises(CheckpointError, match=leaf):
            read(tensors)


@every_format
@pytest.mark.parametrize("value", [float("nan"), -1.0, 1j])
def test_a_scale_that_is_no_number_is_an_error(name, value):
    if name == "awq4" and value == -1:
        return  # AWQ's scales have a sign
    leaf = {"nvfp4": "weight_scale_2", "w4a8": "weight_s_channel", "w6a8": "weight_s_channel"}.get(name, "weight_scale")
    tensors = in_format(name)
    like = (
        {"fill_value": value}
        if value == 1j
        else {"fill_value": 255 if name == "mxfp8" else value, "dtype": tensors[leaf].dtype}
    )
    tensors[leaf] = torch.full(tensors[leaf].shape, **like)
    with pytest.raises(NonFiniteWeight, match=leaf):
        read(tensors)


def test_a_scale_that_the_format_has_no_use_for_is_an_error():
    with pytest.raises(CheckpointError, match="weight_scale_2"):
        read(in_format("int8"), weight_scale_2=torch.tensor(1.0))


@pytest.mark.parametrize(
    "settings", [{"format": "svdquant_w4a4"}, {"format": "x" * 500}, {"format": "float8_x", "num_experts": 1}]
)
def test_an_unknown_format_is_refused_without_an_update_that_may_not_help(settings):
    tensors = in_format("int8") | {"comfy_quant": dialects.comfy_quant_bytes(settings)}
    with pytest.raises(CheckpointError, match=r"neither ComfyUI up to.*nodes that its publisher names") as raised:
        read(tensors)
    assert "Update" not in str(raised.value)


# padding: zeros after a layer's rows and columns, up to the format's multiple, as ComfyUI stores nvfp4 and mxfp8


def padded(name, weight):
    rows, columns = (-(-size // MULTIPLES[name]) * MULTIPLES[name] for size in weight.shape)
    whole = torch.zeros(rows, columns)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    return {f"{LAYER}.{leaf}": tensor for leaf, tensor in dialects.NATIVE[name](whole).items()}


def converted(folder, tensors, storage="bf16"):
    save_file(tensors, folder / "in.safetensors")
    summary = convert_file(folder / "in.safetensors", folder / "out.safetensors", storage, Rules())
    return open_checkpoint(folder / "out.safetensors"), summary


@padding
@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_rows_that_were_padded_are_not_written(tmp_path, name, storage):
    weight = normal_weight((130, 768))
    out, _ = converted(tmp_path, padded(name, weight) | {f"{LAYER}.bias": torch.zeros(130)}, storage)
    stored = read_checkpoint(out, out.metadata, "out").weights[NAME]
    assert stored.shape == (130, 768) and stored.storage == storage
    assert relative_error(weight, stored.dequantize(torch.float32)) < ERRORS[name] + 0.03


@padding
@pytest.mark.parametrize(("shape", "bias", "what"), [((130, 768), False, "rows"), ((160, 760), True, "columns")])
def test_a_shape_that_the_file_does_not_tell_is_not_guessed(tmp_path, name, shape, bias, what):
    tensors = padded(name, normal_weight(shape)) | ({f"{LAYER}.bias": torch.zeros(shape[0])} if bias else {})
    out, summary = converted(tmp_path, tensors)
    assert torch.equal(out[NAME].view(torch.uint8), tensors[NAME].view(torch.uint8))
    assert any(f"{NAME}: kept in {name}: its last {what} are zero" in note for note in summary.notes)
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.weight.*in {name}, its last {what} are zero"):
        plan_weights(read_checkpoint(tensors, {}, "m").weights, {}, "m", LoadTarget(detect(profile="cpu"), formats=()))


@padding
def test_a_layer_without_padding_is_converted_without_a_bias(tmp_path, name):
    out, summary = converted(tmp_path, padded(name, normal_weight((160, 768))))
    assert out[NAME].shape == (160, 768) and summary.notes == []


# writing


def made_in(storage, rows):
    """The format of a storage, and all tensors of a weight of these rows."""
    row = FORMAT_OF_STORAGE[storage]
    shared = row.scale_for(rows.abs().max().item()) if row.by_largest else row.shared([rows])
    return row, {**row.encode(rows, shared), **shared}


@pytest.mark.parametrize("storage", CALIBRATED)
def test_nearest_numbers_are_those_of_the_codes_whatever_the_order_of_columns(storage):
    weight = normal_weight((48, 320))
    row, params = made_in(storage, weight)
    turned = row.turned(weight)
    numbers = row.nearest(turned, params)
    settings = dialects.comfy_quant_bytes({"format": row.name} | row.settings(320))
    nearest, coded = (
        read(params | {"weight": data}, comfy_quant=settings).dequantize(torch.float32)
        for data in (params["weight"], row.codes(numbers, params))
    )
    assert torch.equal(nearest, coded)
    order = torch.randperm(320, generator=torch.Generator().manual_seed(0))
    for at in (order[:1], order[:7], order):
        assert torch.equal(row.nearest(turned[:, at], params, at.tolist()), numbers[:, at])
    for shift in (0.6, -1.7):
        other = row.nearest(turned + shift * turned.std(), params)
        assert ((turned - other).abs() >= (turned - numbers).abs() - 1e-7).all(), "a code stands for a nearer number"


@pytest.mark.parametrize("storage", WRITTEN)
def test_written_tensors_are_those_that_were_announced_and_read_as_the_numbers(storage):
    weight = normal_weight((160, 512))
    row, made = made_in(storage, weight)
    assert {leaf: (tuple(tensor.shape), tensor.dtype) for leaf, tensor in made.items()} == row.specs(160, 512)
    settings = dialects.comfy_quant_bytes({"format": row.name} | row.settings(512))
    stored = read(made, comfy_quant=settings)
    assert stored.storage == storage and stored.shape == (160, 512)
    if row.calibrates:
        values = row.turned(row.nearest(row.turned(weight), made))
        assert relative_error(values, stored.dequantize(torch.float32)) < 2e-7
