"""Data that are numbers and mean none: whole numbers without a format, zeros where matrices were, scales that ComfyUI's fp8 does not have."""

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.plain import BLOCK_SCALES
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import save_file
from support import dialects
from support.measures import relative_error

LAYER = "blocks.0.ffn.0"
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool]


def read(path):
    file = open_checkpoint(path)
    return read_checkpoint(file, file.metadata, path)


@pytest.mark.parametrize("name", [f"{LAYER}.weight", f"{LAYER}.bias", "attn.in_proj_weight", "blocks.0.norm.weight"])
@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_numbers_without_a_format_are_refused_by_name(tmp_path, dtype, name):
    shape = (16,) if name.endswith(("bias", "norm.weight")) else (16, 16)
    save_file({"a.weight": torch.ones(4, 4), name: torch.ones(shape).to(dtype)}, tmp_path / "a.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"a\.safetensors: tensor '{name}': in {dtype}.*comfy_quant".replace("torch.", "")
    ):
        read(tmp_path / "a.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_a_matrix_under_another_name_is_refused_and_positions_masks_and_texts_are_not(tmp_path, dtype):
    others = {
        "text_model.embeddings.position_ids": torch.ones(1, 77),
        "attn.relative_position_index": torch.ones(4, 4),
        "mask": torch.ones(4, 4),
        "spiece_model": torch.ones(9),
    }
    save_file({name: tensor.to(dtype) for name, tensor in others.items()}, tmp_path / "a.safetensors")
    assert set(read(tmp_path / "a.safetensors").weights) == set(others)
    save_file({"experts.gate_up_proj": torch.ones(2, 4, 4).to(dtype)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        read(tmp_path / "b.safetensors")


def test_an_int8_bias_beside_an_int8_weight_is_refused(tmp_path):
    weights, biases = dialects.reference()
    biases[LAYER] = (biases[LAYER] * 10).to(torch.int8)
    with pytest.raises(CheckpointError, match=f"{LAYER}.bias"):
        read(dialects.in_format(tmp_path / "a.safetensors", weights, biases, "int8"))


def interrupted(path, begin, end=None):
    """The same file with zeros in its data, from a share of them on to another; returns the first and the last byte of those zeros, with
    zeros that were there beside them."""
    data = bytearray(path.read_bytes())
    start = int.from_bytes(data[:8], "little") + 8
    size = len(data) - start
    hole = slice(start + int(size * begin), len(data) if end is None else start + int(size * end))
    data[hole] = bytes(hole.stop - hole.start)
    path.write_bytes(data)
    return len(data[: hole.start].rstrip(b"\0")), len(data) - len(data[hole.stop :].lstrip(b"\0")) - 1


def tensors_between(path, first, last):
    entries = open_checkpoint(path).entries.items()
    return [name for name, entry in entries if entry.start <= last and entry.end > first]


def told_everywhere(path, hole, folder):
    """The hole's bytes and tensors are told by ``inspect --values``, by the loaders' functions, and by ``convert``."""
    (problem,) = inspect_file(path, values=True).problems
    lost = tensors_between(path, *hole)
    expected = f"bytes {hole[0]} to {hole[1]} of {path.name} hold only zeros ({len(lost)} tensors, from {lost[0]} to {lost[-1]})"
    assert (problem["kind"], problem["tensor"]) == ("zeros", lost[0]) and expected in problem["text"]
    checkpoint = read(path)
    notes = [*checkpoint.notes, *checkpoint.zero_notes()]
    converted = convert_file(path, folder / "converted.safetensors", "as_file", rules_from())
    assert notes.count(problem["text"]) == 1 and converted.notes.count(problem["text"]) == 1


@pytest.mark.parametrize(("begin", "end"), [(0.3, None), (0.52, 0.9), (0.0, 0.4)])
def test_zeros_where_matrices_were_are_told_with_the_bytes_that_they_are(tmp_path, begin, end):
    weights, biases = dialects.reference(tuple(f"blocks.{i}.{j}" for i in range(12) for j in "ab"), (64, 64))
    path = dialects.save(
        tmp_path / "model.safetensors", {f"{layer}.weight": weight for layer, weight in weights.items()}, biases
    )
    assert not inspect_file(path, values=True).problems and not read(path).notes
    hole = interrupted(path, begin, end)
    told_everywhere(path, hole, tmp_path)
    assert "hold only zeros" in " ".join(read(path).notes) and inspect_file(path).notes


ROWS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def large(path, dtype, change=None, shape=(512, 1024)):
    """Two matrices and a bias, with some rows or all of the first as ``change`` makes them."""
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(shape), "b.bias": torch.randn(1024), "b.weight": torch.randn(shape)}
    if change:
        change(tensors)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize(
    ("begin", "end"), [(0.2003, 0.3507), (0.3011, 0.7003), (0.6017, 0.8), (0.7131, None), (0.0, 0.2173)],
    ids=["inside of one", "of two", "of the last", "to the end", "from the start"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ROWS)
def test_a_hole_whose_ends_lie_inside_of_matrices_is_told(tmp_path, dtype, begin, end):
    path = large(tmp_path / "model.safetensors", ROWS[dtype])
    assert not inspect_file(path, values=True).problems
    told_everywhere(path, interrupted(path, begin, end), tmp_path)


def zero_rows(tensors):
    tensors["a.weight"][100:400] = 0


def zero_tail_and_bias(tensors):
    tensors["b.weight"][200:] = 0
    tensors["b.bias"].zero_()


def zero_matrix(tensors):
    tensors["a.weight"].zero_()


def zero_columns(tensors):
    tensors["a.weight"][:, 100:900] = 0


REAL = {
    "rows, as of a pruned head": (zero_rows, (512, 1024)),
    "the last rows, as of a padded embedding": (zero_tail_and_bias, (512, 1024)),
    "a whole matrix, as of a layer that starts at zero": (zero_matrix, (512, 1024)),
    "columns": (zero_columns, (512, 1024)),
    "a kernel's outputs": (zero_rows, (512, 128, 3, 3)),
    "rows of a low rank": (zero_rows, (4096, 16)),
    "rows of 3 numbers": (lambda tensors: tensors["a.weight"][5000:35000].zero_(), (40000, 3)),
}


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("kind", REAL)
def test_zeros_that_a_model_really_holds_are_not_told(tmp_path, kind, dtype):
    change, shape = REAL[kind]
    path = large(tmp_path / "model.safetensors", ROWS[dtype], change, shape)
    checkpoint = read(path)
    assert not inspect_file(path, values=True).problems and not checkpoint.notes
    assert not checkpoint.zero_notes()


def test_zeros_are_told_of_the_part_of_a_set_that_has_them(tmp_path):
    weights, _ = dialects.reference(tuple(f"blocks.{i}.a" for i in range(8)), (16, 16))
    for number, zero in ((1, False), (2, True)):
        part = {
            f"{number}.{layer}.weight": torch.zeros_like(weight) if zero else weight
            for layer, weight in weights.items()
        }
        save_file(part, tmp_path / f"model-0000{number}-of-00002.safetensors")
    (problem,) = inspect_file(tmp_path / "model-00001-of-00002.safetensors", values=True).problems
    assert "8 tensors" in problem["text"] and "model-00002-of-00002.safetensors" in problem["text"]


def test_layers_that_start_at_zero_are_no_damage(tmp_path):
    tensors = {}
    for block in range(8):
        tensors |= {
            f"{block}.in.weight": torch.randn(8, 8),
            f"{block}.out.bias": torch.zeros(8),
            f"{block}.out.weight": torch.zeros(8, 8),
        }
    save_file(tensors, tmp_path / "a.safetensors")
    assert not inspect_file(tmp_path / "a.safetensors", values=True).problems


@pytest.mark.parametrize("second", [None, 0.25])
@pytest.mark.parametrize("name", ["scale_weight", "weight_scale"])
def test_scales_of_three_dimensions_are_those_of_two(tmp_path, name, second):
    """As musubi-tuner and sd-scripts lay them out: (outputs, blocks, 1), and in later versions with a factor for the whole weight."""
    if second and name == "weight_scale":
        pytest.skip("the second factor belongs to scale_weight")
    weight = dialects.reference()[0][LAYER]
    data, scale = dialects.per_block(weight, 1, 64)
    tensors = {f"{LAYER}.weight": data, f"{LAYER}.{name}": scale[:, :, None] / (second or 1)}
    if second:
        tensors[f"{LAYER}.scale_weight_tensor"] = torch.tensor(second)
    found = read_checkpoint(tensors, {}, "model.safetensors").weights
    assert list(found) == [f"{LAYER}.weight"] and found[f"{LAYER}.weight"].format is BLOCK_SCALES
    assert relative_error(weight, found[f"{LAYER}.weight"].dequantize(torch.float32)) < 0.028


@pytest.mark.parametrize("shape", [(256, 6, 2), (256, 1, 6), (5, 6, 1)])
def test_other_scales_of_several_dimensions_are_refused(shape):
    tensors = {f"{LAYER}.weight": torch.ones(256, 384).to(dialects.E4M3), f"{LAYER}.scale_weight": torch.ones(shape)}
    with pytest.raises(CheckpointError, match="does not fit a weight of shape"):
        read_checkpoint(tensors, {}, "model.safetensors")


def test_a_second_factor_without_the_first_is_refused():
    tensors = {
        f"{LAYER}.weight": torch.ones(256, 384).to(dialects.E4M3),
        f"{LAYER}.scale_weight_tensor": torch.ones(()),
    }
    with pytest.raises(CheckpointError, match="scale_weight_tensor"):
        read_checkpoint(tensors, {}, "model.safetensors")
