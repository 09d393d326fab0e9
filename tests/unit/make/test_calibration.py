"""A calibration as a file, its model, and files that were rounded by it."""

import json

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError, HalfsafeError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.card import card_in, source_of
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.make import calibrated as weights_of
from halfsafe.precision.make.calibration import KEY, CalibrationData, Products
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support.measures import relative_error

LAYERS = {
    "blocks.0.attn": (96, 256),
    "blocks.0.mlp": (256, 512),
    "blocks.1.attn": (96, 256),
    "blocks.1.mlp": (256, 512),
}
OTHERS = [name for name, row in FORMAT_OF_STORAGE.items() if row.can_write and row.calibrates and name != "int8"]
SEEN = ("blocks.0.attn", "blocks.0.mlp", "blocks.1.attn")


def inputs(layer: str, seed: int = 0, tokens: int = 600) -> torch.Tensor:
    columns = LAYERS[layer][1]
    mix = torch.randn(columns, columns, generator=torch.Generator().manual_seed(len(layer))) * torch.logspace(
        -2, 0, columns
    )
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)) @ mix.T


def model_file(path, seed=0, prefix=""):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{prefix}{layer}.weight": torch.randn(shape, generator=generator).bfloat16() for layer, shape in LAYERS.items()
    }
    save_file(tensors | {f"{prefix}norm.weight": torch.ones(256)}, path)
    return path


def calibrated(path, layers=SEEN, tokens=600) -> CalibrationData:
    found = CalibrationData(source_of(open_checkpoint(path)), "TEST", 256, {}, 1, 8)
    for layer in layers:
        found.layers[layer] = Products.empty(LAYERS[layer][1], 256)
        found.layers[layer].add(inputs(layer, tokens=tokens))
    return found


def converted(source, target, storage, calibration=None):
    summary = convert_file(source, target, storage, rules_from("", "none"), calibration=calibration)
    return read_checkpoint(open_checkpoint(target), {}, target).weights, summary


def error_of(weights, exact, layer, prefix="") -> float:
    x, name = inputs(layer, seed=9), f"{prefix}{layer}.weight"
    return relative_error(x @ exact[name].float().T, x @ weights[name].dequantize(torch.float32).T)


@pytest.mark.parametrize(
    ("storage", "prefix"), [("int8", ""), ("int8", "model.diffusion_model."), *((name, "") for name in OTHERS)]
)
def test_a_file_is_converted_closer(tmp_path, monkeypatch, storage, prefix):
    monkeypatch.setattr(weights_of, "VALUES", 1 << 14)  # some rows at a time
    source = model_file(tmp_path / "model.safetensors", prefix=prefix)
    near, _ = converted(source, tmp_path / "near.safetensors", storage)
    found, summary = converted(source, tmp_path / "found.safetensors", storage, calibrated(source))
    exact = load_file(source)
    for layer in SEEN:
        assert error_of(found, exact, layer, prefix) < 0.85 * error_of(near, exact, layer, prefix)
        before, after = (weights[f"{prefix}{layer}.weight"].tensors for weights in (near, found))
        assert before.keys() == after.keys() and all(torch.equal(before[leaf], after[leaf]) for leaf in before)
    unseen = f"{prefix}blocks.1.mlp.weight"
    assert torch.equal(
        load_file(tmp_path / "near.safetensors")[unseen].float(),
        load_file(tmp_path / "found.safetensors")[unseen].float(),
    )
    assert any("3 layers rounded with the calibration" in note for note in summary.notes)


def test_the_card_says_what_was_rounded_by_what(tmp_path):
    source = model_file(tmp_path / "model.safetensors")
    calibration = calibrated(source)
    calibration.layers["blocks.0.attn"].tokens = 0
    converted(source, tmp_path / "found.safetensors", "int8", calibration)
    card = card_in(open_checkpoint(tmp_path / "found.safetensors").metadata)
    assert card["calibration"] == {
        "method": "GPTQ",
        "model": "model.safetensors",
        "runs": 1,
        "model_calls": 8,
        "layers": 2,
    }


def test_another_model_s_calibration_is_an_error_that_names_both(tmp_path):
    source, other = model_file(tmp_path / "model.safetensors"), model_file(tmp_path / "finetune.safetensors", seed=1)
    with pytest.raises(HalfsafeError, match=r"model\.safetensors, not finetune\.safetensors"):
        converted(other, tmp_path / "found.safetensors", "int8", calibrated(source))
    assert not (tmp_path / "found.safetensors").exists()
    calibration = calibrated(source)
    calibration.layers["blocks.7.attn"] = Products.empty(256, 256)
    with pytest.raises(HalfsafeError, match=r"layer 'blocks\.7\.attn' is missing or has another"):
        converted(source, tmp_path / "found.safetensors", "int8", calibration)


def test_it_is_read_as_it_was_written(tmp_path):
    source = model_file(tmp_path / "model.safetensors")
    found = calibrated(source)
    found.layers["blocks.0.attn"].left_out = 3
    found.save(tmp_path / "kept.safetensors")
    again = CalibrationData.read(tmp_path / "kept.safetensors")
    assert (again.model, again.cls, again.width, again.runs, again.calls) == (found.model, "TEST", 256, 1, 8)
    for name, products in found.layers.items():
        kept = again.layers[name]
        assert (kept.tokens, kept.left_out) == (products.tokens, products.left_out)
        assert torch.equal(kept.blocks.triu(), products.blocks.triu()) and torch.equal(kept.blocks, kept.blocks.mT)
    size = sum(products.blocks.nbytes for products in found.layers.values())
    assert (tmp_path / "kept.safetensors").stat().st_size < 0.55 * size
    more = again.copied()
    more["blocks.0.mlp"].add(inputs("blocks.0.mlp"))
    assert more["blocks.0.mlp"].tokens == 1200 and again.layers["blocks.0.mlp"].tokens == 600
    torch.testing.assert_close(more["blocks.0.mlp"].blocks, 2 * found.layers["blocks.0.mlp"].blocks)
    assert torch.equal(again.layers["blocks.0.mlp"].blocks.triu(), found.layers["blocks.0.mlp"].blocks.triu())


@pytest.mark.parametrize("change", ["no key", "other shape", "a tensor is gone", "NaN", "not JSON", "numbers"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, change):
    path = tmp_path / "kept.safetensors"
    calibrated(model_file(tmp_path / "model.safetensors")).save(path)
    file = open_checkpoint(path)
    metadata, tensors = dict(file.metadata), {name: tensor.clone() for name, tensor in file.items()}
    if change == "no key":
        metadata = {"format": "pt"}
    elif change == "not JSON":
        metadata[KEY] = "{"
    elif change == "numbers":
        values = json.loads(metadata[KEY])
        metadata[KEY] = json.dumps(values | {"layers": {"blocks.0.attn": [256]}})
    elif change == "other shape":
        tensors["blocks.0.attn"] = torch.zeros(1, 5)
    elif change == "NaN":
        tensors["blocks.0.attn"][0, 0] = float("nan")
    else:
        del tensors["blocks.0.attn"]
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=r"kept\.safetensors"):
        CalibrationData.read(path)


def test_layers_that_met_nothing_are_named_and_rounded_to_nearest(tmp_path):
    source = model_file(tmp_path / "model.safetensors")
    found = calibrated(source, tokens=0)
    assert "none was called" in found.text() and "not called: blocks.0.attn, blocks.0.mlp" in found.text()
    _, summary = converted(source, tmp_path / "found.safetensors", "int8", found)
    assert any("The calibration was not used" in note for note in summary.notes)


@pytest.mark.parametrize("storage", ["bf16", "as_file"])
def test_a_file_that_it_rounds_nothing_of_does_not_claim_it(tmp_path, storage):
    source, target = model_file(tmp_path / "model.safetensors"), tmp_path / "found.safetensors"
    convert_file(source, target, storage, rules_from("", "none"), calibration=calibrated(source))
    assert "calibration" not in card_in(open_checkpoint(target).metadata)
