"""nvfp4 and mxfp8 layers that ComfyUI padded: their own shape where the file tells it, and kept in their format where not."""

import pytest
import torch
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.errors import CheckpointError
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.plan.rules import Rules
from halfsafe.precision.plan.weights import Memory, plan_weights
from safetensors.torch import save_file
from support import dialects
from support.measures import relative_error
from support.storing import normal_weight

LAYER = "blocks.0.ffn.0"
MULTIPLES = {"nvfp4": 16, "mxfp8": 32}
ERRORS = {"nvfp4": 0.12, "mxfp8": 0.04}
formats = pytest.mark.parametrize("name", MULTIPLES)


def padded(name, weight):
    """A layer's tensors as ComfyUI stores them: zeros after its rows and columns, up to the format's multiple."""
    multiple = MULTIPLES[name]
    rows, columns = (-(-size // multiple) * multiple for size in weight.shape)
    whole = torch.zeros(rows, columns)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    return {f"{LAYER}.{leaf}": tensor for leaf, tensor in dialects.NATIVE[name](whole).items()}


def converted(folder, tensors, storage="bf16"):
    save_file(tensors, folder / "in.safetensors")
    summary = convert_file(folder / "in.safetensors", folder / "out.safetensors", storage, Rules())
    return open_checkpoint(folder / "out.safetensors"), summary


@formats
@pytest.mark.parametrize("storage", ["bf16", "int8", "fp8_e4m3fn"])
def test_rows_that_were_padded_are_not_written(tmp_path, name, storage):
    weight = normal_weight((130, 768))
    tensors = padded(name, weight) | {f"{LAYER}.bias": torch.zeros(130)}
    out, summary = converted(tmp_path, tensors, storage)
    stored = read_checkpoint(out, out.metadata, "out").weights[f"{LAYER}.weight"]
    assert stored.shape == (130, 768) and stored.storage == ("bf16" if summary.weights.get("bf16") else storage)
    assert relative_error(weight, stored.dequantize(torch.float32)) < ERRORS[name] + 0.03


@formats
def test_a_padded_layer_that_stays_as_it_is_keeps_its_bytes(tmp_path, name):
    tensors = padded(name, normal_weight((130, 768))) | {f"{LAYER}.bias": torch.zeros(130)}
    out, _ = converted(tmp_path, tensors, "as_file")
    assert all(torch.equal(out[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)) for key, tensor in tensors.items())


@formats
@pytest.mark.parametrize(("shape", "bias", "what"), [((130, 768), False, "rows"), ((160, 760), True, "columns"), ((130, 760), True, "columns")])
def test_a_shape_that_the_file_does_not_tell_is_not_guessed(tmp_path, name, shape, bias, what):
    tensors = padded(name, normal_weight(shape)) | ({f"{LAYER}.bias": torch.zeros(shape[0])} if bias else {})
    out, summary = converted(tmp_path, tensors)
    assert torch.equal(out[f"{LAYER}.weight"].view(torch.uint8), tensors[f"{LAYER}.weight"].view(torch.uint8))
    assert any(f"{LAYER}.weight: kept in {name}: its last {what} are zero" in note for note in summary.notes)


@formats
def test_a_layer_without_padding_is_converted_without_a_bias(tmp_path, name):
    out, summary = converted(tmp_path, padded(name, normal_weight((160, 768))))
    assert out[f"{LAYER}.weight"].shape == (160, 768) and summary.notes == []


@formats
def test_a_comfyui_without_the_format_gets_the_layers_own_shape_or_an_error(name):
    weight = normal_weight((130, 768))
    with_bias = padded(name, weight) | {f"{LAYER}.bias": torch.zeros(130)}
    old = Memory((), "bf16", ())
    plans = plan_weights(read_checkpoint(with_bias, {}, "m").weights, {}, "m", old)
    assert plans[f"{LAYER}.weight"].specs[0].shape == (130, 768)
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.weight.*in {name}, its last rows are zero"):
        plan_weights(read_checkpoint(padded(name, weight), {}, "m").weights, {}, "m", old)
