"""The card in the metadata of converted files, and what inspect prints of it."""

import json
from pathlib import Path

import pytest
import torch
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file, inspection_text
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats import card
from halfsafe.precision.formats.card import pack_version
from halfsafe.precision.formats.checkpoint import CARD_KEY
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import save_file
from support import dialects


def model(folder):
    """A small bf16 model: two Linear layers, a norm, an embedder that the default preset keeps, a convolution."""
    weights, _ = dialects.reference()
    tensors = {f"{layer}.weight": weight for layer, weight in weights.items()}
    tensors |= {"blocks.0.norm.weight": torch.ones(64), "time_embedding.0.weight": torch.randn(64, 64).bfloat16()}
    tensors |= {"conv.weight": torch.randn(4, 4, 3, 3).half()}
    save_file(tensors, folder / "in.safetensors", {"format": "pt", "author": "me"})
    return folder / "in.safetensors", tensors


def card_of(path):
    return json.loads(open_checkpoint(path).metadata[CARD_KEY])


def test_the_card_tells_how_a_file_was_made(tmp_path):
    source, _ = model(tmp_path)
    convert_file(source, tmp_path / "out.safetensors", "fp8_e4m3fn", rules_from("blocks.0.ffn.2 storage=int8"))
    card, size = card_of(tmp_path / "out.safetensors"), source.stat().st_size
    number = card["source"].pop("sha256_of_header_and_4096_bytes_of_each_tensor")
    assert number == open_checkpoint(source).fingerprint() and len(number) == 64
    assert card == {
        "halfsafe": pack_version(),
        "needs_comfyui": "0.27.0",
        "asked_storage": "fp8_e4m3fn",
        "weights": {"bf16": 1, "fp16": 1, "fp32": 1, "fp8_e4m3fn": 1, "int8": 1},
        "rules": {"presets": ["keep sensitive layers"], "lines": ["blocks.0.ffn.2 storage=int8"]},
        "merged_patches": 0,
        "source": {"file": "in.safetensors", "bytes": size},
    }


def test_converting_twice_gives_the_same_bytes_whatever_an_earlier_card_said(tmp_path):
    source, _ = model(tmp_path)
    for name in ("a", "b"):
        convert_file(source, tmp_path / f"{name}.safetensors", "int8", rules_from())
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    convert_file(tmp_path / "a.safetensors", tmp_path / "again.safetensors", "bf16", rules_from(preset="none"))
    card = card_of(tmp_path / "again.safetensors")
    assert card["source"]["file"] == "a.safetensors" and card["needs_comfyui"] is None


def test_files_of_one_architecture_have_fingerprints_of_their_own(tmp_path):
    first, tensors = model(tmp_path)
    tensors["blocks.0.ffn.0.weight"] = tensors["blocks.0.ffn.0.weight"] * 1.5
    save_file(tensors, tmp_path / "tuned.safetensors", {"format": "pt", "author": "me"})
    numbers = [open_checkpoint(path).fingerprint() for path in (first, first, tmp_path / "tuned.safetensors")]
    assert numbers[0] == numbers[1] != numbers[2]


def test_inspect_prints_the_card(tmp_path):
    source, _ = model(tmp_path)
    convert_file(source, tmp_path / "out.safetensors", "fp8_e4m3fn", rules_from())
    inspection = inspect_file(tmp_path / "out.safetensors")
    text = inspection_text(inspection)
    assert inspection.card["asked_storage"] == "fp8_e4m3fn" and inspect_file(source).card is None
    assert 'needs comfyui: "0.4.0"' in text and '"file": "in.safetensors"' in text


@pytest.mark.parametrize("text", ["", "[]", "{", '{"source": "\\u001b[2J"}'])
def test_inspect_takes_any_text_where_a_card_may_be(tmp_path, text):
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "a.safetensors", {CARD_KEY: text})
    assert "\x1b" not in inspection_text(inspect_file(tmp_path / "a.safetensors"))


def test_the_version_is_that_of_the_packs_folder_and_else_of_the_installed_package(monkeypatch, tmp_path):
    project = (Path(__file__).absolute().parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{pack_version()}"\n' in project
    pack_version.cache_clear()
    monkeypatch.setattr(card, "__file__", str(tmp_path / "halfsafe" / "precision" / "formats" / "card.py"))
    monkeypatch.setattr(card, "version", {"halfsafe": "7.0"}.get)
    assert pack_version() == "7.0"
    pack_version.cache_clear()
