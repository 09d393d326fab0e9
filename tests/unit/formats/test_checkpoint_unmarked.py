"""Quantized files whose marks a tool dropped: what the file no longer says is refused, or told wherever the file is read."""

import pytest
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import dialects
from support.measures import relative_error

FORMATS = [*dialects.NATIVE, "float8_e4m3fn", "unrotated"]


def unmarked(folder, name):
    weights, biases = dialects.reference(shape=(256, 384))
    path = folder / f"{name}.safetensors"
    if name == "float8_e4m3fn":
        dialects.comfy_quant(path, weights, biases)
    elif name == "unrotated":
        tensors = {
            f"{layer}.{leaf}": value
            for layer, weight in weights.items()
            for leaf, value in dialects._int8(weight.float(), False).items()
        }
        dialects.save(path, tensors, biases)
    else:
        dialects.in_format(path, weights, biases, name)
    save_file({key: tensor for key, tensor in load_file(path).items() if not key.endswith("comfy_quant")}, path)
    return path, weights


def outcome(path, weights):
    """refused, told, right or WRONG."""
    file = open_checkpoint(path)
    try:
        checkpoint = read_checkpoint(file, file.metadata, path)
        errors = [
            relative_error(weight.float(), checkpoint.weights[f"{layer}.weight"].dequantize(weight.dtype))
            for layer, weight in weights.items()
        ]
    except HalfsafeError:
        return "refused"
    except RuntimeError:  # of another shape: ComfyUI refuses it by the layer's name
        errors = [float("inf")]
    if checkpoint.undecided.keys() == {f"{layer}.weight" for layer in weights}:
        what = next(iter(checkpoint.undecided.values()))
        converted = convert_file(path, path.with_suffix(".converted.safetensors"), "bf16", rules_from())
        told = [
            inspect_file(path).notes,
            converted.notes,
            checkpoint.notes,
            [problem["text"] for problem in inspect_file(path, values=True).problems],
        ]
        return "told" if all(any(what in note for note in notes) for notes in told) else "WRONG"
    return "right" if max(errors) < 0.2 else "WRONG"


def test_what_a_file_does_not_say_is_refused_or_told(tmp_path):
    found = {name: outcome(*unmarked(tmp_path, name)) for name in FORMATS}
    assert "WRONG" not in found.values(), "\n".join(f"{name:15}{how}" for name, how in found.items())
    assert found["int8"] == found["unrotated"] == "told" and found["float8_e4m3fn"] == "right", found


@pytest.mark.parametrize("name", ["int8", "mxfp8"])
def test_a_marked_file_leaves_nothing_open(tmp_path, name):
    weights, biases = dialects.reference()
    path = dialects.in_format(tmp_path / "marked.safetensors", weights, biases, name)
    assert not inspect_file(path, values=True).problems and not inspect_file(path).notes
