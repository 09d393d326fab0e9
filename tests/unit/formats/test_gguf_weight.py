"""Weights of GGUF files: the library's own values, whatever part of them is asked for, and bounds on them."""

import math

import numpy as np
import pytest
import torch
from halfsafe.precision.dtypes import FP16_MAX
from halfsafe.precision.formats import gguf_weight
from halfsafe.precision.formats.gguf_weight import AT_ONCE, GgufWeight, scale_offsets
from support import gguf_files

TYPES = [kind for kind in gguf_files.unpacked_types() if kind not in ("F32", "F16", "BF16")]
SHAPE = (24, 512)


def weight_of(kind, shape=SHAPE, **options):
    data = gguf_files.blocks(kind, shape, **options)
    return GgufWeight(kind, shape, torch.from_numpy(data.reshape(-1))), gguf_files.values(data, kind)


def test_every_type_that_diffusion_models_come_in_is_there():
    assert set(gguf_files.ASKED_FOR) - {"F32", "F16", "BF16"} <= set(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_those_the_library_unpacks(kind):
    weight, values = weight_of(kind)
    assert values.abs().max() > 0
    assert torch.equal(weight.rows(slice(0, SHAPE[0])), values)


@pytest.mark.parametrize("columns", [512, 96, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2), (3, 17), (23, 24), (5, 5)])
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_rows_may_begin_and_end_within_a_block(kind, first, last, columns):
    weight, values = weight_of(kind)
    weight = GgufWeight(kind, (values.numel() // columns, columns), weight.data)
    assert torch.equal(weight.rows(slice(first, last)), values.view(-1, columns)[first:last])


def test_many_values_are_unpacked_in_several_calls(monkeypatch):
    calls = []
    unpack = gguf_weight._unpack
    monkeypatch.setattr(gguf_weight, "_unpack", lambda data, kind: calls.append(data.numel()) or unpack(data, kind))
    shape = (3, AT_ONCE)
    weight, values = weight_of("Q4_0", shape)
    assert torch.equal(weight.rows(slice(0, shape[0])), values)
    assert calls == [AT_ONCE // 32 * 18] * 3


@pytest.mark.parametrize("kind", TYPES)
def test_the_bound_holds_and_tells_of_usual_weights_that_fp16_holds_them(kind):
    weight, values = weight_of(kind)
    assert values.abs().max() <= weight.bound() < FP16_MAX


@pytest.mark.parametrize("kind", [kind for kind in TYPES if gguf_files.halves_of(kind)])
@pytest.mark.parametrize("fill", [0x00, 0x0F, 0x7F, 0x80, 0xF0, 0xFF])
def test_the_bound_holds_for_the_largest_numbers_of_a_type(kind, fill):
    data = gguf_files.blocks(kind, SHAPE)
    halves = [at + byte for at in gguf_files.halves_of(kind) for byte in (0, 1)]
    blocks = data.reshape(-1, gguf_weight._block(kind)[1])
    filled = np.random.default_rng(0).random(blocks.shape) < 0.5
    filled[:, halves] = False
    blocks[filled] = fill
    weight = GgufWeight(kind, SHAPE, torch.from_numpy(data.reshape(-1)))
    assert gguf_files.values(data, kind).abs().max() <= weight.bound()


@pytest.mark.parametrize("kind", TYPES)
def test_the_places_of_fp16_numbers_are_found(kind):
    assert list(scale_offsets(kind)) == gguf_files.halves_of(kind)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if gguf_files.halves_of(kind)])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_leaves_no_bound(kind, number):
    data = gguf_files.blocks(kind, SHAPE)
    at = gguf_files.halves_of(kind)[-1]
    data.reshape(-1, gguf_weight._block(kind)[1])[7, at : at + 2] = np.array([number], np.float16).view(np.uint8)
    assert not math.isfinite(GgufWeight(kind, SHAPE, torch.from_numpy(data.reshape(-1))).bound())


def test_an_infinite_value_of_a_type_without_fp16_numbers_is_found():
    data = gguf_files.blocks("MXFP4", SHAPE)
    data.reshape(-1, 17)[3, 0] = 255
    assert not math.isfinite(GgufWeight("MXFP4", SHAPE, torch.from_numpy(data.reshape(-1))).bound())


def test_bytes_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(ValueError, match="340 bytes for a weight of shape"):
        GgufWeight("Q8_0", (8, 32), torch.zeros(340, dtype=torch.uint8))


def test_a_type_that_the_library_does_not_unpack_is_refused():
    with pytest.raises(ValueError, match=r"gguf \d.* does not unpack"):
        GgufWeight("Q8_1", (1, 32), torch.zeros(40, dtype=torch.uint8))
