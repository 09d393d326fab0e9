"""LoRAs on 8-bit weights: beside the weights, as the pack does, against merged into them, as ComfyUI does."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

import reporting
from bench_host import load_comfy

EFFECTS = (6e-4, 1e-3, 5e-3, 1e-2, 5e-2)
RANK = 16
WAYS = (("fp8_e4m3fn", "fp16_safe"), ("fp8_e4m3fn", "bf16"), ("fp8_e4m3fn", "fp8"), ("int8", "fp16_safe"), ("int8", "bf16"), ("int8", "auto"))
LIMIT = 1.1
LAYERS = {
    **{f"blocks.{block}.ffn.0": (1024, 256) for block in (0, 1)},
    **{f"blocks.{block}.ffn.2": (256, 1024) for block in (0, 1)},
    **{f"blocks.{block}.{kind}_attn.{part}": (256, 256) for block in (0, 1) for kind in ("self", "cross") for part in "qkvo"},
}


def run_lora(args: argparse.Namespace) -> dict:
    """Error of a call with a LoRA, to the error without one, by storage, compute and how much the LoRA changes the result."""
    os.environ["HALFSAFE_DEVICE_PROFILE"] = "sm_89"
    comfy = load_comfy(args)
    from support import families, model_files, tiny_models

    path, tensors = tiny_models.wan(comfy.folder / "wan.safetensors"), model_files.lora(LAYERS, rank=RANK)
    exact = families.load(comfy, path, "fp32", "fp32")
    call = families.capture(exact, "wan")
    strengths = _strengths(exact, tensors, call)
    rows = []
    for storage, compute in WAYS:
        print(f"{storage} {compute}", file=sys.stderr, flush=True)
        ours = families.load(comfy, path, storage, compute)
        with _merging():
            core = families.load(comfy, path, storage, compute)
        rows += [{"storage": storage, "compute": compute, **row} for row in _rows(exact, ours, core, tensors, strengths, call)]
    worst = max(row["beside"] / row["without"] for row in rows)
    cost = sum(RANK * sum(shape) for shape in LAYERS.values()) / sum(a * b for a, b in LAYERS.values())
    found = {"extra_products_per_layer": 2, "extra_work_of_these_layers": round(cost, 3), "rank": RANK}
    targets = {"error_to_without": reporting.target(round(worst, 3), LIMIT)}
    return {"benchmark": "lora", "cost": found, "rows": rows, "targets": targets, "markdown": markdown(rows)}


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

    kept = models.keep_low_rank_beside
    models.keep_low_rank_beside = lambda patcher: None
    try:
        yield
    finally:
        models.keep_low_rank_beside = kept


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


def markdown(rows: list[dict]) -> str:
    """The rows as a table."""
    lines = [
        "| storage | compute | LoRA changes | error without | merged | beside | error of the change, merged | beside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = (f"{row[key]:.4f}" for key in ("without", "merged", "beside", "merged_effect", "beside_effect"))
        lines.append(f"| {row['storage']} | {row['compute']} | {row['effect']:.2%} | {' | '.join(errors)} |")
    return "\n".join(lines)
