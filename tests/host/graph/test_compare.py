"""The compare node on images of the real ComfyUI."""

import json

import pytest
import torch
from halfsafe.precision.base.errors import HalfsafeError

NODE = "HalfsafeCompareImages"


def image(batch=1, size=64, seed=0):
    return torch.rand(batch, size, size, 3, generator=torch.Generator().manual_seed(seed))


def test_text_picture_and_what_the_node_shows(comfy):
    a = image(2)
    output = comfy.nodes[NODE].execute(reference=a, candidate=(a + 0.01).clamp(0, 1))
    text, picture = output.args
    assert [*output.ui["text"]] == [text]
    shown = json.loads(output.ui["halfsafe_result"][0])
    assert shown["messages"][shown["sentence"]]["template"] == "The difference is hard to see: {psnr}."
    assert len(text.splitlines()) == 4 and "PSNR 40" in text
    assert picture.shape == a.shape and 0 <= picture.min() <= picture.max() <= 1


def test_identical_images_and_different_sizes(comfy):
    text, picture = comfy.run(NODE, reference=image(), candidate=image())
    assert text.startswith("identical") and not picture.any()
    with pytest.raises(HalfsafeError, match="32 x 32"):
        comfy.run(NODE, reference=image(), candidate=image(size=32))
