"""Compute benchmarks in a real ComfyUI, each with its alternative in the same run: safe16, fp8mm, patch, guard and lora.

`python -m benchmarks safe16 safe16 --comfyui DIR [--json] [--save]`, or `run_safe16(args)` and its siblings, in a
process that has not imported ComfyUI yet. `args.comfyui`: a ComfyUI folder; `args.slow`: the large families too.

Prints a table of errors (safe16, guard, lora) or the targets, with `--json` everything; exits with 2 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from . import reporting
from .guard import run_guard
from .host import conditions, load_comfy
from .lora import run_lora

SAFE16_LIMIT, FP8_LIMIT, PATCH_LIMIT = 0.6, 0.03, 1.01


def run_safe16(args: argparse.Namespace) -> dict:
    """Error against fp32 of fp16, bf16 and `fp16_safe`, for every family and kind of overflow."""
    comfy = load_comfy(args)
    from support import families, tiny_models

    names = [name for name in families.OVERFLOWS if args.slow or name not in tiny_models.SLOW_FAMILIES]
    rows = [row for name in names for row in _family_rows(comfy, families, name)]
    worst = max(row["fp16_safe"] / row["bf16"] for row in rows)
    share = min(row["fp16_work"] for row in rows)
    targets = {
        "error_to_bf16": reporting.target(round(worst, 3), SAFE16_LIMIT),
        "fp16_work": reporting.target(share, 0.8, at_least=True),
    }
    return {"benchmark": "safe16", "rows": rows, "targets": targets, "markdown": markdown(rows)}


def _family_rows(comfy, families, family: str) -> list[dict]:
    clean = families.write(family, comfy.folder)
    call = families.capture(families.load(comfy, clean, "fp32"), family)
    rows = []
    for kind, factors in {"clean": {}, **families.OVERFLOWS[family]}.items():
        path = families.write_scaled(clean, comfy.folder / "scaled.safetensors", factors) if factors else clean
        rows.append({"family": family, "kind": kind, **_errors(comfy, families, path, call)})
        print(f"{family} {kind}", file=sys.stderr, flush=True)
    clean.unlink()
    return rows


def _errors(comfy, families, path: Path, call) -> dict:
    from support.measures import relative_error

    reference, found = families.replay(families.load(comfy, path, "fp32"), call), {}
    for compute in ("fp16", "bf16", "fp16_safe"):
        model = families.load(comfy, path, "as_file", compute)
        error = relative_error(reference, families.replay(model, call))
        found[compute] = float(f"{error:.2e}") if error == error else None
    work = families.report(comfy, model)["decisions"]["work"]
    return {**found, "fp16_work": round(float(work.split("%")[0]) / 100, 3)}


def markdown(rows: list[dict]) -> str:
    """The rows as a table."""
    lines = ["| family | kind | fp16 | bf16 | fp16_safe | fp16 work |", "|---|---|---|---|---|---|"]
    for row in rows:
        errors = (f"{row[key]:.1e}" if row[key] is not None else "NaN" for key in ("fp16", "bf16", "fp16_safe"))
        lines.append(f"| {row['family']} | {row['kind']} | {' | '.join(errors)} | {row['fp16_work']:.0%} |")
    return "\n".join(lines)


def run_fp8mm(args: argparse.Namespace) -> dict:
    """An fp8 product with a channel of 1000x outliers: dynamic scale against core's scale of 1.0."""
    os.environ["HALFSAFE_DEVICE_PROFILE"] = "sm_89"
    comfy = load_comfy(args)
    import torch
    from halfsafe.nodes.host.compute.bound import Fp8Linear
    from support import families, tiny_models
    from support.measures import relative_error

    model = families.load(comfy, tiny_models.wan(comfy.folder / "wan.safetensors"), "fp8_e4m3fn", "fp8")
    module = model.model.diffusion_model.blocks[0].ffn[0]
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 3] *= 1000
    with torch.inference_mode():
        weight = module.weight.dequantize().float()
        reference = torch.nn.functional.linear(x.float(), weight, module.bias.float())
        ours = relative_error(reference, Fp8Linear(module)(x))
        module._full_precision_mm = module.comfy_force_cast_weights = False
        core = relative_error(reference, type(module).forward(module, x.clone()))
    targets = {"error": reporting.target(round(ours, 4), FP8_LIMIT)}
    return {"benchmark": "fp8mm", "errors": {"halfsafe": ours, "core": core}, "targets": targets}


def run_patch(args: argparse.Namespace) -> dict:
    """A model whose plan changes nothing against the same model without the pack's node: time of a call."""
    comfy = load_comfy(args)
    from halfsafe.nodes.host.replay.interceptor import Interceptor
    from support import families, tiny_models

    path = tiny_models.wan(comfy.folder / "wan.safetensors", dim=512, blocks=4, ffn=2048)
    planned = families.load(comfy, path, "as_file", "bf16")
    stock = planned.clone()
    stock.attachments.clear()
    call = families.capture(stock, "wan")
    taken: dict[str, list[float]] = {"stock": [], "planned": []}
    for index in range(2 * args.runs):
        for name, model in sorted({"stock": stock, "planned": planned}.items(), reverse=bool(index % 2)):
            start = time.perf_counter()
            families.replay(model, call)
            taken[name].append(time.perf_counter() - start)
    ratio = statistics.median(taken["planned"]) / statistics.median(taken["stock"])
    targets = {"time": reporting.target(round(ratio, 4), PATCH_LIMIT)}
    wrappers = len(Interceptor.on(planned).stages)
    return {"benchmark": "patch", "seconds": taken, "wrappers": wrappers, "targets": targets}


RUNS = {"safe16": run_safe16, "fp8mm": run_fp8mm, "patch": run_patch, "guard": run_guard, "lora": run_lora}


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("name", choices=RUNS)
    parser.add_argument(
        "--slow", action="store_true", help="safe16 and guard: the families with 0.4 and 1.1 billion parameters too"
    )
    parser.add_argument("--runs", type=int, default=10, help="patch and guard: pairs of measurements")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    result = conditions(args) | RUNS[args.name](args)
    if args.save:
        reporting.save(result)
    print(
        json.dumps(result, indent=2) if args.json else result.get("markdown", json.dumps(result["targets"], indent=2))
    )
    return reporting.exit_code(result)


if __name__ == "__main__":
    sys.exit(main())
