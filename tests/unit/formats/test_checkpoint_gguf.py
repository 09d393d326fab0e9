"""GGUF files read as checkpoints: a weight for each tensor, with the library's values, and what a reader finds wrong."""

import numpy as np
import pytest
import torch
from halfsafe.precision.errors import CheckpointError, UnconsumedScale
from halfsafe.precision.files.gguf_file import open_gguf
from halfsafe.precision.formats.checkpoint import read_checkpoint
from support import gguf_files

QUANTIZED = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
SHAPE = (24, 512)


def read(path, tensors, **options):
    file = open_gguf(gguf_files.write(path / "in.gguf", tensors, **options))
    return read_checkpoint(file, file.metadata, path / "in.gguf")


def mixed():
    blocks = {f"blocks.{kind}.weight": (kind, gguf_files.blocks(kind, SHAPE)) for kind in QUANTIZED}
    return blocks | {"blocks.norm.weight": ("F32", np.linspace(0, 1, 512, dtype=np.float32)), "head.weight": ("F16", np.ones((4, 8), np.float16))}


def test_weights_have_the_librarys_values_and_their_own_shape(tmp_path):
    written = mixed()
    checkpoint = read(tmp_path, written)
    assert list(checkpoint.weights) == list(written) and checkpoint.metadata == {"general.architecture": "wan"}
    for name, weight in checkpoint.weights.items():
        kind, data = written[name]
        values = gguf_files.values(data, kind)
        assert torch.equal(weight.dequantize(torch.float32), values) and weight.shape == tuple(values.shape)
        assert torch.equal(weight.dequantize(torch.bfloat16), values.bfloat16())
        assert weight.file == str(tmp_path / "in.gguf")


def test_a_packed_weight_is_planned_as_one_in_16_bit_and_named_by_its_type(tmp_path):
    weight = read(tmp_path, mixed()).weights["blocks.Q4_K.weight"]
    assert (weight.storage, weight.quantized, weight.is_number, weight.plain) == ("Q4_K", True, True, False)
    assert (weight.data.dtype, weight.data.device.type) == (torch.bfloat16, "meta")
    assert weight.file_bytes == SHAPE[0] * SHAPE[1] // 256 * 144


def test_the_dialect_lists_the_types(tmp_path):
    assert read(tmp_path, mixed()).dialects == ("GGUF", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
    assert read(tmp_path, {"a.weight": ("F16", np.ones((4, 8), np.float16))}).dialects == ("GGUF",)


def test_a_reshaped_weight_of_a_convolution_has_its_values_in_order(tmp_path):
    data = gguf_files.blocks("Q6_K", (36, 256))
    add_shape = lambda writer: writer.add_array("comfy.gguf.orig_shape.conv.weight", (32, 32, 3, 3))  # noqa: E731
    weight = read(tmp_path, {"conv.weight": ("Q6_K", data)}, fields=add_shape).weights["conv.weight"]
    values = gguf_files.values(data, "Q6_K").view(32, 32, 3, 3)
    assert torch.equal(weight.dequantize(torch.float32), values)
    assert all(torch.equal(weight.matrix(values)[rows], part) for rows, part in weight.parts())


def test_a_type_that_the_library_does_not_unpack_is_refused_with_its_tensor(tmp_path):
    with pytest.raises(CheckpointError, match=r"'a\.weight': Q8_1, but gguf .* does not unpack this type.*Q8_0") as caught:
        read(tmp_path, {"a.weight": ("Q8_1", np.zeros((2, 40), np.uint8))})
    assert caught.value.tensor == "a.weight"


def test_the_scale_of_an_fp8_model_that_was_made_into_gguf_is_not_dropped(tmp_path):
    tensors = {"a.weight": ("Q8_0", gguf_files.blocks("Q8_0", (8, 32))), "a.scale_weight": ("F32", np.full(1, 0.5, np.float32))}
    with pytest.raises(UnconsumedScale, match=r"a\.scale_weight"):
        read(tmp_path, tensors)


def test_a_values_range_is_judged_by_the_values_where_the_bound_leaves_it_open(tmp_path):
    data = gguf_files.blocks("Q6_K", SHAPE, std=2000.0)
    weight = read(tmp_path, {"a.weight": ("Q6_K", data)}).weights["a.weight"]
    amax = gguf_files.values(data, "Q6_K").abs().max().item()
    bound = weight.bound(0.0)
    assert amax < bound
    assert weight.exceeds(amax * 0.999, bound) and not weight.exceeds(amax, bound)
