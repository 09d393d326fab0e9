"""What a GPU is needed for, in six minutes: `python -m benchmarks gpu --comfyui DIR [--out FILE] [--only PART ...] [--seconds 360] [--save]`.

The parts, in order:

SDXL, Flux under dynamic VRAM, then static: ComfyUI's own loader on a file in fp16, fp8 and int8; ours in fp8, int8, int8 unpacked and fp8
                products; `auto`, with and without the guard; `fp16_safe`
Wan 1.3B        10 blocks at 81 frames
layers          a single Linear each way, and what could replace its parts: microseconds of the device without gaps, and of the host
formats         nvfp4 and mxfp8 where nothing multiplies them; a LoRA beside fp8 and int8
compiled        Flux by inductor
device, clones, tests   doctor's probes, the CUDA rule book, static clones under dynamic VRAM, tests/gpu; not timed, side by side

A row of a model has the seconds to load and of the first call, the time of a call on the wall, of the host's own thread and on the device, each
in turns with ComfyUI's own fp16 in the same process; `busy`, the time of all kernels of one call without the gaps between them; its
products by dtype; the device memory of the first and of a later call; and the error against fp32. If wall is above busy, the device waits for
the host. A call is the model's alone, as in the midst of a sampler's run; SDXL's has two images.

Each part is a process of its own and has a time at which its rows end; a row that fails, hangs or ends its process is a row with its
problem, and the others go on. --only takes parts and beginnings of rows: "layers", "Flux, dynamic VRAM: int8". A table of the rows ends the run; --out has all of them, as they come. Exit code 1 where a row has a
problem, 2 where a target is missed. `--dry-run` does the same on a CPU with small models, to see that every line works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from setup import machine
from setup.environment import Environment

from . import gpu_checks, gpu_layers, reporting
from .gpu_models import SETTINGS, Model
from .gpu_rows import measured
from .gpu_table import as_table
from .host import load_comfy

STORED = tuple(setting for setting in SETTINGS if "nvfp4" not in setting and "mxfp8" not in setting)
DYNAMIC = "dynamic VRAM"
PARTS = {
    f"SDXL, {DYNAMIC}": (85, STORED),
    f"Flux, {DYNAMIC}": (125, STORED),
    "SDXL": (180, STORED),
    "Flux": (210, STORED),
    "Wan 1.3B, video": (245, ("core fp16", "int8", "fp8", "fp8 products", "fp16_safe")),
    "layers": (270, tuple(gpu_layers.LAYERS)),
    f"Flux, {DYNAMIC}, formats": (
        305,
        ("core nvfp4", "nvfp4", "mxfp8", "fp8 + LoRA", "core fp8 + LoRA", "int8 + LoRA", "core int8 + LoRA"),
    ),
    "Flux, compiled": (332, tuple(f"{setting} compiled" for setting in ("core fp16", "fp8", "int8", "auto"))),
    "device": (360, ("probes", "rules")),
    f"clones, {DYNAMIC}": (360, ("loaded", "compiled")),
    "tests": (360, ("tests/gpu",)),
}
"""Part -> seconds from the start at which its rows end, and its rows."""
UNTIMED = ("device", f"clones, {DYNAMIC}", "tests")
ALL_SECONDS = 360
ROW_SECONDS, COMPILED_SECONDS = 40, 75
TARGETS = {"auto": 1.02, "auto, guard": 1.03, "fp16_safe": 1.25}
"""Device or wall time of a call in a setting, whichever is larger, against ComfyUI's own fp16."""


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--out", type=Path, help="write the result here after every row")
    parser.add_argument(
        "--seconds", type=float, default=ALL_SECONDS, help="scales the time of each part (default: 360)"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="PART", help="only these parts or rows, without limits"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--dry-run", action="store_true", help="small models on the CPU, without limits")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_part(args)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    result = machine.gpu_conditions(Environment(Path(sys.executable), args.comfyui.resolve())) | {
        "benchmark": "gpu",
        "dry_run": args.dry_run,
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="halfsafe-gpu-models-") as folder:
        args.models = Path(folder)
        run_all(args, chosen(tuple(args.only)), result)
    if args.save and not args.dry_run:
        reporting.save(result)
    print(json.dumps(result, indent=2) if args.json else as_table(result))
    if any("problem" in row for row in result["rows"]):
        return 1
    return 0 if args.dry_run else reporting.exit_code(result)


def chosen(only: tuple[str, ...]) -> list[str]:
    """List the rows that are asked for, by how they begin, in order."""
    names = [f"{part}: {row}" for part, (_, rows) in PARTS.items() for row in rows]
    return [name for name in names if not only or any(name.startswith(start) for start in only)]


def run_all(args: argparse.Namespace, names: list[str], result: dict) -> None:
    """Add the rows with these names to a result: timed parts one after another, then what is not timed side by side."""
    began, lock = time.monotonic(), threading.Lock()

    def tell(row: dict) -> None:
        with lock:
            result["rows"] = sorted([*result["rows"], row], key=lambda one: names.index(one["row"]))
            result["targets"] = _targets(result["rows"])
            if args.out:
                args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    def run(part: str) -> None:
        ends = began + PARTS[part][0] * args.seconds / ALL_SECONDS
        wanted = [name for name in names if name.startswith(f"{part}: ")]
        for row in rows_of(args, part, wanted, float("inf") if args.dry_run or args.only else ends):
            tell(row)

    for part in (part for part in PARTS if part not in UNTIMED):
        run(part)
    with ThreadPoolExecutor(len(UNTIMED)) as pool:
        list(pool.map(run, UNTIMED))


def rows_of(args: argparse.Namespace, part: str, names: list[str], ends: float) -> Iterator[dict]:
    """Yield the rows of a part: its own process makes them, but for tests, which are a process."""
    if part != "tests":
        longest = COMPILED_SECONDS if part.startswith(("clones", "Flux, compiled")) else ROW_SECONDS
        yield from measured(names, partial(_command, args, part), ends, longest * (10 if args.dry_run else 1))
    elif names:
        began = time.monotonic()
        row = gpu_checks.run_tests(args, ends)
        yield {"row": names[0], **row, "took_seconds": round(time.monotonic() - began, 1)}


def _command(args: argparse.Namespace, part: str, names: list[str], lines: Path) -> list[str]:
    options = {"comfyui": args.comfyui.resolve(), "models": args.models, "part": part, "out": lines}
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "benchmarks.gpu", *given, *(["--dry-run"] if args.dry_run else []), "--rows", *names]


def run_part(args: argparse.Namespace) -> int:
    """Measure rows of a part and write each as a line; end after one that left the device in a state that no kernel runs in."""
    # ComfyUI's main.py sets its own switch where it turns this allocator on (cuda_malloc.py).
    more = ("--cuda-malloc",) if "cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else ()
    comfy = load_comfy(args, on_cpu=args.dry_run, more=more, dynamic=DYNAMIC in args.part)
    from support.tiny_models import small_sizes

    with small_sizes() if args.dry_run else contextlib.nullcontext():
        for name, make in _makers(comfy, args):
            began = time.monotonic()
            try:
                row = make()
            except Exception as error:  # a row that fails is a result too
                row = {"problem": f"{type(error).__name__}: {error}"[:500]}
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"row": name, **row, "took_seconds": round(time.monotonic() - began, 1)}) + "\n")
            if "problem" in row and not _device_answers():
                return 0
    return 0


def _makers(comfy, args: argparse.Namespace) -> list[tuple[str, Callable[[], dict]]]:
    """Each row that is asked for, and what makes it."""
    made: dict[str, Callable[[], dict]]
    if args.part == "device":
        made = {"probes": probes_found, "rules": gpu_checks.rules}
    elif args.part == "layers":
        made = {layer: partial(gpu_layers.ways_timed, layer, args.dry_run) for layer in gpu_layers.LAYERS}
    elif args.part.startswith("clones"):
        made = {
            "loaded": partial(gpu_checks.static_clones, comfy),
            "compiled": partial(gpu_checks.compiled_clones, comfy, args.dry_run),
        }
    else:
        model = Model(comfy, args.part, args.dry_run, args.models)
        made = {setting: partial(model.row, setting) for setting in PARTS[args.part][1]}
    return [(name, made[name.partition(": ")[2]]) for name in args.rows]


def _device_answers() -> bool:
    """False after an error that no later kernel of the process survives, such as an illegal address."""
    import torch

    try:
        torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu").sum().item()
    except RuntimeError:
        return False
    return True


def probes_found() -> dict:
    """What `doctor` tells of this device."""
    from halfsafe.precision.report.doctor import diagnose

    found = diagnose()
    failed = [probe["name"] for probe in found["probes"] if probe["ok"] is False]
    return {"said": f"{found['device']['label']}; failed: {', '.join(failed) or 'none'}", "doctor": found}


def _targets(rows: list[dict]) -> dict[str, dict]:
    """Hold the larger of wall and device time of each setting against its limit."""
    found = {}
    for row in rows:
        setting = row["row"].partition(": ")[2]
        if setting in TARGETS and "seconds_to_core" in row:
            ratio = max(row[key] for key in ("seconds_to_core", "device_seconds_to_core") if key in row)
            found[row["row"]] = reporting.target(ratio, TARGETS[setting])
    return found


if __name__ == "__main__":
    sys.exit(main())
