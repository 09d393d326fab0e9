"""ComfyUI's 4- and 6-bit codes by comfy-kitchen's own functions, in a process with one that has both."""

import inspect
import os
import subprocess
import sys

import pytest
import torch
from halfsafe.precision.base.errors import StorageNotHeld
from halfsafe.precision.formats.checkpoint import StoredWeight, read_checkpoint
from halfsafe.precision.formats.format import kitchen_function
from halfsafe.precision.formats.int8 import rotated, rotation_group
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.plan.layers import plan_weights
from setup.environment import ROOT, clean_environ, kitchen_folder
from support.measures import relative_error
from support.storing import normal_weight, tensors_in

NAME = "layer.weight"
MAKE = kitchen_function("quantize_w4a8_int8_weight")
HAS_6_BITS = MAKE is not None and "bits" in inspect.signature(MAKE).parameters
BITS = {"w4a8": {}, "w6a8": {"bits": 6}}
ERRORS = {"w6a8": 0.022, "w4a8": 0.08}
needs_6_bits = pytest.mark.skipif(not HAS_6_BITS, reason="the last test runs it with a newer comfy-kitchen")


def spiky(shape):
    """A weight whose rotated rows have a few values that are far larger than the others: its codebook is fitted."""
    return rotated(
        normal_weight(shape) * torch.randn(shape, generator=torch.Generator().manual_seed(1)) ** 5,
        rotation_group(shape[1]),
    )


def made(weight, storage):
    return {name.rpartition(".")[2]: tensor for name, tensor in tensors_in(StoredWeight(NAME, weight), storage).items()}


@needs_6_bits
@pytest.mark.parametrize("make", [normal_weight, spiky])
@pytest.mark.parametrize("shape", [(64, 256), (128, 320), (33, 64), (257, 1536)])
@pytest.mark.parametrize("storage", BITS)
def test_tensors_and_values_are_those_of_comfy_kitchen(storage, shape, make):
    weight, group = make(shape), rotation_group(shape[1])
    data, relative, channel, _, codebook = MAKE(weight, convrot_groupsize=group, **BITS[storage])
    found = made(weight, storage)
    expected = {"weight": data, "weight_s_rel": relative, "weight_s_channel": channel, "weight_codebook": codebook}
    for leaf, tensor in expected.items():
        assert tensor is None or torch.equal(found[leaf].view(torch.uint8), tensor.view(torch.uint8)), leaf
    stored = read_checkpoint({f"layer.{leaf}": tensor for leaf, tensor in found.items()}, {}, "m").weights[NAME]
    options = {"codebook": codebook, "convrot_groupsize": group, "output_dtype": torch.float32}
    assert torch.equal(
        stored.dequantize(torch.float32),
        kitchen_function("dequantize_w4a8_int8_weight")(data, relative, channel, **options),
    )
    assert make is spiky or relative_error(weight, stored.dequantize(torch.float32)) < ERRORS[storage]


@needs_6_bits
def test_parts_of_a_weight_share_the_codebook_of_the_whole(monkeypatch):
    weight = spiky((96, 320))
    whole = made(weight, "w4a8")
    monkeypatch.setattr("halfsafe.precision.formats.stored_weight.CHUNK", 16 * 320)
    parts = made(weight, "w4a8")
    assert all(torch.equal(parts[leaf].view(torch.uint8), tensor.view(torch.uint8)) for leaf, tensor in whole.items())


def test_six_bits_need_a_multiple_of_32_inputs():
    w4a8, w6a8 = FORMAT_OF_STORAGE["w4a8"], FORMAT_OF_STORAGE["w6a8"]
    assert "multiple of 32 inputs; this layer has 48" in w6a8.why_not(8, 48)
    assert not w6a8.why_not(8, 320) and not w4a8.why_not(8, 48) and "not a multiple of 16" in w4a8.why_not(8, 100)


def test_without_such_a_comfy_kitchen_they_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("halfsafe.precision.formats.format.kitchen_function", lambda name: None)
    for storage, since in (("w4a8", "0.31.0"), ("w6a8", "0.38.0")):
        with pytest.raises(StorageNotHeld, match=rf"storage={storage}.*came with ComfyUI {since}"):
            plan_weights({NAME: StoredWeight(NAME, normal_weight((16, 64)))}, {NAME: LayerPlan(storage)}, "file")


@pytest.mark.skipif(HAS_6_BITS, reason="this process has it")
def test_the_same_in_a_process_with_a_newer_comfy_kitchen():
    """The one that `scripts/test.py` puts into its cache; one process holds one. Before a release, every test that asks for a format runs with it."""
    folder = kitchen_folder()
    if not folder.exists():
        (pytest.fail if os.environ.get("HALFSAFE_STRICT") else pytest.skip)(
            f"run scripts/test.py, which puts {folder.name} into its cache"
        )
    paths = ["tests/unit/formats/test_w4a8.py"]
    if os.environ.get("HALFSAFE_RELEASE"):
        paths += ["tests/unit/formats/test_format.py", "tests/unit/make/test_calibrated.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(PYTHONPATH=str(folder)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
