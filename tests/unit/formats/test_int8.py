"""INT8 with rotated inputs, bit for bit beside comfy-kitchen's own eager functions."""

import pytest
import torch
from halfsafe.precision.base.errors import NonFiniteWeight
from halfsafe.precision.formats import int8
from halfsafe.precision.formats.checkpoint import StoredWeight, read_checkpoint
from halfsafe.precision.formats.stored_weight import CHUNK
from support import dialects
from support.measures import relative_error, summed_alike
from support.storing import in_storages, normal_weight, plan_of, tensors_in

kitchen = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
NAME = "blocks.0.ffn.0.weight"
SHAPES = ((5, 512), (128, 320), (33, 48), (1, 16), (257, 1536))


def as_int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    stored = StoredWeight(NAME, weight)
    return {name.rpartition(".")[2]: tensor for name, tensor in tensors_in(stored, "int8").items()}


def read(tensors: dict[str, torch.Tensor]) -> StoredWeight:
    return read_checkpoint({f"blocks.0.ffn.0.{leaf}": tensor for leaf, tensor in tensors.items()}, {}, "m").weights[
        NAME
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_those_of_comfy_kitchen(shape, dtype):
    weight = normal_weight(shape).to(dtype)
    group = int8.rotation_group(shape[1])
    codes, scale = kitchen.quantize_int8_convrot_weight(weight.float(), group)
    found = as_int8(weight)
    assert torch.equal(found["weight"], codes) and torch.equal(found["weight_scale"], scale)
    assert (
        bytes(found["comfy_quant"].tolist())
        == b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": %d}' % group
    )
    restored = kitchen.dequantize_int8_convrot_weight(codes, scale, group)
    assert torch.equal(read(found).dequantize(torch.float32), restored)


def test_a_weight_of_several_parts_is_that_of_one():
    weight = normal_weight((1537, 2048))
    assert weight.numel() > 2 * CHUNK
    codes, scale = kitchen.quantize_int8_convrot_weight(weight, 256)
    found = as_int8(weight)
    assert summed_alike(scale, found["weight_scale"]), (
        "rotated with other numbers of rows, which may be summed in another order"
    )
    steps = (found["weight"].int() - codes).abs()
    assert steps.max() <= 1 and steps.count_nonzero() < 2 * 127 * 2**-20 * steps.numel() * 4, (
        "what is that near to the middle of two codes"
    )
    assert (
        relative_error(kitchen.dequantize_int8_convrot_weight(codes, scale, 256), read(found).dequantize(torch.float32))
        < 2e-4
    )


def test_rows_wider_than_a_block_are_rounded_in_any_grad_mode(monkeypatch):
    weight = normal_weight((3, 512))
    monkeypatch.setattr(int8, "BLOCK", 256)
    with torch.inference_mode():
        expected = int8.quantize_rows(weight, 256)
    found = int8.quantize_rows(weight.requires_grad_(), 256)
    assert all(torch.equal(*pair) and not pair[0].requires_grad for pair in zip(found, expected, strict=True))


def test_outliers_are_spread_over_their_group():
    weight = normal_weight((128, 1024))
    weight[:, 7] *= 100
    rest = [column for column in range(1024) if column != 7]
    turned = read(as_int8(weight)).dequantize(torch.float32)
    plain = read(dialects._int8(weight, rotated=False)).dequantize(torch.float32)
    assert 3 * relative_error(weight[:, rest], turned[:, rest]) < relative_error(weight[:, rest], plain[:, rest])


@pytest.mark.parametrize("value", [0.0, 1e-35, 65504.0, 1e30])
def test_rows_of_one_value(value):
    weight = torch.full((4, 256), value)
    weight[0] = 0
    codes, scale = kitchen.quantize_int8_convrot_weight(weight, 256)
    found = as_int8(weight)
    assert torch.equal(found["weight"], codes) and torch.equal(found["weight_scale"], scale)


def test_the_largest_group_that_divides_the_inputs():
    assert [int8.rotation_group(columns) for columns in (3072, 320, 48, 100, 0)] == [256, 64, 16, None, None]
    plan = plan_of(StoredWeight(NAME, torch.randn(4, 100)), "int8")
    assert plan.storage == "as_file" and "100" in plan.note


def test_values_that_overflow_once_rotated_are_an_error():
    with pytest.raises(NonFiniteWeight, match="rotated"):
        as_int8(torch.full((4, 256), 1.6e38) * int8.rotated(torch.eye(256), 256)[0].sign())


@pytest.mark.parametrize("source", ["per_tensor", "per_row", "per_block"])
def test_from_every_fp8_granularity(source):
    weight = normal_weight((256, 384))
    data, scale = getattr(dialects, source)(weight)
    stored = read_checkpoint({NAME: data, "blocks.0.ffn.0.weight_scale": scale}, {}, "m")
    tensors, notes = in_storages(stored, {"blocks.0.ffn.0": "int8"})
    exact = stored.weights[NAME].dequantize(torch.float32)
    found = read_checkpoint(tensors, {}, "m").weights[NAME]
    assert not notes and found.storage == "int8"
    assert torch.equal(found.data, kitchen.quantize_int8_convrot_weight(exact, 64)[0])
