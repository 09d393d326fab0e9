"""LoRAs on 8-bit weights: beside the weights, as the pack does, against merged into them, as ComfyUI does; and many or large LoRAs,
which the pack merges where they outweigh a layer."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from . import lora_counts, reporting
from .host import load_comfy

EFFECTS = (6e-4, 1e-3, 5e-3, 1e-2, 5e-2)
RANK = 16
WAYS = (("fp8_e4m3fn", "fp16_safe"), ("fp8_e4m3fn", "bf16"), ("fp8_e4m3fn", "fp8"), ("int8", "fp16_safe"), ("int8", "bf16"), ("int8", "auto"))
LIMIT = 1.1
LARGE_RANK, SHARES = 128, (0.01, 0.02, 0.05, 0.1, 0.2)
"""A rank that outweighs every layer of the small Wan, and how much of a weight's norm the change has."""
WAYS_OF_LARGE = (("fp8_e4m3fn", "fp16_safe"), ("int8", "fp16_safe"), ("int8", "auto"))


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
    large, counts = list(_large_rows(comfy, *models["small Wan, random weights"][:2])), lora_counts.counted_rows()
    worst = max(row["beside"] / row["without"] for row in rows)
    found = {"extra_products_per_layer": 2, "rank": RANK}
    targets = {"error_to_without": reporting.target(round(worst, 3), LIMIT)}
    text = "\n\n".join((markdown(rows), large_markdown(large), lora_counts.markdown(counts)))
    return {"benchmark": "lora", "cost": found, "rows": rows, "large": large, "counts": counts, "targets": targets, "markdown": text}


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
    return {name: tuple(module.weight.shape) for name, module in named if isinstance(getattr(module, "weight", None), QuantizedTensor)}


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
        for name, model in (("merged", core), ("beside", ours)):
            result = families.replay(_with_lora(model, tensors, strength), call)
            row[name] = float(f"{relative_error(reference, result):.2e}")
            row[f"{name}_effect"] = float(f"{relative_error(reference - plain_exact, result - plain):.2e}")
        yield row


def _large_rows(comfy, family: str, path: Path) -> Iterator[dict]:
    """Error of a call with LoRAs that outweigh their layers: merged by ComfyUI, kept beside, and as the pack chooses."""
    from support import families
    from support.measures import relative_error

    exact = families.load(comfy, path, "fp32", "fp32")
    tensors = _as_large_as_weights(exact, _layers(families.load(comfy, path, "int8", "auto")))
    call = families.capture(exact, family)
    references = {share: families.replay(_with_lora(exact, tensors, share), call) for share in SHARES}
    for storage, compute in WAYS_OF_LARGE:
        ours = families.load(comfy, path, storage, compute)
        with _merging():
            core = families.load(comfy, path, storage, compute)
        without = relative_error(families.replay(exact, call), families.replay(ours, call))
        for share, reference in references.items():
            row = {"storage": storage, "compute": compute, "share": share, "without": float(f"{without:.2e}")}
            with _never_outweighing():
                row["beside"] = float(f"{relative_error(reference, families.replay(_with_lora(ours, tensors, share), call)):.2e}")
            for name, model in (("merged", _with_lora(core, tensors, share)), ("chosen", _with_lora(ours, tensors, share))):
                row[name] = float(f"{relative_error(reference, families.replay(model, call)):.2e}")
            found = model.sorted_patches().outweighing
            row |= {"layers": len(found), "layers_merged": len(model.sorted_patches().merged)}
            row["of_weight"], row["of_change"] = (round(max(getattr(error, of) for _, error in found.values()), 4) for of in ("of_weight", "of_change"))
            yield row


def _as_large_as_weights(exact, layers: dict[str, tuple[int, int]]) -> dict:
    """A LoRA whose change has each weight's norm."""
    from support import model_files

    tensors = model_files.lora(layers, rank=LARGE_RANK)
    for name in layers:
        weight = exact.get_model_object(f"diffusion_model.{name}").weight.detach()
        tensors[f"diffusion_model.{name}.lora_B.weight"] *= weight.norm() / model_files.lora_delta(tensors, name).norm()
    return tensors


@contextlib.contextmanager
def _never_outweighing() -> Iterator[None]:
    """LoRAs loaded inside stay beside their weights whatever their rank."""
    from halfsafe.nodes.host.lora import patches

    kept = patches.outweighs
    patches.outweighs = lambda rank, shape: False
    try:
        yield
    finally:
        patches.outweighs = kept


def large_markdown(rows: list[dict]) -> str:
    """The rows of LoRAs that outweigh their layers as a table."""
    lines = [
        "| storage | compute | change of a weight | without | merged by ComfyUI | beside | chosen | merged | rounding, of the weight, of the change |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = " | ".join(f"{row[key]:.4f}" for key in ("without", "merged", "beside", "chosen"))
        told = f"{row['layers_merged']} of {row['layers']} | {row['of_weight']:.2%}, {row['of_change']:.0%}"
        lines.append(f"| {row['storage']} | {row['compute']} | {row['share']:.0%} | {errors} | {told} |")
    return "\n".join(lines)


def markdown(rows: list[dict]) -> str:
    """The rows as a table."""
    lines = [
        "| model | storage | compute | LoRA changes | error without | merged | beside | error of the change, merged | beside |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = (f"{row[key]:.4f}" for key in ("without", "merged", "beside", "merged_effect", "beside_effect"))
        lines.append(f"| {row['model']} | {row['storage']} | {row['compute']} | {row['effect']:.2%} | {' | '.join(errors)} |")
    return "\n".join(lines)
