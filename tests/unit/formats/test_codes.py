"""Codes of every storage that is written: nearest under tensors fixed beforehand, as comfy-kitchen's eager code has them."""

import itertools

import pytest
import torch
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.int8 import rotated, rotation_group
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from support import dialects
from support.kitchen_process import run_with_kitchen
from support.measures import relative_error
from support.storing import normal_weight

WRITTEN = {storage: row.codes for storage, row in FORMAT_OF_STORAGE.items() if row.codes}
BITS = {"w4a8": 4, "w6a8": 6}
SHAPES = ((64, 256), (5, 512), (128, 320), (33, 64), (1, 32), (257, 1536))
ERRORS = {"fp8_e4m3fn": 0.028, "fp8_e5m2": 0.055, "int8": 0.012, "w6a8": 0.022, "w4a8": 0.08}
"""What many values lose, relative to their root mean square."""


def outliers(shape):
    """A weight in which every 17th input is 30 times larger."""
    weight = normal_weight(shape)
    weight[:, ::17] *= 30
    return weight


def spiky(shape):
    """A weight whose rotated rows have a few values that are far larger than the others: its codebook is fitted."""
    return rotated(normal_weight(shape) * torch.randn(shape, generator=torch.Generator().manual_seed(1)) ** 5, rotation_group(shape[1]))


def of_few(error, weight):
    """What so few values may lose where many lose ``error``: four standard deviations of the mean of as many squares as
    make up the sum of theirs. Each is between nothing and half a step: half its own size is their spread."""
    squares = weight.double().square()
    return error * (1 + 2 / (squares.sum().square() / squares.square().sum()).sqrt().item())


WEIGHTS = {"normal": normal_weight, "outliers": outliers, "spiky": spiky}


def read(storage, tensors, columns):
    settings = {"format": FORMAT_OF_STORAGE[storage].name} | WRITTEN[storage].settings(columns)
    tensors = tensors | {"comfy_quant": dialects.comfy_quant_bytes(settings)}
    return read_checkpoint({f"layer.{leaf}": tensor for leaf, tensor in tensors.items()}, {}, "m").weights["layer.weight"]


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", WRITTEN)
def test_what_is_packed_reads_as_the_numbers_that_were_chosen(storage, shape, kind):
    codes, weight = WRITTEN[storage], WEIGHTS[kind](shape)
    turned = codes.turned(weight)
    params = codes.prepare(turned)
    chosen, numbers = codes.nearest(turned, params)
    stored = read(storage, codes.pack(chosen, params), shape[1])
    assert stored.storage == storage and stored.shape == shape
    assert relative_error(codes.turned(numbers), stored.dequantize(torch.float32)) < 2e-7
    assert kind == "spiky" or relative_error(weight, stored.dequantize(torch.float32)) < of_few(ERRORS[storage], weight)


@pytest.mark.parametrize("storage", ["int8", "w6a8", "w4a8"])
def test_rows_that_hold_nan_have_codes_until_they_are_refused(storage):
    codes, turned = WRITTEN[storage], normal_weight((48, 320))
    turned[3, 5] = float("nan")
    assert codes.nearest(turned, codes.prepare(turned))[0].shape == turned.shape


@pytest.mark.parametrize("storage", WRITTEN)
def test_columns_one_by_one_and_in_any_order_have_the_codes_of_the_whole(storage):
    codes = WRITTEN[storage]
    turned = codes.turned(normal_weight((48, 320)))
    params = codes.prepare(turned)
    whole, numbers = codes.nearest(turned, params)
    order = torch.randperm(320, generator=torch.Generator().manual_seed(0))
    for at in (order[:1], order[:7], order):
        some, some_numbers = codes.nearest(turned[:, at], params, at.tolist())
        assert torch.equal(some.float(), whole.float()[:, at]) and torch.equal(some_numbers, numbers[:, at])


@pytest.mark.parametrize("storage", WRITTEN)
def test_no_code_stands_for_a_nearer_number(storage):
    codes = WRITTEN[storage]
    turned = codes.turned(normal_weight((16, 128)))
    params = codes.prepare(turned)
    numbers = codes.nearest(turned, params)[1]
    rest = (turned - numbers).abs()
    for shift in (0.6, -0.6, 1.7, -1.7):
        other = codes.nearest(turned + shift * turned.std(), params)[1]
        assert ((turned - other).abs() >= rest - 1e-7).all()


@pytest.mark.parametrize("storage", WRITTEN)
def test_encoding_is_preparing_rounding_and_packing(storage):
    codes, weight = WRITTEN[storage], normal_weight((40, 512))
    turned = codes.turned(weight)
    params = codes.prepare(turned)
    made = codes.pack(codes.nearest(turned, params)[0], params)
    found = codes.encode(weight, codes.whole(turned))
    assert set(found) == set(made) == {"weight", *codes.shapes(40, 512)}
    assert all(torch.equal(found[leaf].float(), made[leaf].float()) for leaf in made)
    assert made["weight"].shape == (40, codes.data_columns(512)) and made["weight"].dtype == codes.dtype
    assert {leaf: (tuple(made[leaf].shape), made[leaf].dtype) for leaf in codes.shapes(40, 512)} == codes.shapes(40, 512)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """comfy-kitchen's tensors of each (storage, shape, kind), and the numbers that it reads in them."""
    folder = tmp_path_factory.mktemp("kitchen")
    tasks = {
        (storage, shape, kind): (WEIGHTS[kind](shape), BITS[storage], WRITTEN[storage].group(shape[1]))
        for storage, shape, kind in itertools.product(BITS, SHAPES, WEIGHTS)
    }
    torch.save(tasks, folder / "tasks")
    run_with_kitchen(folder / "tasks", folder / "made")
    return torch.load(folder / "made")


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", BITS)
def test_codes_scales_and_codebook_are_those_of_comfy_kitchen(theirs, storage, shape, kind):
    codes, weight = WRITTEN[storage], WEIGHTS[kind](shape)
    made, restored = theirs[storage, shape, kind]
    found = codes.encode(weight, codes.whole(codes.turned(weight)))
    assert set(found) == set(made)
    assert [leaf for leaf in made if not torch.equal(found[leaf].view(torch.uint8), made[leaf].view(torch.uint8))] == []
    assert torch.equal(read(storage, found, shape[1]).dequantize(torch.float32), restored)


def test_only_values_with_heavy_tails_get_levels_of_their_own():
    codes = WRITTEN["w4a8"]
    usual, own = (codes.prepare(codes.turned(weight((128, 320))))["weight_codebook"] for weight in (normal_weight, spiky))
    assert not torch.equal(usual, own) and (own.diff() >= 0).all()


def test_six_bits_need_a_multiple_of_32_inputs():
    assert "multiple of 32 inputs, and it has 48" in WRITTEN["w6a8"].why_not(48)
    assert not WRITTEN["w6a8"].why_not(320) and not WRITTEN["w4a8"].why_not(48) and not WRITTEN["fp8_e4m3fn"].why_not(7)
    assert "no rotation" in WRITTEN["w4a8"].why_not(100)
