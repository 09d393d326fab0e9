"""Files whose parts do not fit each other: scales that are elsewhere, marks beside a header's table, tables of shards; other names of formats."""

import json
import math

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import JOINED, SCALES_ELSEWHERE, WITHOUT_SCALES, read_checkpoint
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import dialects
from support.measures import relative_error

E4M3, E5M2 = dialects.E4M3, dialects.E5M2
FNUZ = torch.float8_e4m3fnuz
TABLE = "_quantization_metadata"
LAYERS = tuple(f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("q", "ffn"))


def read(path):
    file = open_checkpoint(path)
    return read_checkpoint(file, file.metadata, path)


def error_of(path, weights):
    checkpoint = read(path)
    each = [(weight, checkpoint.weights[f"{layer}.weight"]) for layer, weight in weights.items()]
    return max(relative_error(weight.float(), found.dequantize(torch.float32)) for weight, found in each)


# fp8 whose scales are not in the file


def scaled(weight, how, dtype):
    """fp8 numbers of a weight over its scales, without those."""
    if how == "tensor":
        return dialects.per_tensor(weight, dtype)[0]
    if how == "rows":
        return dialects.per_row(weight, dtype)[0]
    if how == "blocks":
        return dialects.per_block(weight, 64, 64, dtype)[0]
    if how == "mxfp8":
        return dialects.NATIVE["mxfp8"](weight.float())["weight"]
    largest = weight.float().abs().max()  # a power of two leaves the largest code out
    scale = 2.0 ** math.ceil(math.log2(largest / torch.finfo(dtype).max))
    return (weight.float() / scale).to(dtype)


def bare(path, make, name="weight", rows=1.0, layers=LAYERS):
    weights, biases = dialects.reference(layers, (128, 256))
    factors = torch.logspace(0, math.log10(rows), 128)[:, None]
    return dialects.save(path, {f"{layer}.{name}": make(w * factors) for layer, w in weights.items()}, biases)


@pytest.mark.parametrize("rows", [1.0, 50.0, 1e4], ids=["like rows", "rows of other sizes", "rows far apart"])
@pytest.mark.parametrize(
    ("how", "dtype"),
    [("tensor", E4M3), ("tensor", E5M2), ("tensor", FNUZ), ("power of two", E4M3), ("rows", E4M3), ("blocks", E4M3), ("mxfp8", E4M3)],
)  # fmt: skip
def test_fp8_that_was_scaled_and_has_no_scales_is_told(tmp_path, how, dtype, rows):
    path = bare(tmp_path / "a.safetensors", lambda weight: scaled(weight, how, dtype), rows=rows)
    checkpoint = read(path)
    assert any(SCALES_ELSEWHERE in note for note in checkpoint.notes), checkpoint.notes
    assert checkpoint.dialects == (WITHOUT_SCALES,)
    for values in (False, True):
        problems = inspect_file(path, values).problems
        assert [problem["text"] for problem in problems] == [SCALES_ELSEWHERE] * len(LAYERS)


def with_outlier(weight):
    weight = weight.clone()
    weight[0, 0] = 1000.0
    return dialects._cast(weight.float(), E4M3)


PLAIN = {
    "a cast": lambda weight: dialects._cast(weight.float(), E4M3),
    "e5m2": lambda weight: dialects._cast(weight.float(), E5M2),
    "an outlier that is clamped in each": with_outlier,
    "unit variance": lambda weight: dialects._cast(weight.float() * 50, E4M3),
    "zeros": lambda weight: torch.zeros_like(weight).to(E4M3),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_cast_to_fp8_is_read_without_a_word(tmp_path, kind):
    path = bare(tmp_path / "a.safetensors", PLAIN[kind])
    checkpoint = read(path)
    assert not checkpoint.undecided and checkpoint.dialects == ("unscaled fp8",)


@pytest.mark.parametrize(("large", "others"), [(5, "a cast"), (3, "zeros")], ids=["of many", "alone"])
def test_a_few_large_matrices_are_no_sign(tmp_path, large, others):
    layers = tuple(f"blocks.{i}.ffn" for i in range(12))
    path = bare(tmp_path / "a.safetensors", PLAIN[others], layers=layers)
    tensors = load_file(path)
    for layer in layers[:large]:
        tensors[f"{layer}.weight"] = torch.full((128, 256), 64.0).to(E4M3)
    save_file(tensors, path)
    assert not read(path).undecided


def test_scales_that_some_layers_have_lost_are_told_of_those_alone(tmp_path):
    weights, biases = dialects.reference((*LAYERS, "kept.0", "kept.1"))
    path = dialects.modelopt(tmp_path / "a.safetensors", weights, biases)
    tensors = load_file(path)
    save_file({n: t for n, t in tensors.items() if "scale" not in n or n.startswith("kept")}, path)
    assert read(path).undecided == {f"{layer}.weight": SCALES_ELSEWHERE for layer in LAYERS}


def test_a_conversion_of_fp8_without_its_scales_does_not_hide_that(tmp_path):
    path = bare(tmp_path / "a.safetensors", lambda weight: scaled(weight, "tensor", E4M3))
    told = convert_file(path, tmp_path / "b.safetensors", "fp8_e4m3fn", rules_from()).notes
    assert SCALES_ELSEWHERE in " ".join(told) and SCALES_ELSEWHERE in " ".join(read(tmp_path / "b.safetensors").notes)


# marks and the header's table


def marked_and_stated(path, marks, table, format="int8"):
    weights, biases = dialects.reference()
    dialects.in_format(path, weights, biases, format)
    tensors = load_file(path)
    own = {name.removesuffix(".comfy_quant"): it for name, it in tensors.items() if name.endswith("comfy_quant")}
    said = {layer: json.loads(bytes(it.tolist())) for layer, it in own.items()}
    tensors |= {f"{layer}.comfy_quant": dialects.comfy_quant_bytes(marks(said[layer])) for layer in own}
    save_file(tensors, path, {TABLE: json.dumps({"layers": {layer: table(said[layer]) for layer in own}})})
    return path, weights


def only_format(said):
    return {"format": said["format"]}


def under_params(said):
    return {"format": said["format"], "params": {key: value for key, value in said.items() if key != "format"}}


SPOKEN = {
    "the table says the format alone": (dict, only_format),
    "the mark says the format alone": (only_format, dict),
    "the mark says it under params": (under_params, only_format),
    "the table says it under params": (only_format, under_params),
    "both say all": (dict, dict),
}


@pytest.mark.parametrize("kind", SPOKEN)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_marks_and_the_table_complete_each_other(tmp_path, kind, format):
    path, weights = marked_and_stated(tmp_path / "a.safetensors", *SPOKEN[kind], format)
    alone, _ = marked_and_stated(tmp_path / "b.safetensors", dict, dict, format)
    assert error_of(path, weights) == error_of(alone, weights) and not read(path).undecided
    assert any(JOINED in note for note in inspect_file(path).notes) is (SPOKEN[kind][1] is only_format)


@pytest.mark.parametrize(
    ("key", "marked", "stated"),
    [("convrot_groupsize", 64, 16), ("convrot", True, False), ("full_precision_matrix_mult", True, False)],
)
def test_marks_and_the_table_that_contradict_each_other_are_told_with_both_values(tmp_path, key, marked, stated):
    path, _ = marked_and_stated(
        tmp_path / "a.safetensors", lambda said: said | {key: marked}, lambda said: said | {key: stated}
    )
    checkpoint = read(path)
    weight = checkpoint.weights["blocks.0.ffn.0.weight"]
    assert weight.settings[key] == stated, "the table is read, as ComfyUI reads it"
    expected = f"{key} is {json.dumps(marked)} in comfy_quant and {json.dumps(stated)} in the header's table"
    assert all(expected in problem["text"] for problem in inspect_file(path).problems)
    assert {problem["tensor"] for problem in inspect_file(path).problems} == {
        "blocks.0.ffn.0.weight",
        "blocks.0.ffn.2.weight",
    }
    assert expected in " ".join(checkpoint.notes)


# shards with tables of their own


def shards(folder, format, table=lambda layers: layers):
    """Two shards, each with the settings of its own layers in its header."""
    weights, biases = dialects.reference()
    for number, layer in enumerate(weights, 1):
        part = folder / f"model-{number:05d}-of-00002.safetensors"
        dialects.in_format(part, {layer: weights[layer]}, {layer: biases[layer]}, format)
        dialects.with_settings_in_header(part)
        tensors, file = load_file(part), open_checkpoint_alone(part)
        save_file(tensors, part, {"of": str(number), TABLE: json.dumps({"layers": table(file)})})
    return folder / "model-00002-of-00002.safetensors", weights


def open_checkpoint_alone(part):
    with open(part, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return json.loads(header["__metadata__"][TABLE])["layers"]


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp8", "int4"])
def test_tables_of_all_shards_are_read(tmp_path, format):
    path, weights = shards(tmp_path, format)
    assert error_of(path, weights) < 0.2 and not read(path).undecided and not read(path).notes
    assert open_checkpoint(path).metadata["of"] == "1"


def test_tables_of_shards_that_contradict_each_other_are_an_error(tmp_path):
    def all_alike(layers):
        size = all_alike.sizes.pop()
        return {
            layer: {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size}
            for layer in ("blocks.0.ffn.0", "blocks.0.ffn.2")
        }

    all_alike.sizes = [16, 64]
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*convrot_groupsize of layer blocks.0.ffn.0 is 64 .*16"):
        read(shards(tmp_path, "int8", all_alike)[0])


def test_a_shard_whose_table_is_none_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="00002-of-00002.*no table of layers"):
        read(shards(tmp_path, "int8", lambda layers: layers if "blocks.0.ffn.0" in layers else [])[0])


# formats under other names


def int8_blocks(weight, rows, columns):
    down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scale = torch.empty(down, across)
    data = torch.empty(weight.shape, dtype=torch.int8)
    for i in range(down):
        for j in range(across):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[block].abs().max() / 127
            data[block] = (weight[block] / scale[i, j]).round().to(torch.int8)
    return data, scale


def one_layer(weight, data, scale, settings, **more):
    layer = "blocks.0.ffn.0"
    tensors = {"weight": data, "weight_scale": scale, "comfy_quant": dialects.comfy_quant_bytes(settings), **more}
    stored = read_checkpoint({f"{layer}.{leaf}": it for leaf, it in tensors.items()}, {}, "a.safetensors")
    return stored, relative_error(weight, stored.weights[f"{layer}.weight"].dequantize(torch.float32))


OTHER_NAMES = {
    "int8_blockwise of 64": ("int8_blockwise", 64, 64, {"group_size": 64}),
    "int8_blockwise of 128": ("int8_blockwise", 128, 128, {"group_size": 128}),
    "int8_blockwise of 96, which is no usual length": ("int8_blockwise", 96, 96, {"group_size": 96}),
    "int8_blockwise under params": ("int8_blockwise", 48, 48, {"params": {"group_size": 48}}),
    "int8_lodewise": ("int8_lodewise", 1, 64, {"group_size": 64}),
    "int8_tensorwise with scales of blocks": ("int8_tensorwise", 64, 64, {}),
    "int8_blockwise with scales of rows": ("int8_blockwise", 1, 384, {"group_size": 128}),
    "int8_blockwise with one scale": ("int8_blockwise", 192, 384, {}),
}


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_int8_under_another_name_is_read_by_its_scales(kind):
    format, rows, columns, settings = OTHER_NAMES[kind]
    weight = dialects.reference(("a",), (192, 384))[0]["a"].float() * torch.linspace(0.1, 10, 192)[:, None]
    data, scale = int8_blocks(weight, rows, columns)
    stored, error = one_layer(weight, data, scale, {"format": format, **settings}, input_scale=torch.tensor(1.0))
    assert error == pytest.approx(relative_error(weight, unpacked(data, scale, rows, columns)), rel=1e-3)
    assert not stored.undecided and error < 0.05


def unpacked(data, scale, rows, columns):
    whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return data.float() * whole[: data.shape[0], : data.shape[1]]


def test_hybrid_mxfp8_is_mxfp8():
    weight = dialects.reference(("a",), (128, 256))[0]["a"].float()
    made = dialects.NATIVE["mxfp8"](weight)
    stored, error = one_layer(
        weight, made["weight"], made["weight_scale"], {"format": "hybrid_mxfp8"}, weight_scalar=torch.tensor(0.5)
    )
    (found,) = stored.weights.values()
    assert found.storage == "mxfp8" and found.settings["format"] == "mxfp8" and error < 0.05
    assert "hybrid_mxfp8, read as mxfp8; its weight_scalar is not used" in stored.notes[0]


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "block3d"])
def test_fp8_under_another_name_is_read_by_its_scales(name):
    weight = dialects.reference(("a",), (192, 384))[0]["a"].float()
    if name == "rowwise":
        data, scale = dialects.per_row(weight)
        scale = scale.flatten()
    else:
        data, scale = dialects.per_block(weight, *((96, 96) if name == "blockwise" else (1, 96)))
        scale = scale if name == "blockwise" else scale.unsqueeze(2)
    settings = {"format": f"float8_e4m3fn_{name}", "group_size": 96}
    assert one_layer(weight, data, scale, settings)[1] < 0.04


@pytest.mark.parametrize("group", [4, 64, 4096])
def test_every_rotation_by_a_power_of_4_is_read(group):
    weight = torch.randn(8, 8192) * 0.02
    turned = weight.reshape(-1, group) @ dialects.rotation(group) if group < 4096 else kron_turned(weight)
    turned = turned.reshape(8, -1)
    scale = turned.abs().amax(1, keepdim=True) / 127
    data = (turned / scale).round().to(torch.int8)
    settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    stored, error = one_layer(weight, data, scale, settings)
    assert next(iter(stored.weights.values())).group == group and error < 0.02


def kron_turned(weight):
    """Rotated by the matrix of 4096, the Kronecker product of those of 64."""
    small = dialects.rotation(64)
    return torch.einsum("nab,ac,bd->ncd", weight.reshape(-1, 64, 64), small, small)


@pytest.mark.parametrize(("columns", "group"), [(512, 256), (384, 64)])
def test_inspect_says_which_rotations_comfyui_s_fused_kernel_takes(tmp_path, columns, group):
    path = dialects.in_format(tmp_path / "a.safetensors", *dialects.reference(shape=(256, columns)), "int8")
    told = [text for text in inspect_file(path).in_comfyui if f"rotated in groups of {group} inputs" in text]
    assert len(told) == (group != 256), inspect_file(path).in_comfyui


@pytest.mark.parametrize("group", [512, 3, 0, -4, True, "256", 1 << 20])
def test_a_rotation_that_there_is_not_is_refused_without_calling_the_file_damaged(group):
    settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    with pytest.raises(CheckpointError, match="a power of 4 that divides") as raised:
        one_layer(torch.ones(4, 512), torch.ones(4, 512).to(torch.int8), torch.ones(4, 1), settings)
    assert "damaged" not in str(raised.value) and "ownload" not in str(raised.value)


# int8 that is no matrix


@pytest.mark.parametrize("of", ["outputs", "one scale"])
@pytest.mark.parametrize(
    "shape", [(32, 16, 3, 3), (32, 16, 3), (8, 16, 3, 3, 3), (32,)], ids=["2d", "1d", "3d", "a norm"]
)
@pytest.mark.parametrize("format", ["int8_tensorwise", "int8_blockwise", "float8_e4m3fn"])
def test_8_bit_convolutions_are_read(shape, of, format):
    weight = torch.randn(shape) * torch.linspace(0.5, 2, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    largest = weight.abs().reshape(shape[0], -1).amax(1).reshape(-1, *[1] * (len(shape) - 1))
    scale = (largest if of == "outputs" else largest.max()) / (127 if format.startswith("int8") else 448)
    data = (
        (weight / scale).round().to(torch.int8) if format.startswith("int8") else dialects._cast(weight / scale, E4M3)
    )
    stored, error = one_layer(weight, data, scale, {"format": format})
    (found,) = stored.weights.values()
    assert error < 0.04 and found.shape == shape and found.quantized and not stored.undecided


def test_a_rotated_convolution_is_refused_in_a_true_sentence():
    settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}
    data = torch.ones(32, 16, 3, 3, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"int8 of shape \(32, 16, 3, 3\).*convrot") as raised:
        one_layer(data.float(), data, torch.ones(32, 1, 1, 1), settings)
    assert "damaged" not in str(raised.value)


# tensors that a format has no use for


@pytest.mark.parametrize("format", ["int8", "mxfp8", "fp8"])
def test_a_smoothing_that_comfyui_leaves_out_is_refused_in_a_true_sentence(tmp_path, format):
    weights, biases = dialects.reference()
    path = tmp_path / "a.safetensors"
    dialects.comfy_quant(path, weights, biases) if format == "fp8" else dialects.in_format(
        path, weights, biases, format
    )
    name = "blocks.0.ffn.0.pre_quant_scale"
    save_file({**load_file(path), name: torch.ones(384)}, path)
    with pytest.raises(CheckpointError, match=rf"{name}.*ComfyUI leaves it out") as raised:
        read(path)
    assert "comfy_quant file" not in str(raised.value)
