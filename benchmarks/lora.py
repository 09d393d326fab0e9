"""LoRAs on 8-bit weights: added to results, as the pack does, against merged into the weights, as ComfyUI does."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from . import reporting
from .host import load_comfy

EFFECTS = (6e-4, 1e-3, 5e-3, 1e-2, 5e-2)
RANK = 16
WAYS = (
    ("fp8_e4m3fn", "fp16_safe"),
    ("fp8_e4m3fn", "bf16"),
    ("fp8_e4m3fn", "fp8"),
    ("int8", "fp16_safe"),
    ("int8", "bf16"),
    ("int8", "auto"),
)
LIMIT = 1.1


def run_lora(args: argparse.Namespace) -> dict:
    """Error of a call with a LoRA, to the error without one, by model, storage, compute and how much the LoRA changes the result."""
    os.environ["HALFSAFE_DEVICE_PROFILE"] = "sm_89"
    comfy = load_comfy(args)
    from support import shapes, tiny_models

    trained = Path(shutil.copy(shapes.MODEL, comfy.folder))
    drawn = {"cond": shapes.conditioning(comfy.folder), "size": shapes.SIZE // 8}
    models = {
        "small Wan, random weights": ("wan", tiny_models.wan(comfy.folder / "wan.safetensors"), {}),
        "shapes model, trained": ("hunyuan_video", trained, drawn),
    }
    rows = [{"model": model, **row} for model, how in models.items() for row in _rows_of(comfy, *how)]
    worst = max(row["added"] / row["without"] for row in rows)
    targets = {"error_to_without": reporting.target(round(worst, 3), LIMIT)}
    return {"benchmark": "lora", "cost": {"rank": RANK}, "rows": rows, "targets": targets, "markdown": markdown(rows)}


def _rows_of(comfy, family: str, path: Path, inputs: dict) -> Iterator[dict]:
    from support import families, model_files

    exact = families.load(comfy, path, "fp32", "fp32")
    tensors = model_files.lora(_layers(families.load(comfy, path, "int8", "auto")), rank=RANK)
    call = families.capture(exact, family, **inputs)
    strengths = _strengths(exact, tensors, call)
    for storage, compute in WAYS:
        print(f"{path.stem}: {storage} {compute}", file=sys.stderr, flush=True)
        ours = families.load(comfy, path, storage, compute)
        with _merging():
            core = families.load(comfy, path, storage, compute)
        for row in _rows(exact, ours, core, tensors, strengths, call):
            yield {"storage": storage, "compute": compute, **row}


def _layers(model) -> dict[str, tuple[int, int]]:
    """The layers whose weights are quantized, with (outputs, inputs)."""
    from comfy.quant_ops import QuantizedTensor

    named = model.model.diffusion_model.named_modules()
    return {
        name: tuple(module.weight.shape)
        for name, module in named
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }


def _strengths(exact, tensors, call) -> dict[float, float]:
    from support import families
    from support.measures import relative_error

    plain, found = families.replay(exact, call), {}
    for effect in EFFECTS:
        strength = effect
        for _ in range(4):
            strength *= effect / relative_error(plain, families.replay(_with_lora(exact, tensors, strength), call))
        found[effect] = strength
    return found


def _with_lora(model, tensors, strength: float):
    from comfy.sd import load_lora_for_models

    return load_lora_for_models(model, None, tensors, strength, 0.0)[0]


@contextlib.contextmanager
def _merging() -> Iterator[None]:
    """Models loaded inside merge LoRAs into their weights."""
    from halfsafe.nodes.host.load import models

    kept = models.keep_low_rank_unmerged
    models.keep_low_rank_unmerged = lambda patcher: None
    try:
        yield
    finally:
        models.keep_low_rank_unmerged = kept


def _rows(exact, ours, core, tensors, strengths: dict[float, float], call) -> Iterator[dict]:
    from support import families
    from support.measures import relative_error

    plain, plain_exact = families.replay(ours, call), families.replay(exact, call)
    without = relative_error(plain_exact, plain)
    for effect, strength in strengths.items():
        reference = families.replay(_with_lora(exact, tensors, strength), call)
        row = {"effect": effect, "without": float(f"{without:.2e}")}
        for name, model in (("merged", core), ("added", ours)):
            result = families.replay(_with_lora(model, tensors, strength), call)
            row[name] = float(f"{relative_error(reference, result):.2e}")
            row[f"{name}_effect"] = float(f"{relative_error(reference - plain_exact, result - plain):.2e}")
        yield row


def markdown(rows: list[dict]) -> str:
    """The rows as a table."""
    lines = [
        "| model | storage | compute | LoRA changes | error without | merged | added | error of the change, merged | added |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = (f"{row[key]:.4f}" for key in ("without", "merged", "added", "merged_effect", "added_effect"))
        lines.append(
            f"| {row['model']} | {row['storage']} | {row['compute']} | {row['effect']:.2%} | {' | '.join(errors)} |"
        )
    return "\n".join(lines)
