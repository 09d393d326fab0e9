"""A process of its own with ComfyUI's dynamic VRAM turned on, in the order of its ``main.py``: comfy-aimdo before anything
touches CUDA, its devices after, then the patcher class. Prints one JSON line: way of computing -> errors of two runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from setup.comfyui_server import make_base_directory
from support import inprocess

ROOT = Path(__file__).absolute().parents[2]
LAYERS = {"blocks.0.ffn.0": (1024, 256), "blocks.1.ffn.2": (256, 1024), "blocks.1.self_attn.v": (256, 256)}
WAYS = {"fp32": "as_file", "bf16": "as_file", "fp16": "fp16", "fp16_safe": "fp32", "fp8": "fp8_e4m3fn"}


def errors(models: Path) -> dict:
    """Way of computing -> relative errors of two runs with a LoRA, against static fp32 of the same storage."""
    from comfy.sd import load_lora_for_models
    from halfsafe.nodes.host.load.models import load_diffusion_model
    from halfsafe.precision.plan.rules import Rules
    from support import families, model_files, tiny_models
    from support.measures import relative_error

    path, tensors = tiny_models.wan(models / "wan.safetensors"), model_files.lora(LAYERS, size=0.3)

    def sample(storage: str, compute: str, runs: int, static: bool) -> list:
        model = load_diffusion_model(str(path), storage, compute, Rules(), disable_dynamic=static)
        assert model.is_dynamic() != static
        model = load_lora_for_models(model, None, dict(tensors), 1.0, 0.0)[0]
        return [families.sample(model, "wan").float().cpu() for _ in range(runs)]

    found = {}
    for compute, storage in WAYS.items():
        reference = sample("fp32" if compute != "fp8" else storage, "fp32", 1, True)[0]
        found[compute] = [relative_error(reference, result) for result in sample(storage, compute, 2, False)]
    return found


def main(comfyui: Path, folder: Path) -> None:
    make_base_directory(folder, ROOT)
    inprocess.setup_comfyui(comfyui, folder, *(["--cpu"] if os.environ.get("HALFSAFE_DRY_RUN") else []))
    if not inprocess.turn_on_dynamic_vram():
        print(
            json.dumps({"unavailable": "comfy-aimdo lends CUDA memory, and does not work with this driver or device"})
        )
        return
    inprocess.node_classes(inprocess.load_pack())
    print(json.dumps(errors(folder)))
