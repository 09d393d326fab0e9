"""Halfsafe against the alternative, the same work in the same run: `python scripts/bench.py NAME [--json]`.

load: a bf16 file with the shapes of Wan2.1 1.3B (2.84 GB) to scaled fp8 and to int8 in memory, against ComfyUI's UNETLoader.
convert: the same file disk to disk, against reading all, quantizing all to fp8 and saving all.
safe16, fp8mm, patch, guard: what a compute plan and the guard cost and how close they come; see bench_compute.py.
quality: the error of each quantization format on trained weights; see bench_quality.py.
lora: LoRAs beside 8-bit weights against LoRAs merged into them; see bench_lora.py.
import: how long ComfyUI takes to import the pack; see bench_import.py.
cost: what fp16_safe costs beside fp16, by count and estimated for six cards; see bench_cost.py.

Prints median seconds, the highest memory, ratios and targets, with `--json` every run. Exits with 2 where a target is missed.

Each measurement of load and convert is a process of its own; the alternatives take turns; the file is in the page cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from comfyui_server import make_base_directory
from environment import ROOT, Environment, SetupError, clean_environ, prepare, write_models
from reporting import conditions, exit_code, save, target

BENCHES = {
    "load": {"halfsafe": "load_halfsafe", "int8": "load_int8", "other": "load_core"},
    "convert": {"halfsafe": "convert_halfsafe", "int8": "convert_int8", "other": "convert_read_all"},
}
OTHER = {"load": "UNETLoader, fp8_e4m3fn", "convert": "read all, quantize to fp8, save"}
COMPUTE = ("safe16", "fp8mm", "patch", "guard", "lora")
ALONE = {"import": "bench_import.py", "quality": "bench_quality.py", "cost": "bench_cost.py"}
TARGETS = {
    "load": {"seconds": 1.3, "memory_to_weights": 1.1, "int8_to_fp8": 2.0, "int8_memory_to_weights": 1.1},
    "convert": {"memory_to_largest_tensor": 3.0, "int8_to_fp8": 2.0, "int8_memory_to_largest_tensor": 3.0},
}
MODEL = "wan_1_3b_shaped"
MODELS = {
    MODEL: "Wan2.1 T2V 1.3B shapes, bf16, 1.42 billion parameters, 2.84 GB, in the page cache",
    "wan_1_3b_part": "8 of 30 blocks of Wan2.1 T2V 1.3B shapes, bf16, 0.40 billion parameters, 0.80 GB, in the page cache",
}
LARGEST_TENSOR = 1536 * 8960 * 2


def main() -> int:
    options = _parse()
    try:
        environment = _environment(options.comfyui)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    if options.name in ALONE:
        return _script(ALONE[options.name], [], environment, options)
    if options.name in COMPUTE:
        return _script("bench_compute.py", [options.name], environment, options)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="halfsafe-bench-") as folder:
        base = make_base_directory(Path(folder), ROOT)
        folder = base / "models" / "diffusion_models"
        name = "wan_1_3b_part" if options.small else MODEL
        write_models(environment, folder, name)
        model = folder / f"{name}.safetensors"
        about = conditions(environment) | {"model": MODELS[name], "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}
        result = about | _compare(options.name, environment, model, base, options.runs)
        result["benchmark"] += "_small" if options.small else ""
    if options.save:
        save(result)
    print(json.dumps(result, indent=2) if options.json else _as_text(result))
    return exit_code(result)


def _script(name: str, arguments: list[str], environment: Environment, options: argparse.Namespace) -> int:
    flags = [f"--{flag}" for flag in ("json", "save") if getattr(options, flag)]
    command = [str(environment.python), str(ROOT / "scripts" / name), *arguments, "--comfyui", str(environment.comfyui), *flags]
    return subprocess.run(command, check=False, env=clean_environ()).returncode


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*BENCHES, *COMPUTE, *ALONE])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--save", action="store_true", help="write it to benchmarks/results/")
    parser.add_argument("--runs", type=int, default=5, help="load and convert: measurements of each alternative (default: 5)")
    parser.add_argument("--small", action="store_true", help="load and convert: a third of the model, for a machine with other work")
    parser.add_argument("--folder", help="where to put the model file for the time being (3 GB; convert: 5 GB)")
    parser.add_argument("--comfyui", type=Path, help="a ComfyUI folder to use instead of the pinned one")
    return parser.parse_args()


def _environment(comfyui: Path | None) -> Environment:
    """This interpreter where it has torch and a ComfyUI is named, else the project's own environment."""
    named = comfyui or os.environ.get("COMFYUI_DIR")
    if named and importlib.util.find_spec("torch"):
        return Environment(Path(sys.executable), Path(named).resolve())
    return prepare(comfyui)


def _compare(name: str, environment: Environment, model: Path, base: Path, runs: int) -> dict:
    sides = BENCHES[name]
    taken: dict[str, list[dict]] = {side: [] for side in sides}
    for measurement in sides.values():
        _measure(environment, measurement, model, base)
    for run in range(runs):
        for side in sorted(sides, reverse=bool(run % 2)):
            print(f"{name} {side}, run {run + 1} of {runs}", file=sys.stderr, flush=True)
            taken[side].append(_measure(environment, sides[side], model, base))
    summary = {side: _summary(results) for side, results in taken.items()}
    return {
        "benchmark": name,
        "other": OTHER[name],
        "runs": taken,
        "summary": summary,
        "ratios": _ratios(taken, summary, "halfsafe", "other"),
        "int8_to_fp8": _ratios(taken, summary, "int8", "halfsafe"),
        "int8_to_other": _ratios(taken, summary, "int8", "other"),
        "targets": _targets(name, summary),
    }


def _measure(environment: Environment, measurement: str, model: Path, base: Path) -> dict:
    command = [str(environment.python), str(ROOT / "benchmarks" / "measure.py"), measurement, str(model), str(base)]
    environ = clean_environ(COMFYUI_DIR=str(environment.comfyui), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise SystemExit(f"{measurement} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _summary(results: list[dict]) -> dict:
    """The median of the seconds, and of bytes the most that any run took."""
    known = {key: [result[key] for result in results if result[key] is not None] for key in results[0]}
    return {key: (statistics.median if key.endswith("seconds") else max)(values) if values else None for key, values in known.items()}


def _ratios(taken: dict[str, list[dict]], summary: dict[str, dict], ours: str, other: str) -> dict[str, float]:
    """One side's figures by another's. ``best_seconds``: fastest run against fastest run, which other work disturbs least."""
    one, two = summary[ours], summary[other]
    ratios = {key: round(one[key] / two[key], 3) for key in one if one[key] is not None and two[key]}
    best = {side: min(result["seconds"] for result in taken[side]) for side in (ours, other)}
    return ratios | {"best_seconds": round(best[ours] / best[other], 3)}


def _targets(name: str, summary: dict[str, dict]) -> dict[str, dict]:
    measured = {
        "seconds": summary["halfsafe"]["seconds"] / summary["other"]["seconds"],
        "int8_to_fp8": summary["int8"]["seconds"] / summary["halfsafe"]["seconds"],
    }
    for prefix, side in (("", "halfsafe"), ("int8_", "int8")):
        memory = summary[side]["anonymous_bytes"]
        measured[f"{prefix}memory_to_weights"] = memory and memory / summary[side].get("weight_bytes", memory)
        measured[f"{prefix}memory_to_largest_tensor"] = memory and memory / LARGEST_TENSOR
    return {
        key: target(round(measured[key], 3), limit)
        for key, limit in TARGETS[name].items()
        if measured[key] is not None
    }


def _as_text(result: dict) -> str:
    about = f"{len(result['runs']['other'])} runs: median seconds, highest memory"
    lines = [f"{result['benchmark']}: Halfsafe's fp8 and int8, and {result['other']}; {about}"]
    lines.append(f"  {'':16} {'fp8':>12} {'int8':>12} {'other':>12}   fp8 / other, int8 / fp8, int8 / other")
    ratios = [result[name] for name in ("ratios", "int8_to_fp8", "int8_to_other")]
    for key in result["summary"]["halfsafe"]:
        figures = " ".join(f"{_number(key, result['summary'][side][key]):>12}" for side in ("halfsafe", "int8", "other"))
        lines.append(f"  {key:16} {figures}   {', '.join(str(ratio.get(key)) for ratio in ratios)}")
    lines.append(f"  fastest runs: {', '.join(str(ratio['best_seconds']) for ratio in ratios)}")
    for key, held in result["targets"].items():
        lines.append(f"  target {key} <= {held['limit']}: {held['measured']} {'met' if held['met'] else 'MISSED'}")
    return "\n".join(lines)


def _number(key: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e6:.1f} MB" if key.endswith("bytes") else f"{value:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
