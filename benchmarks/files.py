"""Loading and converting a large file, against ComfyUI's loader and against reading all: `python -m benchmarks load`, or `convert`.

Each measurement is a process of its own; the alternatives take turns; the file is in the page cache. Prints median seconds, the highest
memory, ratios and targets, which are judged by seconds of computing: other work on the machine lengthens the rest. Threads that wait
for others of their process take none (`OMP_WAIT_POLICY`). `again`: the same load once more in the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from setup import machine
from setup.comfyui_server import make_base_directory
from setup.environment import ROOT, Environment, clean_environ, write_models

from . import reporting

BENCHES = {
    "load": {"halfsafe": "load_halfsafe", "int8": "load_int8", "other": "load_core"},
    "convert": {"halfsafe": "convert_halfsafe", "int8": "convert_int8", "other": "convert_read_all"},
}
OTHER = {"load": "UNETLoader, fp8_e4m3fn", "convert": "read all, quantize to fp8, save"}
TARGETS = {
    "load": {
        "cpu_seconds": 1.4,
        "again_cpu_seconds": 1.25,
        "memory_to_weights": 1.1,
        "int8_to_fp8": 2.0,
        "int8_memory_to_weights": 1.1,
    },
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
    environment = Environment(Path(sys.executable), options.comfyui.resolve())
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="halfsafe-bench-") as folder:
        base = make_base_directory(Path(folder), ROOT)
        folder = base / "models" / "diffusion_models"
        name = "wan_1_3b_part" if options.small else MODEL
        write_models(environment, folder, name)
        model = folder / f"{name}.safetensors"
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        about = machine.conditions(environment) | {"model": MODELS[name], "load_average": load}
        result = about | _compare(options.name, environment, model, base, options.runs)
        result["benchmark"] += "_small" if options.small else ""
    return reporting.told(result, options, _as_text)


def _parse() -> argparse.Namespace:
    parser = reporting.parser(__doc__)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--runs", type=int, default=5, help="measurements of each alternative (default: 5)")
    parser.add_argument("--small", action="store_true", help="a third of the model, for a machine with other work")
    parser.add_argument("--folder", help="where to put the model file for the time being (3 GB; convert: 5 GB)")
    return parser.parse_args()


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
    command = [str(environment.python), "-m", "benchmarks.measure", measurement, str(model), str(base)]
    environ = clean_environ(
        COMFYUI_DIR=str(environment.comfyui), PYTHONDONTWRITEBYTECODE="1", OMP_WAIT_POLICY="passive"
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise SystemExit(f"{measurement} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _summary(results: list[dict]) -> dict:
    """The median of the seconds, and of bytes the most that any run took."""
    known = {key: [result[key] for result in results if result[key] is not None] for key in results[0]}
    return {
        key: (statistics.median if key.endswith("seconds") else max)(values) if values else None
        for key, values in known.items()
    }


def _ratios(taken: dict[str, list[dict]], summary: dict[str, dict], ours: str, other: str) -> dict[str, float]:
    """One side's figures by another's. ``best_seconds``: fastest run against fastest run, which other work disturbs least."""
    one, two = summary[ours], summary[other]
    ratios = {key: round(one[key] / two[key], 3) for key in one if one[key] is not None and two[key]}
    best = {side: min(result["seconds"] for result in taken[side]) for side in (ours, other)}
    return ratios | {"best_seconds": round(best[ours] / best[other], 3)}


def _targets(name: str, summary: dict[str, dict]) -> dict[str, dict]:
    ours, other = summary["halfsafe"], summary["other"]
    measured = {key: ours[key] / other[key] for key in other if key.endswith("cpu_seconds")}
    measured["int8_to_fp8"] = summary["int8"]["cpu_seconds"] / ours["cpu_seconds"]
    for prefix, side in (("", "halfsafe"), ("int8_", "int8")):
        memory = summary[side]["anonymous_bytes"]
        measured[f"{prefix}memory_to_weights"] = memory and memory / summary[side].get("weight_bytes", memory)
        measured[f"{prefix}memory_to_largest_tensor"] = memory and memory / LARGEST_TENSOR
    return {
        key: reporting.target(round(measured[key], 3), limit)
        for key, limit in TARGETS[name].items()
        if measured[key] is not None
    }


def _as_text(result: dict) -> str:
    about = f"{len(result['runs']['other'])} runs: median seconds, highest memory"
    lines = [f"{result['benchmark']}: Halfsafe's fp8 and int8, and {result['other']}; {about}"]
    lines.append(f"  {'':16} {'fp8':>12} {'int8':>12} {'other':>12}   fp8 / other, int8 / fp8, int8 / other")
    ratios = [result[name] for name in ("ratios", "int8_to_fp8", "int8_to_other")]
    for key in result["summary"]["halfsafe"]:
        figures = " ".join(
            f"{_number(key, result['summary'][side][key]):>12}" for side in ("halfsafe", "int8", "other")
        )
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
