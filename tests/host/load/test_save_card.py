"""The model card of Save Model: beside the file that stock ComfyUI reads, switched off, left alone, and told where it fails."""

import errno
import json
import os
import re

import pytest
import torch
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.plan.nvfp4 import DOUBTS
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.report import model_card
from safetensors.torch import load_file
from support import model_files, tiny_models
from support.measures import relative_error
from support.saved_models import LAYER, load, stock, with_lora


def save(comfy, model, folder, storage="int8", rules=None, **options):
    """Save Model: the path of the file, and what the node says."""
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    output = node.execute(model, "diffusion_models/carded", storage, rules, **options)
    return folder.parent / output.args[0], json.loads(output.ui["halfsafe_result"][0])["sentence"]


def test_a_model_with_a_lora_is_described_as_it_was_merged(comfy, wan, lora_file, saved_folder):
    model = with_lora(comfy, load(comfy, wan.name, "as_file", "bf16"), lora_file)
    path, said = save(comfy, model, saved_folder)
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    weights = read_checkpoint(file := open_checkpoint(path), file.metadata, path).weights
    exact = load_file(wan)
    merged = {name: tensor.float() for name, tensor in exact.items() if name.endswith(".weight")}
    merged[f"{LAYER}.weight"] += model_files.lora_delta(load_file(lora_file), LAYER)
    int8 = {name: weight for name, weight in weights.items() if weight.storage == "int8"}
    errors = [relative_error(merged[name], weight.dequantize(torch.float32)) for name, weight in int8.items()]
    row = re.search(r"\| int8 \| (\d+) \|[^|]*\|[^|]*\| ([\d.]+) % \|", text)
    assert int(row[1]) == len(int8) and float(row[2]) == pytest.approx(100 * sum(errors) / len(errors), rel=0.05)
    assert f"`{wan.name}`" in text and str(wan.parent) not in text and str(saved_folder) not in text
    assert re.search(r"LoRAs or other patches of \d+ weights are merged\.", text)
    assert "*Save Model (Halfsafe)* with storage `int8`" in text and "*Load Diffusion Model*" in text
    assert f"Its model card is {path.stem}.md." in said
    assert stock(comfy, path).model is not None


def test_the_card_is_off_where_it_is_switched_off(comfy, wan, saved_folder):
    path, said = save(comfy, load(comfy, wan.name, "as_file", "bf16"), saved_folder, card=False)
    assert path.exists() and not path.with_suffix(".md").exists() and "model card" not in said


@pytest.mark.parametrize("fault", ["exists", "full"])
def test_a_card_that_cannot_be_written_costs_nothing_but_itself(comfy, wan, saved_folder, monkeypatch, fault):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fault == "exists":  # ComfyUI counts the cards of a folder, too: its next number is of neither
        monkeypatch.setattr(os.path, "lexists", lambda path: str(path).endswith(".md"))
    else:
        monkeypatch.setattr(model_card, "replacing", full)
    path, said = save(comfy, load(comfy, wan.name, "as_file", "bf16"), saved_folder)
    assert not path.with_suffix(".md").exists() and stock(comfy, path).model is not None
    words = "exists and was left as it is" if fault == "exists" else os.strerror(errno.ENOSPC)
    assert words in said and said.startswith(f"Saved diffusion_models/{path.name}, ")


def test_rules_of_measure_my_card_bring_their_figures(comfy, wan, saved_folder):
    figures = "int8/auto, 0.512 s/step, 6.20 GiB, 31.2 dB, NVIDIA H200, driver 580.1, torch 2.11.0, WAN21"
    rules = rules_from(f"* storage=int8  # measured: {figures}")
    path, _ = save(comfy, load(comfy, wan.name, "as_file", "bf16"), saved_folder, "as_file", rules)
    assert f"## Measured\n\n- {figures}\n" in path.with_suffix(".md").read_text(encoding="utf-8")


def test_krea_2_in_nvfp4_is_told_by_each_node_that_makes_it(comfy, models_dir, saved_folder):
    tiny_models.krea2(models_dir / "diffusion_models" / "krea2_card.safetensors")
    told = DOUBTS["Krea 2"]
    path, said = save(comfy, load(comfy, "krea2_card.safetensors", "as_file", "bf16"), saved_folder, "nvfp4")
    assert told in said and "Krea 2" in path.with_suffix(".md").read_text(encoding="utf-8")
    loaded = load(comfy, "krea2_card.safetensors", "nvfp4", "bf16")
    report = json.loads(comfy.run("HalfsafeReport", model=loaded, after=None)[1])
    assert any(told in note for note in report["notes"])
    stock_model = stock(comfy, models_dir / "diffusion_models" / "krea2_card.safetensors", torch.bfloat16)
    why = comfy.run("HalfsafeAutoPrecision", model=stock_model, goal="balanced", guard="off", storage="nvfp4")[3]
    assert told in why
    assert told not in save(comfy, stock_model, saved_folder, "int8")[1]
