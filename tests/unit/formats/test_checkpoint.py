"""Every fp8 dialect: read from a genuine file, as accurate as the format allows, and out again in ComfyUI's format."""

import json
from functools import partial

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError, NonFiniteWeight
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.plain import ROW_SCALES
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.formats.stored_weight import StoredWeight
from support import dialects
from support.dialects import E4M3, E5M2
from support.measures import relative_error
from support.storing import in_storages, plan_of, tensors_in

LAYER = "blocks.0.ffn.0"
WEIGHT = f"{LAYER}.weight"
E4M3_FLOOR = 0.028
E5M2_FLOOR = 0.055


def read(path):
    file = open_checkpoint(path)
    return read_checkpoint(file, file.metadata, path)


def read_dict(tensors, metadata=None):
    return read_checkpoint(tensors, metadata or {}, "model.safetensors")


def stored(weight, storage):
    """What a weight is stored in when asked to be stored in ``storage``, and its tensors."""
    return plan_of(weight, storage), tensors_in(weight, storage)


def as_comfyui_reads(tensors, layer):
    """The weight that ComfyUI's ``_load_quantized_module`` makes of a state dict, dequantized."""
    weight = tensors[f"{layer}.weight"]
    if f"{layer}.comfy_quant" not in tensors:
        return weight.float()
    settings = json.loads(tensors[f"{layer}.comfy_quant"].numpy().tobytes())
    assert settings["format"] == str(weight.dtype).removeprefix("torch.")
    scale = tensors[f"{layer}.weight_scale"]
    assert (scale.dtype, scale.dim()) == (torch.float32, 0)
    return weight.float() * scale


def of_one_scale(writer, dialect, floor=E4M3_FLOOR, **options):
    """A writer, its dialect, how far its scales reach, error of reading, and error after re-storing in ComfyUI's format."""
    return partial(writer, **options), dialect, "tensor", floor, floor


def of_many_scales(writer, dialect, scaling, **options):
    return partial(writer, **options), dialect, scaling, E4M3_FLOOR, 0.04


DIALECTS = {
    "comfy_quant": of_one_scale(dialects.comfy_quant, "comfy_quant"),
    "comfy_quant e5m2": of_one_scale(dialects.comfy_quant, "comfy_quant", E5M2_FLOOR, dtype=E5M2),
    "metadata": of_one_scale(dialects.quantization_metadata, "_quantization_metadata"),
    "scaled_fp8": of_one_scale(dialects.scaled_fp8, "scaled_fp8"),
    "scaled_fp8 e5m2": of_one_scale(dialects.scaled_fp8, "scaled_fp8", E5M2_FLOOR, dtype=E5M2),
    "scaled_fp8 fp32 marker": of_one_scale(dialects.scaled_fp8, "scaled_fp8", marker=torch.zeros(1)),
    "modelopt": of_one_scale(dialects.modelopt, "weight_scale"),
    "modelopt bf16 scale": of_one_scale(dialects.modelopt, "weight_scale", scale_dtype=torch.bfloat16),
    "modelopt fp64 scale": of_one_scale(dialects.modelopt, "weight_scale", scale_dtype=torch.float64),
    "e4m3fnuz": of_one_scale(dialects.modelopt, "weight_scale", dtype=torch.float8_e4m3fnuz),
    "e5m2fnuz": of_one_scale(dialects.modelopt, "weight_scale", E5M2_FLOOR, dtype=torch.float8_e5m2fnuz),
    "row (N, 1)": of_many_scales(dialects.row_wise, "weight_scale", "row"),
    "row (N,)": of_many_scales(dialects.row_wise, "weight_scale", "row", scale_dtype=torch.float32, flat=True),
    "block 128x128": of_many_scales(dialects.block_wise, "weight_scale_inv", "block"),
    "block as scale": of_many_scales(dialects.block_wise, "scale", "block", scale_name="scale"),
    "group 1x128": of_many_scales(dialects.block_wise, "weight_scale", "block", scale_name="weight_scale", rows=1),
    "unscaled": (partial(dialects.plain, dtype=E4M3), "unscaled fp8", "", 0.04, 0.04),
    "unscaled e5m2": (partial(dialects.plain, dtype=E5M2), "unscaled fp8", "", E5M2_FLOOR, E5M2_FLOOR),
}


@pytest.fixture(params=DIALECTS, ids=list(DIALECTS))
def dialect(request, tmp_path):
    weights, biases = dialects.reference()
    writer, *expected = DIALECTS[request.param]
    return read(writer(tmp_path / "model.safetensors", weights, biases)), weights, biases, expected


def test_reads_every_dialect_at_the_formats_floor(dialect):
    checkpoint, weights, biases, (name, scaling, floor, _) = dialect
    assert checkpoint.dialects == (name,)
    assert set(checkpoint.weights) == {f"{layer}.{leaf}" for layer in weights for leaf in ("weight", "bias")}
    for layer, weight in weights.items():
        stored = checkpoint.weights[f"{layer}.weight"]
        assert stored.format.scaling == scaling
        assert [*stored.tensors] == (["weight_scale"] if scaling else [])
        assert all(tensor.dtype == torch.float32 for tensor in stored.tensors.values())
        assert relative_error(weight, stored.dequantize(torch.float32)) < floor
        assert torch.equal(checkpoint.weights[f"{layer}.bias"].data, biases[layer])


def test_gives_comfyuis_format_from_every_dialect(dialect):
    checkpoint, weights, biases, (_, scaling, _, floor) = dialect
    tensors, notes = in_storages(checkpoint, dict.fromkeys(weights, "as_file"))
    told = [name for name, reason in notes if "a single scale in place of the file's many costs an error of" in reason]
    assert (
        told
        == [name for name, _ in notes]
        == ([f"{layer}.weight" for layer in weights] if scaling in ("row", "block") else [])
    )
    for layer, weight in weights.items():
        assert f"{layer}.comfy_quant" in tensors
        assert relative_error(weight, as_comfyui_reads(tensors, layer)) < floor
        assert torch.equal(tensors[f"{layer}.bias"], biases[layer])


def test_dequantizes_every_dialect(dialect):
    checkpoint, weights, _, (_, _, floor, _) = dialect
    tensors, _ = in_storages(checkpoint, dict.fromkeys(weights, "bf16"))
    assert set(tensors) == set(checkpoint.weights)
    for layer, weight in weights.items():
        assert tensors[f"{layer}.weight"].dtype == torch.bfloat16
        assert relative_error(weight, tensors[f"{layer}.weight"]) < floor + 0.001


def test_one_scale_and_the_same_fp8_passes_through_byte_for_byte(tmp_path):
    weights, biases = dialects.reference()
    path = dialects.scaled_fp8(tmp_path / "a.safetensors", weights, biases, input_scale=0.25)
    file = open_checkpoint(path)
    tensors, _ = in_storages(read(path), dict.fromkeys(weights, "fp8_e4m3fn"))
    assert torch.equal(tensors[WEIGHT].view(torch.uint8), file[WEIGHT].view(torch.uint8))
    assert torch.equal(tensors[f"{LAYER}.weight_scale"], file[f"{LAYER}.scale_weight"])
    assert tensors[f"{LAYER}.input_scale"].item() == 0.25


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "text_encoders.t5xxl.transformer."])
@pytest.mark.parametrize("full", [False, True])
def test_legacy_marker_has_a_prefix_and_asks_for_full_precision(tmp_path, prefix, full):
    weights, biases = dialects.reference()
    marker = torch.zeros(2 if full else 0, dtype=E4M3)
    path = dialects.scaled_fp8(tmp_path / "a.safetensors", weights, biases, marker=marker, prefix=prefix)
    checkpoint = read(path)
    assert not any("scaled_fp8" in name for name in checkpoint.weights)
    assert checkpoint.weights[prefix + WEIGHT].full_precision is full
    tensors, _ = in_storages(checkpoint, {})
    settings = json.loads(tensors[f"{prefix}{LAYER}.comfy_quant"].numpy().tobytes())
    assert settings == {"format": "float8_e4m3fn"} | ({"full_precision_matrix_mult": True} if full else {})


@pytest.mark.parametrize("prefixes", [("a.", "b."), ("", "b."), ("b.", "")])
def test_markers_of_two_parts_do_not_mix(prefixes):
    weights, _ = dialects.reference((LAYER,))
    data, scale = dialects.per_tensor(weights[LAYER])
    tensors = {}
    for prefix, size in zip(prefixes, (2, 0), strict=True):
        tensors |= {f"{prefix}scaled_fp8": torch.zeros(size, dtype=E4M3)}
        tensors |= {f"{prefix}{WEIGHT}": data, f"{prefix}{LAYER}.scale_weight": scale}
    checkpoint = read_dict(tensors)
    assert [checkpoint.weights[f"{prefix}{WEIGHT}"].full_precision for prefix in prefixes] == [True, False]


def test_legacy_input_scale_of_one_means_none(tmp_path):
    weights, biases = dialects.reference()
    path = dialects.scaled_fp8(tmp_path / "a.safetensors", weights, biases, input_scale=1.0)
    assert read(path).weights[WEIGHT].input_scale is None


def test_legacy_e5m2_is_named_in_the_notes(tmp_path):
    weights, biases = dialects.reference()
    notes = read(dialects.scaled_fp8(tmp_path / "a.safetensors", weights, biases, dtype=E5M2)).notes
    assert any("e5m2" in note and note.startswith("2 tensors") for note in notes)


def test_header_metadata_is_consumed_and_full_precision_kept(tmp_path):
    weights, biases = dialects.reference()
    settings = {"full_precision_matrix_mult": True}
    checkpoint = read(dialects.quantization_metadata(tmp_path / "a.safetensors", weights, biases, settings))
    assert checkpoint.metadata == {}
    assert checkpoint.weights[WEIGHT].full_precision


def test_wrong_declared_format_yields_to_the_data(tmp_path):
    weights, biases = dialects.reference()
    path = dialects.comfy_quant(tmp_path / "a.safetensors", weights, biases, E5M2, {"format": "float8_e4m3fn"})
    checkpoint = read(path)
    assert any("float8_e4m3fn" in note for note in checkpoint.notes)
    tensors, _ = in_storages(checkpoint, {})
    assert relative_error(weights[LAYER], as_comfyui_reads(tensors, LAYER)) < E5M2_FLOOR


def test_sixteen_bit_weight_with_a_legacy_scale():
    weight = dialects.reference()[0][LAYER]
    one, half = (
        read_dict({WEIGHT: weight, f"{LAYER}.scale_weight": torch.tensor(scale)}).weights for scale in (1.0, 0.5)
    )
    assert list(one) == list(half) == [WEIGHT]
    assert torch.equal(one[WEIGHT].dequantize(torch.float32), weight.float())
    assert torch.equal(half[WEIGHT].dequantize(torch.float32), weight.float() / 2)
    assert torch.equal(stored(half[WEIGHT], "as_file")[1][WEIGHT], weight / 2)


def test_comfyuis_own_formats_pass_untouched_and_are_unpacked_where_asked(tmp_path):
    layers = tuple(f"blocks.{number}.fc" for number in range(len(dialects.NATIVE)))
    weights, biases = dialects.reference(layers)
    path = dialects.native(tmp_path / "a.safetensors", weights, biases)
    file, checkpoint = open_checkpoint(path), read(path)
    assert [checkpoint.weights[f"{layer}.weight"].storage for layer in layers] == list(dialects.NATIVE)
    tensors, notes = in_storages(checkpoint, dict.fromkeys(layers, "as_file"))
    assert notes == [] and set(tensors) == set(file)
    for name, tensor in file.items():
        assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    unpacked = [layer for layer in layers if checkpoint.weights[f"{layer}.weight"].format.unpacks]
    tensors, notes = in_storages(checkpoint, dict.fromkeys(unpacked, "bf16"))
    assert notes == [] and all(relative_error(weights[layer], tensors[f"{layer}.weight"]) < 0.25 for layer in unpacked)


def test_int8_with_a_scale_and_no_format_is_dequantized():
    data = torch.randint(-127, 128, (8, 16), dtype=torch.int8)
    scale = torch.rand(8, 1) + 0.1
    checkpoint = read_dict({WEIGHT: data, f"{LAYER}.weight_scale": scale, "ids": torch.zeros(3, dtype=torch.int8)})
    tensors, _ = in_storages(checkpoint, {})
    assert torch.equal(tensors[WEIGHT], (data * scale).bfloat16())
    assert tensors["ids"].dtype == torch.int8


def test_vllm_cache_and_output_scales_are_left_out_with_a_note(tmp_path):
    weights, biases = dialects.reference()
    notes = read(dialects.modelopt(tmp_path / "a.safetensors", weights, biases)).notes
    assert any("4 tensors: attention cache" in note for note in notes)


@pytest.mark.parametrize(
    "name",
    ["scale_shift_table", "layer_scale", "norm.scale", "query_norm.scale", "logit_scale", "attn.q_scale", "ffn.scale"],
)
def test_parameters_with_scale_in_their_name_are_no_scales(tmp_path, name):
    weights, biases = dialects.reference()
    checkpoint = read(dialects.comfy_quant(tmp_path / "a.safetensors", weights, biases | {}))
    tensors = {**open_checkpoint(checkpoint.path), f"blocks.0.{name}": torch.ones(64), name: torch.ones(64)}
    checkpoint = read_dict(tensors)
    assert f"blocks.0.{name}" in checkpoint.weights and name in checkpoint.weights
    assert checkpoint.notes == []


@pytest.mark.parametrize("leaf", ["weight_scale_3", "activation_scale", "weight_scales", "scale_out"])
def test_an_unknown_scale_next_to_fp8_is_an_error(tmp_path, leaf):
    weights, biases = dialects.reference()
    tensors = dict(open_checkpoint(dialects.modelopt(tmp_path / "a.safetensors", weights, biases)))
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.{leaf}"):
        read_dict(tensors | {f"{LAYER}.{leaf}": torch.ones(256)})


def test_scales_without_their_weight_and_unlabelled_nvfp4_are_errors():
    with pytest.raises(CheckpointError, match="weight_scale"):
        read_dict({f"{LAYER}.weight_scale": torch.tensor(1.0)})
    packed = {WEIGHT: torch.zeros(8, 8, dtype=torch.uint8), f"{LAYER}.weight_scale": torch.ones(8, 1).to(E4M3)}
    with pytest.raises(CheckpointError, match="weight_scale"):
        read_dict(packed)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1j])
@pytest.mark.parametrize("leaf", ["weight_scale", "scale_weight", "input_scale"])
def test_a_scale_that_is_no_positive_number_is_an_error(value, leaf):
    with pytest.raises(NonFiniteWeight, match=leaf):
        read_dict({WEIGHT: torch.zeros(8, 8).to(E4M3), f"{LAYER}.{leaf}": torch.tensor(value)})


@pytest.mark.parametrize(
    "storage", [*(name for name, row in FORMAT_OF_STORAGE.items() if row.can_write), "fp16", "bf16"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_inf_in_a_converted_weight_is_an_error(storage, value):
    data = torch.zeros(8, 64)
    data[3, 3] = value
    with pytest.raises(NonFiniteWeight, match=WEIGHT):
        stored(StoredWeight(WEIGHT, data), storage)


def test_nan_in_a_row_scaled_weight_is_an_error():
    data = torch.full((8, 8), 0x7F, dtype=torch.uint8).view(E4M3)
    weight = StoredWeight(WEIGHT, data, ROW_SCALES, {"weight_scale": torch.ones(8, 1)})
    for storage in ("as_file", "bf16"):
        with pytest.raises(NonFiniteWeight):
            stored(weight, storage)


@pytest.mark.parametrize("storage", ["as_file", "fp8_e4m3fn", "fp8_e5m2"])
def test_rows_too_far_apart_for_one_scale_stay_in_bf16_with_a_note(storage):
    spread = {"fp8_e5m2": 2.0**-36}.get(storage, 2.0**-18)
    weight = torch.randn(64, 128) * torch.tensor([1.0, spread]).repeat(32)[:, None]
    data, scale = dialects.per_row(weight)
    plan, tensors = stored(StoredWeight(WEIGHT, data, ROW_SCALES, {"weight_scale": scale}), storage)
    assert plan.storage == "bf16" and "64" in plan.note
    rows = zip(weight, tensors[WEIGHT], strict=True)
    assert max(relative_error(row, found) for row, found in rows) < 0.04


def test_fp16_keeps_what_passes_its_range_in_bf16():
    data = torch.ones(8, 8, dtype=torch.bfloat16)
    data[0, 0] = 70000
    plan, tensors = stored(StoredWeight(WEIGHT, data), "fp16")
    assert plan.storage == "bf16" and "65504" in plan.note
    assert torch.equal(tensors[WEIGHT], data)


@pytest.mark.parametrize("name, shape", [("conv.weight", (4, 4, 3, 3)), ("norm.weight", (16,)), ("table", (4, 4))])
def test_fp8_that_comfyui_cannot_hold_becomes_bf16_exactly(name, shape):
    data = torch.randn(shape).to(E4M3)
    plan, tensors = stored(StoredWeight(name, data), "as_file")
    assert list(tensors) == [name] and plan.note
    assert torch.equal(tensors[name].float(), data.float())


@pytest.mark.parametrize(
    "name, tool",
    [
        ("a.qweight", "GPTQ"),
        ("a.wscales", "Nunchaku"),
        ("a.weight.absmax", "bitsandbytes"),
        ("a.weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("a.SCB", "bitsandbytes"),
        ("a.weight_packed", "compressed-tensors"),
        ("a.weight._data", "quanto"),
        ("a.svd_up", "SDNQ"),
        ("a.float8_data", "flux-fp8-api"),
    ],
)
def test_other_tools_formats_are_named(name, tool):
    with pytest.raises(CheckpointError, match=tool):
        read_dict({"a.qweight" if tool == "Nunchaku" else "b.weight": torch.zeros(2), name: torch.zeros(2)})


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b'{"form": 1}', b"[" * 5000])
def test_broken_comfy_quant_is_an_error(text):
    with pytest.raises(CheckpointError, match=LAYER):
        read_dict(
            {WEIGHT: torch.zeros(2, 2).to(E4M3), f"{LAYER}.comfy_quant": torch.tensor(list(text), dtype=torch.uint8)}
        )


def test_comfy_quant_that_contradicts_the_data_is_an_error():
    marker = dialects.comfy_quant_bytes({"format": "float8_e4m3fn"})
    with pytest.raises(CheckpointError, match="bf16"):
        read_dict(
            {
                WEIGHT: torch.zeros(2, 2).bfloat16(),
                f"{LAYER}.weight_scale": torch.ones(()),
                f"{LAYER}.comfy_quant": marker,
            }
        )
    with pytest.raises(CheckpointError, match="not in the file"):
        read_dict({f"{LAYER}.comfy_quant": marker})


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"layers": []}', '{"layers": {"a": 1}}'])
def test_broken_header_metadata_is_an_error(text):
    with pytest.raises(CheckpointError):
        read_dict({WEIGHT: torch.zeros(2, 2)}, {"_quantization_metadata": text})


@pytest.mark.parametrize("shape", [(192, 960), (130, 257), (1, 300), (128, 128), (300, 1)])
def test_blocks_of_128_with_short_last_blocks(shape):
    weight = torch.randn(shape)
    data, scale = dialects.per_block(weight)
    stored = read_dict({WEIGHT: data, f"{LAYER}.weight_scale_inv": scale}).weights[WEIGHT]
    of_each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    half_a_step = torch.maximum(weight.abs() * 2**-4, of_each * 2**-10) * (
        1 + 1e-6
    )  # of E4M3's 3 bits, and of its subnormals
    assert ((weight - stored.dequantize(torch.float32)).abs() <= half_a_step).all()


def test_parts_cover_a_weight_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr("halfsafe.precision.formats.stored_weight.CHUNK", 1000)
    weight = torch.randn(300, 257)
    for quantize in (dialects.per_tensor, dialects.per_row, dialects.per_block):
        data, scale = quantize(weight)
        stored = read_dict({WEIGHT: data, f"{LAYER}.weight_scale": scale}).weights[WEIGHT]
        assert sum(part.numel() for _, part in stored.parts()) == weight.numel()
        assert max(part.numel() for _, part in stored.parts()) <= 1000
        assert relative_error(weight, stored.dequantize(torch.float32)) < E4M3_FLOOR
