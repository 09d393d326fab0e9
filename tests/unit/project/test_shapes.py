"""The reader of pictures that other tests rely on, the model files of the shapes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import shapes

EVERYTHING = shapes.all_shapes()


@pytest.mark.parametrize("name", shapes.SHAPES)
@pytest.mark.parametrize("size", [64, 128])
def test_rendered_shapes_are_read_as_what_they_are(name: str, size: int) -> None:
    chance = random.Random(f"{name} {size}")
    for shape in (s for s in EVERYTHING if s.shape == name):
        centre = (chance.uniform(-0.15, 0.15), chance.uniform(-0.15, 0.15))
        picture = shapes.render(shape, centre, chance.uniform(0.5, 0.75), size)
        assert shapes.read_picture(picture.permute(1, 2, 0).numpy()) == shape


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, float("nan")])
def test_an_empty_picture_shows_nothing(value: float) -> None:
    assert shapes.read_picture(np.full((128, 128, 3), value)) is None


def test_trained_files_are_finite_fp16_and_small() -> None:
    for path in (shapes.MODEL, shapes.VAE):
        for name, tensor in load_file(path).items():
            assert tensor.dtype == torch.float16, name
            assert tensor.isfinite().all(), name
    assert shapes.MODEL.stat().st_size + shapes.VAE.stat().st_size < 6_500_000


def test_overflowing_twin_holds_the_same_numbers_scaled() -> None:
    plain = load_file(shapes.MODEL)
    twin = shapes.overflowing(plain)
    scaled = {name for name in plain if any(part in name for part in shapes.RESIDUAL_WRITERS)}
    assert plain.keys() == twin.keys()
    assert len(scaled) >= 8
    for name, tensor in plain.items():
        assert torch.equal(twin[name], tensor * 2.0**13 if name in scaled else tensor), name
        assert twin[name].isfinite().all(), name
