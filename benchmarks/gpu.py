"""Everything a GPU is needed for, in one go: `python -m benchmarks gpu --comfyui DIR [--save]`.

A Wan2.1-1.3B-shaped model in every arithmetic, each in turns with plain fp16: time and error of a denoiser call against
fp32, kernels, the device memory a call takes, what the guard, LoRAs beside 8-bit weights and fp16 sums cost or gain; SDXL whole and a
part of Flux with a profile beside the cost model; single layers of larger models; loading, with and without dynamic VRAM; parts of Flux
and SDXL compiled and as CUDA graphs. Prints JSON, exit code 2 where a target is missed. `--dry-run` does the same on a CPU with small
shapes, to see that it works. What each row tells: gpu-run.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from setup import machine
from setup.environment import Environment

from . import reporting
from .clock import CALLS, kernels, timed
from .gpu_layers import layer_rows
from .gpu_models import compiled_rows, model_rows, peak_bytes
from .host import load_comfy

PLAIN = "fp16"
STORAGE = {"fp32": "fp32", "fp16": "fp16", "fp16_safe": "fp16", "bf16": "as_file", "fp8": "fp8_e4m3fn", "int8": "int8"}
COMPUTE = {"int8": "auto"}
COMPARED = ("fp16_safe", "fp16, guarded", "fp16, fp16 sums", "bf16", "fp8", "int8", "fp8, LoRA", "int8, LoRA")
LORA_RANK = 16
LOADS = (
    ("as_file", "--core", "--dynamic"), ("as_file", "--dynamic"), ("fp8_e4m3fn", "--core", "--dynamic"), ("fp8_e4m3fn", "--dynamic"),
    ("int8", "--dynamic"), ("fp8_e4m3fn", "--core"), ("fp8_e4m3fn",), ("fp8_e4m3fn", "--on-cpu"), ("int8",), ("int8", "--on-cpu"),
)  # fmt: skip
LOAD_SECONDS = 90
SLOWEST = "fp32"
WITH_FP16_SUMS = "sm_86"
TARGETS = {"fp16_safe_to_fp16": 1.25, "fp32_to_fp16_safe": 3.0, "guard": 1.02}


def main() -> int:
    args = _parse()
    start = time.monotonic()
    comfy = load_comfy(args, on_cpu=args.dry_run)
    from support import tiny_models

    result = machine.gpu_conditions(Environment(Path(sys.executable), args.comfyui.resolve()))
    result |= {"benchmark": "gpu", "dry_run": args.dry_run, "latent": [args.frames, args.size, args.size], "pairs": args.runs}
    result |= {"rows": [], "models": [], "layers": [], "loads": [], "left_out": [], "targets": {}}
    path = comfy.folder / "model.safetensors"
    tiny_models.wan(path) if args.dry_run else tiny_models.wan_1_3b_shaped(path)
    row, began = {"name": "the start"}, time.monotonic()
    try:
        with ending_after(args.seconds - (began - start)):
            for row in _parts(comfy, path, args):
                result[_list_of(row)].append(row | {"took_seconds": round(time.monotonic() - began, 1)})
                result["targets"] = _targets({row["name"]: row for row in result["rows"]})
                _write(result, args)
                began = time.monotonic()
    except OutOfTime:
        result["left_out"].append(f"what comes after {_named(row)}: {args.seconds:g} s were up")
    _write(result, args)
    if args.save and not args.dry_run:
        reporting.save(result)
    print(json.dumps(result, indent=2))
    if any("problem" in row for row in result["loads"]):
        return 1
    return 0 if args.dry_run else reporting.exit_code(result)


class OutOfTime(Exception):
    """The time for measuring is up."""


@contextlib.contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """Raise :class:`OutOfTime` where these seconds are up, also in the middle of a compilation."""

    def end(*_) -> None:
        raise OutOfTime

    if seconds == float("inf"):
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _named(row: dict) -> str:
    return ", ".join(str(row[key]) for key in ("name", "model", "run", "load") if key in row)


def _list_of(row: dict) -> str:
    return next((name for key, name in (("shape", "layers"), ("model", "models"), ("load", "loads")) if key in row), "rows")


def _parse() -> argparse.Namespace:
    parser = reporting.parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help=f"pairs of measurements for each row, of {CALLS} calls each")
    parser.add_argument("--size", type=int, default=64, help="latent height and width; 64 gives 1024 tokens a frame")
    parser.add_argument("--frames", type=int, default=21, help="frames of the latent; 21 give 21504 tokens at size 64")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time, in the middle of a row too")
    parser.add_argument("--out", type=Path, help="write the result here after every row")
    parser.add_argument("--dry-run", action="store_true", help="a small model on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        args.size, args.frames, args.runs = 8, 2, 2
    return args


def _write(result: dict, args: argparse.Namespace) -> None:
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _parts(comfy, path: Path, args: argparse.Namespace) -> Iterator[dict]:
    """The rows, each when it is asked for; those that take longest come last."""
    from support import families

    plain = families.load(comfy, path, STORAGE[PLAIN], PLAIN)
    call = families.capture(plain, "wan", size=args.size, frames=args.frames)
    with exact_fp32():
        reference = _exact(comfy, path, call)
    yield _alone(plain, call) | {"name": PLAIN, "error": _error(reference, families.replay(plain, call))}

    def compared(name: str) -> dict:
        with _profile(name, args), exact_fp32() if name == SLOWEST else contextlib.nullcontext():
            other = _model(comfy, path, plain, name)
            row = {"name": name, "error": _error(reference, families.replay(other, call))}
            return row | _in_turns(plain, other, call, 1 if name == SLOWEST else args.runs) | _alone(other, call)

    yield from map(compared, COMPARED)
    yield from model_rows(args.dry_run)
    yield from load_rows(args, path)
    yield from layer_rows(args.dry_run)
    yield compared(SLOWEST)
    yield from compiled_rows(args.dry_run)


def load_rows(args: argparse.Namespace, path: Path) -> Iterator[dict]:
    """Loading and the first call, each in a process of its own: ComfyUI's loader and ours, dynamic VRAM or none, quantized there or on the CPU."""
    for how in LOADS:
        command = [sys.executable, "-m", "benchmarks.gpu_load", "--comfyui", str(args.comfyui), *(["--dry-run"] if args.dry_run else []), str(path), *how]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_SECONDS * (6 if args.dry_run else 1))
        found = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else {"problem": ran.stderr[-500:]}
        yield {"load": " ".join(how)} | found


def _exact(comfy, path: Path, call):
    from support import families

    return families.replay(families.load(comfy, path, STORAGE["fp32"], "fp32"), call).float().cpu()


def _model(comfy, path: Path, plain, name: str):
    """The model of a row; that with fp16 sums or the guard is a clone of the plain one."""
    from support import families
    from support.guarding import guarded
    from support.summing import accumulation

    if name == "fp16, guarded":
        return guarded(comfy, plain)
    if name == "fp16, fp16 sums":
        return accumulation(comfy, plain, fp16_accumulation="auto")
    base, _, lora = name.partition(", ")
    model = families.load(comfy, path, STORAGE[base], COMPUTE.get(base, base))
    return _with_lora(model) if lora else model


def _with_lora(model):
    """A LoRA on every layer in 8 bits: it is added to the layers' results."""
    from comfy.quant_ops import QuantizedTensor
    from comfy.sd import load_lora_for_models
    from support import model_files

    named = model.model.diffusion_model.named_modules()
    shapes = {name: tuple(module.weight.shape) for name, module in named if isinstance(getattr(module, "weight", None), QuantizedTensor)}
    return load_lora_for_models(model, None, model_files.lora(shapes, rank=LORA_RANK), 0.01, 0.0)[0]


@contextlib.contextmanager
def _profile(name: str, args: argparse.Namespace) -> Iterator[None]:
    """For fp16 sums: as on a device that gains by them, where this one does not."""
    from halfsafe.precision.devices.detect import PROFILE_VARIABLE, detect

    wanted = "sums" in name and (args.dry_run or not detect().capabilities["fp16_accumulation"])
    if wanted:
        os.environ[PROFILE_VARIABLE] = WITH_FP16_SUMS
    try:
        yield
    finally:
        if wanted:
            del os.environ[PROFILE_VARIABLE]


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """Without TF32, which torch uses in cuDNN's convolutions unless it is told not to."""
    from halfsafe.precision.arithmetic import flags

    with flags.flags_set({"tf32_matmul": False, "tf32_convolution": False}):
        yield


def _in_turns(plain, other, call, pairs: int) -> dict:
    """Seconds of a call of each and how they compare, by medians of pairs that take turns."""
    from support import families

    sides: dict[str, Callable] = {"plain": lambda: families.replay(plain, call), "other": lambda: families.replay(other, call)}
    taken: dict[str, list[dict]] = {name: [] for name in sides}
    for index in range(pairs):
        for name in sorted(sides, reverse=bool(index % 2)):
            taken[name].append(timed(sides[name]))
    clocks = [clock for clock in ("seconds", "device_seconds") if taken["plain"][0][clock] is not None]
    row = {clock: statistics.median(one[clock] for one in taken["other"]) for clock in clocks}
    ratios = {clock: [b[clock] / a[clock] for a, b in zip(taken["plain"], taken["other"], strict=True)] for clock in clocks}
    return row | {f"{clock}_to_fp16": round(statistics.median(ratios[clock]), 4) for clock in clocks}


def _alone(model, call) -> dict:
    """The kernels of a call, and the device memory it takes."""
    from support import families

    families.replay(model, call)
    return {"kernels": kernels(lambda: families.replay(model, call)), "peak_bytes": peak_bytes(lambda: families.replay(model, call))}


def _error(reference, result) -> float | None:
    from support.measures import relative_error

    error = relative_error(reference, result.float().cpu())
    return float(f"{error:.2e}") if error == error else None


def _targets(rows: dict[str, dict]) -> dict[str, dict]:
    """The targets whose rows are there: events where there are any, as a guarded call may start late and end late alike."""

    def to_fp16(name: str) -> float:
        return rows[name].get("device_seconds_to_fp16", rows[name]["seconds_to_fp16"])

    measured = {}
    if "fp16_safe" in rows:
        measured["fp16_safe_to_fp16"] = to_fp16("fp16_safe")
    if "fp32" in rows:
        measured["fp32_to_fp16_safe"] = to_fp16("fp32") / to_fp16("fp16_safe")
    if "fp16, guarded" in rows:
        measured["guard"] = rows["fp16, guarded"]["seconds_to_fp16"]
    return {name: reporting.target(round(value, 3), TARGETS[name], name == "fp32_to_fp16_safe") for name, value in measured.items()}


if __name__ == "__main__":
    sys.exit(main())
