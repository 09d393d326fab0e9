"""The guard's benchmark: what it costs on clean runs, and what it makes of models that overflow. See compute.py."""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from . import reporting
from .host import load_comfy

LIMIT, ERROR_LIMIT, STEPS = 1.02, 0.02, 20


def run_guard(args: argparse.Namespace) -> dict:
    """Clean runs of 20 steps without a guard, with it and with a check of every layer; then every kind of overflow."""
    comfy = load_comfy(args)
    from support import families, tiny_models

    wide = tiny_models.wan(comfy.folder / "wide.safetensors", dim=1024, blocks=8, ffn=4096)
    flux = families.write("flux", comfy.folder)
    clean = {
        "wan bf16": _overhead(comfy, families, wide, "wan", "bf16", args.runs),
        "flux fp16, clamps watched": _overhead(comfy, families, flux, "flux", "fp16", args.runs),
    }
    names = [name for name in families.OVERFLOWS if args.slow or name not in tiny_models.SLOW_FAMILIES]
    rows = [row for name in names for row in _rescues(comfy, families, name)]
    worst, error = clean["wan bf16"]["guard"], max(row["guard"] for row in rows)
    targets = {
        "clean_run": reporting.target(worst, LIMIT),
        "error": reporting.target(error, ERROR_LIMIT),
    }
    return {
        "benchmark": "guard",
        "clean_runs": clean,
        "rows": rows,
        "targets": targets,
        "markdown": _markdown(clean, rows),
    }


def _overhead(comfy, families, path, family: str, compute: str, runs: int) -> dict[str, float]:
    """Time of a run relative to the one without a guard beside it, by median of pairs that take turns.

    Each is preceded by a call that is not timed: ComfyUI exchanges one clone of a model for another at the first.
    """
    from support.guarding import guarded

    plain = families.load(comfy, path, "as_file", compute)
    sides = {"none": plain, "guard": guarded(comfy, plain), "check_per_layer": plain}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(runs + 1):
        for name in sorted(sides, reverse=bool(index % 2)):
            hooks = _hooks(plain) if name == "check_per_layer" else []
            families.sample(sides[name], family, steps=1, size=32)
            start = time.perf_counter()
            families.sample(sides[name], family, steps=STEPS, size=32)
            taken[name].append(time.perf_counter() - start)
            for hook in hooks:
                hook.remove()
    pairs = {
        name: [one / base for one, base in zip(times[1:], taken["none"][1:], strict=True)]
        for name, times in taken.items()
    }
    base = round(statistics.median(taken["none"]), 3)
    return {name: round(statistics.median(ratios), 4) for name, ratios in pairs.items()} | {
        "seconds": base,
        "pairs": runs,
    }


def _hooks(model) -> list:
    """The alternative: every layer's result is checked and read back."""

    def check(module, inputs, output):
        if hasattr(output, "isfinite") and not output.isfinite().all():
            raise ValueError("not finite")

    return [
        module.register_forward_hook(check)
        for module in model.model.diffusion_model.modules()
        if not list(module.children())
    ]


def _rescues(comfy, families, family: str) -> list[dict]:
    clean = families.write(family, comfy.folder)
    rows = []
    for kind, factors in families.OVERFLOWS[family].items():
        path = families.write_scaled(clean, comfy.folder / "scaled.safetensors", factors)
        rows.append({"family": family, "kind": kind, **_rescue(comfy, families, path, family)})
        print(f"{family} {kind}", file=sys.stderr, flush=True)
    clean.unlink()
    return rows


def _rescue(comfy, families, path, family: str) -> dict:
    """Errors of a 4-step picture against fp32, and what the guard did."""
    from support.guarding import guarded, modes_of, report_of
    from support.measures import relative_error

    def error(model) -> float | None:
        value = relative_error(reference, families.sample(model, family))
        return float(f"{value:.2e}") if value == value else None

    reference = families.sample(families.load(comfy, path, "fp32"), family)
    model = guarded(comfy, families.load(comfy, path, "fp16", "fp16"))
    found = {
        "fp16": error(families.load(comfy, path, "fp16", "fp16")),
        "bf16": error(families.load(comfy, path, "as_file", "bf16")),
    }
    found["guard"] = error(model)
    report, modes = report_of(model), modes_of(model)
    event = report.events[0]
    found |= {
        "verdict": report.verdict,
        "named": event.layer,
        "op": event.op,
        "kind_seen": event.kind,
        "extra_calls": report.extra_calls,
    }
    found["still_fp16"] = round(list(modes.values()).count("fp16") / len(modes), 3)
    found["second_run"] = error(model)
    return found | {"second_run_extra_calls": report_of(model).extra_calls}


def _markdown(clean: dict, rows: list[dict]) -> str:
    lines = ["| clean run | no guard | guard | check per layer |", "|---|---|---|---|"]
    lines += [f"| {name} | 1 | {row['guard']} | {row['check_per_layer']} |" for name, row in clean.items()]
    lines += [
        "",
        "| family | kind | fp16 | bf16 | guard | named | extra calls | layers still fp16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        errors = (f"{row[key]:.1e}" if row[key] is not None else "NaN" for key in ("fp16", "bf16", "guard"))
        named = f"{row['named']} ({row['op']})"
        lines.append(
            f"| {row['family']} | {row['kind']} | {' | '.join(errors)} | {named} | {row['extra_calls']} | {row['still_fp16']:.0%} |"
        )
    return "\n".join(lines)
