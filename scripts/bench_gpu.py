"""Everything a GPU is needed for, in one go: `python scripts/bench_gpu.py --comfyui DIR [--save]`.

A Wan2.1-1.3B-shaped model in every arithmetic: time and error of a denoiser call against fp32, the peak of device memory,
what the guard and fp16 sums cost or gain; printed as JSON, exit code 2 where a target is missed. `--dry-run` does the same on a CPU with a small model, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import reporting
from bench_compute import conditions, load_comfy

COMPUTES = ("fp32", "fp16", "bf16", "fp16_safe", "fp8")
TARGETS = {"fp16_safe_to_fp16": 1.25, "fp32_to_fp16_safe": 3.0, "guard": 1.02}


def main() -> int:
    args = _parse()
    comfy = load_comfy(args, on_cpu=args.dry_run)
    import torch
    from support import tiny_models

    path = comfy.folder / "model.safetensors"
    tiny_models.wan(path) if args.dry_run else tiny_models.wan_1_3b_shaped(path)
    rows = [_row(comfy, path, compute, args) for compute in COMPUTES]
    reference = rows[0].pop("result")
    for row in rows:
        row["error"] = _error(reference, row.pop("result", reference))
    rows += _with_nodes(comfy, path, args)
    device = "CPU, dry run" if args.dry_run else torch.cuda.get_device_name()
    result = conditions(args) | {"benchmark": "gpu", "device": device, "driver": _driver(), "cuda": torch.version.cuda, "rows": rows}
    result["targets"] = _targets({row["name"]: row["seconds"] for row in rows})
    if args.save and not args.dry_run:
        reporting.save(result)
    print(json.dumps(result, indent=2))
    return 0 if args.dry_run else reporting.exit_code(result)


def _parse() -> argparse.Namespace:
    parser = reporting.parser(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="measured calls for each row")
    parser.add_argument("--size", type=int, default=64, help="latent height and width; 64 gives 1024 tokens a frame")
    parser.add_argument("--dry-run", action="store_true", help="a small model on the CPU")
    return parser.parse_args()


def _row(comfy, path: Path, compute: str, args: argparse.Namespace) -> dict:
    from support import families

    storage = "fp8_e4m3fn" if compute == "fp8" else "as_file"
    return _measured(compute, families.load(comfy, path, storage, compute), args)


def _with_nodes(comfy, path: Path, args: argparse.Namespace) -> list[dict]:
    """fp16 with the guard, and with fp16 sums where they are proven."""
    from support import families
    from support.guarding import guarded
    from support.summing import accumulation

    plain = families.load(comfy, path, "as_file", "fp16")
    summed = accumulation(comfy, plain, fp16_accumulation="auto")
    rows = [_measured("fp16, guarded", guarded(comfy, plain), args), _measured("fp16, fp16 sums", summed, args)]
    for row in rows:
        del row["result"]
    return rows


def _measured(name: str, model, args: argparse.Namespace) -> dict:
    """Median seconds of a call after two to warm up, and the most device memory held."""
    import torch
    from support import families

    call = families.capture(model, "wan", size=8 if args.dry_run else args.size)
    result = families.replay(model, call).float().cpu()
    _reset_peak(torch)
    taken = []
    for _ in range(args.runs):
        _wait(torch)
        start = time.perf_counter()
        families.replay(model, call)
        _wait(torch)
        taken.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {"name": name, "seconds": statistics.median(taken), "fastest": min(taken), "peak_bytes": peak, "result": result}


def _wait(torch) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak(torch) -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _error(reference, result) -> float | None:
    from halfsafe.precision.formats.quantize import relative_error

    error = relative_error(reference, result)
    return float(f"{error:.2e}") if error == error else None


def _targets(seconds: dict[str, float]) -> dict[str, dict]:
    measured = {
        "fp16_safe_to_fp16": seconds["fp16_safe"] / seconds["fp16"],
        "fp32_to_fp16_safe": seconds["fp32"] / seconds["fp16_safe"],
        "guard": seconds["fp16, guarded"] / seconds["fp16"],
    }
    at_least = {"fp32_to_fp16_safe"}
    return {name: reporting.target(round(measured[name], 3), limit, name in at_least) for name, limit in TARGETS.items()}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
