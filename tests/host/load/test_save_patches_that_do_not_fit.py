"""Patches that do not fit a weight, as of a LoRA for a model that was pruned since: left out, and told by every report."""

import logging

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.card import card_in
from safetensors.torch import load_file
from support import families, model_files
from support.saved_models import save

FITS, UNFIT, HALF = "blocks.0.ffn.2", "blocks.0.ffn.0", "blocks.1.ffn.2"
PRUNED = {FITS: (256, 1024), UNFIT: (1280, 256), HALF: (256, 1280)}
WHOLE = {HALF: (256, 1024)}


def changed(model):
    for number, layers in enumerate((PRUNED, WHOLE)):
        model = load_lora_for_models(model, None, model_files.lora(layers, size=0.1, seed=number), 1.0, 0.0)[0]
    patches = {
        f"diffusion_model.{UNFIT}.bias": ("diff", (torch.ones(1280),)),
        "diffusion_model.blocks.1.ffn.0.weight": ("diff", (torch.ones(8, 8),)),
    }
    model.add_patches(patches)
    return model


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn", "bf16"])
def test_they_are_left_out_and_told(comfy, wan, saved_folder, storage, caplog):
    plain, model = families.load(comfy, wan, storage, "bf16"), changed(families.load(comfy, wan, storage, "bf16"))
    with caplog.at_level(logging.WARNING, "halfsafe"):
        families.denoise(model)
        layers = {layer["name"]: layer["reason"] for layer in families.report(comfy, model)["layers"]}
        path = save(comfy, model, saved_folder, "as_file")
    unfit = {f"{UNFIT}.weight", f"{UNFIT}.bias", f"{HALF}.weight", "blocks.1.ffn.0.weight"}
    told = [record.getMessage() for record in caplog.records if "fit" in record.getMessage()]
    card, original = card_in(open_checkpoint(path).metadata), load_file(save(comfy, plain, saved_folder, "as_file"))
    same = {
        name
        for name, tensor in load_file(path).items()
        if name.endswith(("weight", "bias")) and torch.equal(tensor, original[name])
    }
    found = {
        "card": set(card.get("weights_that_patches_do_not_fit", ())),
        "merged": card["merged_patches"],
        "changed": set(original) - same - {name for name in original if not name.endswith(("weight", "bias"))},
        "log": all(any(name.removesuffix(".bias") in line for line in told) for name in (UNFIT, HALF)),
        "report": {
            name: [part for part in layers[name].split("; ") if "LoRA" in part or "anew" in part]
            for name in (FITS, UNFIT, HALF, "blocks.1.ffn.0")
        },
    }
    left_out, added = "LoRAs ignored because they do not fit the weight: 1", "LoRAs added to the layer's output: 1"
    reasons = {FITS: [added], UNFIT: [left_out], HALF: [added, left_out], "blocks.1.ffn.0": [left_out]}
    if storage == "bf16":  # ComfyUI merges LoRAs into such weights
        reasons = {name: [text for text in texts if text != added] for name, texts in reasons.items()}
    expected = {
        "card": unfit,
        "merged": 2,
        "changed": {f"{FITS}.weight", f"{HALF}.weight"},
        "log": True,
        "report": reasons,
    }
    assert found == expected, "\n".join(f"{name}: {found[name]}, expected {expected[name]}" for name in found)
