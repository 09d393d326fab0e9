"""``nvfp4`` and ``mxfp8``: what is written equals comfy-kitchen's own quantizing, whatever the parts that it is made in."""

from __future__ import annotations

import pytest
import torch
from halfsafe.precision.base.errors import StorageNotHeld
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats import stored_weight
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.comfy_format import tensors_of
from halfsafe.precision.formats.format import kitchen_function
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.formats.stored_weight import StoredWeight
from halfsafe.precision.plan.layers import plan_weights
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import save_file
from support.measures import relative_error

NAME = "blocks.0.ffn.weight"
ERROR = {"nvfp4": 0.1, "mxfp8": 0.03}
both = pytest.mark.parametrize("storage", ["nvfp4", "mxfp8"])


def weight_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> StoredWeight:
    return StoredWeight(NAME, torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype))


def own(storage: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of blocks as comfy-kitchen makes them of a whole weight."""
    if storage == "mxfp8":
        return kitchen_function("quantize_mxfp8")(values)
    return kitchen_function("quantize_nvfp4")(values, values.abs().max().float() / (6 * 448))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@both
@pytest.mark.parametrize("rows", [32, 128, 160, 416])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_weight_made_in_parts_is_comfy_kitchens_own(
    storage: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weight_of(rows, 256, dtype)
    monkeypatch.setattr(stored_weight, "CHUNK", 1 << 12)  # 16 rows, fewer than a tile of scales has
    made = tensors_of(weight, storage, "file")
    codes, scales = own(storage, weight.data.float())
    assert torch.equal(bits(made[NAME]), bits(codes)) and torch.equal(
        bits(made["blocks.0.ffn.weight_scale"]), bits(scales)
    )
    row = FORMAT_OF_STORAGE[storage]
    assert {
        name.rpartition(".")[2]: (tuple(tensor.shape), tensor.dtype)
        for name, tensor in made.items()
        if not name.endswith("comfy_quant")
    } == row.specs(rows, 256)


@both
@pytest.mark.parametrize("source", ["bf16", "fp8_e4m3fn", "int8"])
def test_a_file_in_16_or_8_bits_becomes_one_and_is_read_back(storage: str, source: str, tmp_path) -> None:
    exact = weight_of(96, 128)
    save_file({NAME: exact.data}, tmp_path / "16.safetensors")
    convert_file(tmp_path / "16.safetensors", tmp_path / "8.safetensors", source, rules_from(preset="none"))
    summary = convert_file(tmp_path / "8.safetensors", tmp_path / "out.safetensors", storage, rules_from(preset="none"))
    assert summary.weights == {storage: 1}
    file = open_checkpoint(tmp_path / "out.safetensors")
    weight = read_checkpoint(file, file.metadata, "out").weights[NAME]
    assert weight.storage == storage and weight.shape == (96, 128)
    assert relative_error(exact.data.float(), weight.dequantize(torch.float32)) < ERROR[storage] + 0.03


@both
def test_zeros_and_the_largest_numbers_stay_finite(storage: str) -> None:
    values = torch.zeros(64, 64)
    values[0, 0], values[32, 40] = 1e38, -1e-38
    for each in (values, torch.zeros(64, 64)):
        made = tensors_of(StoredWeight(NAME, each), storage, "file")
        row = FORMAT_OF_STORAGE[storage]
        params = {name.rpartition(".")[2]: tensor for name, tensor in made.items() if not name.endswith("comfy_quant")}
        found = StoredWeight(NAME, params.pop("weight"), format=row, tensors=params).dequantize(torch.float32)
        assert torch.isfinite(found).all() and relative_error(each + 1e-30, found + 1e-30) < 0.1


@pytest.mark.parametrize(
    ("storage", "shape", "odd"),
    [("nvfp4", (32, 72), 72), ("nvfp4", (20, 64), 20), ("mxfp8", (48, 64), 48), ("mxfp8", (32, 80), 80)],
)
def test_a_shape_that_would_be_padded_stays_as_in_the_file(storage: str, shape: tuple[int, int], odd: int) -> None:
    block = FORMAT_OF_STORAGE[storage].block
    assert (
        FORMAT_OF_STORAGE[storage].why_not(*shape)
        == f"{storage} needs sizes that are multiples of {block}; this layer has {odd}"
    )
    assert not FORMAT_OF_STORAGE[storage].why_not(4 * block, 2 * block)


@both
def test_without_comfy_kitchen_it_is_refused_by_name(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfsafe.precision.formats.format.kitchen_function", lambda name: None)
    with pytest.raises(StorageNotHeld, match=f"storage={storage}.*came with ComfyUI"):
        plan_weights({NAME: weight_of(32, 64)}, {NAME: LayerPlan(storage)}, "file")
