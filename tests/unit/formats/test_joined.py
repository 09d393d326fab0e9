"""Weights joined by rows: exactly the rows of the parts in the storage that they have, or nothing."""

from dataclasses import replace

import pytest
import torch
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.comfy_format import tensors_of
from halfsafe.precision.formats.joined import joined_rows
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.formats.stored_weight import StoredWeight
from support.storing import normal_weight

WRITTEN = [name for name, format in FORMAT_OF_STORAGE.items() if format.can_write]


def parts_in(storage: str, sizes: tuple[int, ...] = (128, 256), louder: float = 3.0) -> list[StoredWeight]:
    """Weights of the same inputs stored as asked, each ``louder`` times the one before."""
    tensors = {}
    for i, rows in enumerate(sizes):
        weight = StoredWeight(f"{i}.weight", normal_weight((rows, 64)) * louder**i)
        tensors |= tensors_of(weight, storage, "made")
        tensors[f"{i}.bias"] = torch.zeros(rows)
    weights = read_checkpoint(tensors, {}, "made").weights
    return [weights[f"{i}.weight"] for i in range(len(sizes))]


def values(parts) -> torch.Tensor:
    return torch.cat([part.dequantize(torch.float32) for part in parts])


@pytest.mark.parametrize("storage", WRITTEN)
@pytest.mark.parametrize("louder", [1.0, 3.0])
@pytest.mark.parametrize("order", [None, torch.arange(384).flip(0)])
def test_a_joined_weight_has_exactly_the_rows_of_its_parts(storage, louder, order):
    parts = parts_in(storage, louder=louder)
    made = joined_rows("qkv.weight", parts, order)
    if made is None:
        assert storage in ("nvfp4", "mxfp8", "fp8_e4m3fn", "fp8_e5m2", "w4a8")
        return
    expected = values(parts) if order is None else values(parts)[order]
    assert made.name == "qkv.weight" and made.storage == storage
    assert torch.equal(made.dequantize(torch.float32), expected)


@pytest.mark.parametrize(
    ("storage", "louder", "order", "exact"),
    [
        ("int8", 3.0, None, True),
        ("int8", 3.0, torch.arange(384).flip(0), True),
        ("fp8_e4m3fn", 1.0, None, True),
        ("fp8_e4m3fn", 3.0, None, False),
        ("nvfp4", 3.0, None, False),
        ("mxfp8", 3.0, None, True),
        ("mxfp8", 3.0, torch.arange(384).flip(0), False),
    ],
)
def test_storages_hold_joined_rows_where_their_scales_can(storage, louder, order, exact):
    if storage not in WRITTEN:
        pytest.skip("this comfy-kitchen does not write it")
    assert (joined_rows("qkv.weight", parts_in(storage, louder=louder), order) is not None) == exact


def test_tiles_that_are_not_whole_are_not_joined():
    if "mxfp8" not in WRITTEN:
        pytest.skip("this comfy-kitchen does not write it")
    assert joined_rows("qkv.weight", parts_in("mxfp8", (96, 128))) is None


def test_weights_in_two_storages_are_not_joined():
    assert joined_rows("qkv.weight", [parts_in("int8")[0], parts_in("fp8_e4m3fn")[0]]) is None
    plain = StoredWeight("plain.weight", normal_weight((32, 64)))
    assert joined_rows("qkv.weight", [plain, parts_in("int8")[0]]) is None
    unscaled = StoredWeight("fp8.weight", plain.data.to(torch.float8_e4m3fn))
    assert joined_rows("qkv.weight", [plain, unscaled]) is None


def test_int8_with_one_scale_gets_one_for_each_row():
    first, second = parts_in("int8", louder=1.0)
    first = replace(first, tensors={"weight_scale": torch.tensor(0.5)})
    made = joined_rows("qkv.weight", [first, second])
    assert made.tensors["weight_scale"].shape == (384, 1)
    assert torch.equal(made.dequantize(torch.float32), values([first, second]))


def test_scales_of_inputs_that_differ_are_dropped():
    first, second = parts_in("fp8_e4m3fn", louder=1.0)
    first, second = (replace(part, input_scale=torch.tensor(s)) for part, s in ((first, 0.5), (second, 0.25)))
    assert joined_rows("qkv.weight", [first, second]).input_scale is None
    assert joined_rows("qkv.weight", [first, first]).input_scale == 0.5
