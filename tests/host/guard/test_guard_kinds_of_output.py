"""Check Finite on every kind of output that holds tensors: it can be connected, and names what is not finite as people do."""

import math
from types import SimpleNamespace

import pytest
import torch
from comfy.clip_vision import Output
from comfy.nested_tensor import NestedTensor
from comfy_api.latest import InputImpl, Types

BAD, GOOD = torch.full((1, 2, 3), math.nan), torch.ones(1, 2, 3)
VIDEO, SOUND = torch.ones(1, 4, 2, 4, 4), torch.full((1, 8, 4, 16), math.nan)


def video(images, audio):
    return InputImpl.VideoFromComponents(Types.VideoComponents(images=images, audio=audio, frame_rate=24))


def seen(hidden):
    output = Output()
    output.last_hidden_state, output.image_embeds = hidden, GOOD
    return output


KINDS = {
    "AUDIO": ({"waveform": BAD, "sample_rate": 44100}, "audio"),
    "VIDEO": (video(torch.full((2, 4, 4, 3), math.nan), {"waveform": GOOD, "sample_rate": 44100}), "video"),
    "VIDEO with sound": (video(torch.ones(2, 4, 4, 3), {"waveform": BAD, "sample_rate": 44100}), "audio"),
    "MASK": (BAD, ""),
    "CLIP_VISION_OUTPUT": (seen(BAD), "last_hidden_state"),
    "LATENT of sound": ({"samples": NestedTensor((VIDEO, SOUND))}, "audio"),
    "LATENT of other parts": ({"samples": NestedTensor((GOOD, BAD))}, "samples[1]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_named(comfy, kind):
    value, name = KINDS[kind]
    passed, finite, text = comfy.run("HalfsafeCheckFinite", value=value, on_nan="report")
    assert passed is value and not finite and text.startswith(f"{name}: ")


def test_it_connects_to_all_of_them(comfy):
    (socket,) = [one for one in comfy.nodes["HalfsafeCheckFinite"].GET_SCHEMA().inputs if one.id == "value"]
    allowed = {kind.io_type for kind in socket.template.allowed_types}
    assert {name.partition(" ")[0] for name in KINDS} <= allowed and {"LATENT", "IMAGE", "CONDITIONING"} <= allowed


def test_another_kind_is_refused_by_name(comfy):
    with pytest.raises(Exception, match="SimpleNamespace.*AUDIO"):
        comfy.run("HalfsafeCheckFinite", value=SimpleNamespace(), on_nan="report")
