"""Scales per block whose size the shapes do not tell at once."""

import pytest
import torch
from halfsafe.precision.formats.checkpoint import read_checkpoint
from support import dialects
from support.measures import relative_error


@pytest.mark.parametrize(("shape", "block"), [((300, 200), 64), ((300, 200), 32), ((300, 260), 128), ((192, 96), 48), ((320, 192), 64)])
def test_blocks_of_any_usual_size_are_read_at_the_formats_floor(shape, block):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, shape[0])[:, None]
    data, scale = dialects.per_block(weight, block, block)
    found = read_checkpoint({"a.weight": data, "a.weight_scale_inv": scale}, {}, "m")
    assert relative_error(weight, found.weights["a.weight"].dequantize(torch.float32)) < 0.03


@pytest.mark.parametrize(("shape", "scale", "noted"), [((300, 200), (5, 4), True), ((300, 200), (10, 7), True), ((256, 384), (2, 3), False)])
def test_a_block_size_that_was_assumed_is_noted(shape, scale, noted):
    tensors = {"a.weight": torch.ones(shape).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(scale)}
    assert any("blocks" in note for note in read_checkpoint(tensors, {}, "m").notes) == noted
