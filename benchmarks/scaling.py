"""How the pack's own work grows with the model: `python -m benchmarks scaling --comfyui DIR [--save] [--large]`.

Files with the shapes of Wan2.1 and more blocks, streamed in bf16. For each, in processes of their own: loading to fp8,
converting to fp8, planning, attaching a plan with the bookkeeping of the first call, and attaching a guard with the
bookkeeping of a clean call; all without the model's arithmetic. Peak memory is anonymous and above what it was before.

Prints a table and the power of the parameters that each step's time grows with; exits with 2 where one passes 1.15.
`--large` adds 5 billion parameters: a file of 10 GB and another of 5 GB, and 6 GB of memory.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setup import machine
from setup.comfyui_server import make_base_directory
from setup.environment import ROOT, Environment, clean_environ

from . import reporting
from .measure import AnonymousMemory, set_up

SIZES = {"0.1": (1024, 4, 4096), "0.4": (1536, 7, 8960), "1.4": (1536, 30, 8960)}
LARGE = {"5": (3072, 30, 14336)}
STEPS = ("load", "convert", "plan", "patch", "guard")
REPEATS = 5
EXPONENT_LIMIT, FREE_GIGABYTES = 1.15, 14


def measure(step: str, path: Path, base: Path) -> dict:
    """Seconds and peak bytes of one step, in a process that has not imported ComfyUI yet."""
    set_up(base)
    from support import inprocess

    nodes = inprocess.node_classes(inprocess.load_pack())
    return globals()[f"_{step}"](nodes, path)


def _timed(work, repeats: int = 1) -> dict:
    taken = []
    with AnonymousMemory() as memory:
        for _ in range(repeats):
            gc.collect()
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return {"seconds": statistics.median(taken), "anonymous_bytes": memory.above_start}


def _loaded(nodes, path: Path, storage: str = "fp8_e4m3fn"):
    return nodes["HalfsafeLoadDiffusionModel"].execute(path.name, storage, "auto").args[0]


def _load(nodes, path: Path) -> dict:
    return _timed(lambda: _loaded(nodes, path))


def _convert(nodes, path: Path) -> dict:
    from halfsafe.precision.commands.convert import convert_file
    from halfsafe.precision.plan.rules import rules_from

    target = path.with_name("converted.safetensors")
    try:
        return _timed(lambda: convert_file(path, target, "fp8_e4m3fn", rules_from()))
    finally:
        target.unlink(missing_ok=True)


def _plan(nodes, path: Path) -> dict:
    """From the modules in memory to a decision for each layer."""
    model = _loaded(nodes, path)
    return _timed(lambda: nodes["HalfsafeComputeDtype"].execute(model, "fp16_safe"), REPEATS)


def _patch(nodes, path: Path) -> dict:
    """A plan attached, its first call prepared, its patches put on and taken off again."""
    from halfsafe.nodes.host.run.compute import compute_of

    model = _loaded(nodes, path)

    def work():
        planned = nodes["HalfsafeComputeDtype"].execute(model, "fp16_safe").args[0]
        call(planned, compute_of(planned))

    return _timed(work, REPEATS)


def _guard(nodes, path: Path) -> dict:
    """A guard attached and its first, clean call around nothing."""
    from halfsafe.nodes.host.guard.model import guard_of

    model = _loaded(nodes, path)

    def work():
        guarded = nodes["HalfsafeNaNGuard"].execute(model, "retry_higher", 8).args[0]
        call(guarded, guard_of(guarded))

    return _timed(work, REPEATS)


def call(patcher, wrapper) -> None:
    """One call of a wrapper on a model that returns its input at once."""
    import torch

    class Executor:
        class_obj = patcher.model

        def __call__(self, x, *args, **kwargs):
            return x

    patcher.model.current_patcher = patcher
    with torch.inference_mode():
        wrapper(Executor(), torch.zeros(1, 16, 1, 8, 8), torch.ones(1), transformer_options={})


def run(environment: Environment, folder: Path, sizes: dict) -> list[dict]:
    """One row for each size and step."""
    base, rows = make_base_directory(folder, ROOT), []
    for name, size in sizes.items():
        path = base / "models" / "diffusion_models" / "model.safetensors"
        parameters = int(_child(environment, "write", path, *map(str, size)))
        for step in STEPS:
            figures = json.loads(_child(environment, "measure", path, step, str(base)))
            rows.append({"model": f"{name} B", "parameters": parameters, "step": step, **figures})
            print(f"{name} B {step}: {figures['seconds']:.4f} s", file=sys.stderr, flush=True)
        path.unlink()
    return rows


def _child(environment: Environment, action: str, path: Path, *rest: str) -> str:
    environ = clean_environ(COMFYUI_DIR=str(environment.comfyui), PYTHONDONTWRITEBYTECODE="1")
    command = [str(environment.python), "-m", "benchmarks.scaling", "--child", action, str(path), *rest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise SystemExit(f"{action} {' '.join(rest)} failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def _write(path: Path, dim: int, blocks: int, ffn: int) -> int:
    import math

    sys.path[:] = [str(ROOT / "tests"), *(folder for folder in sys.path if Path(folder) != ROOT)]
    import torch
    from support import tiny_models

    shapes = tiny_models.wan_shapes(dim, blocks, ffn, in_dim=16, text_dim=4096)
    tiny_models._stream(path, shapes, torch.bfloat16, 0)
    return sum(map(math.prod, shapes.values()))


def exponents(rows: list[dict]) -> dict[str, float]:
    """By step, from smallest to largest model: the power of the parameters that its time grows with; 1 is linear."""
    import math

    found = {}
    for step in STEPS:
        first, *_, last = (row for row in rows if row["step"] == step)
        growth = math.log(last["seconds"] / first["seconds"])
        found[step] = round(growth / math.log(last["parameters"] / first["parameters"]), 3)
    return found


def as_table(rows: list[dict]) -> str:
    lines = ["| parameters | step | seconds | peak memory |", "|---|---|---|---|"]
    for row in rows:
        memory = "unknown" if row["anonymous_bytes"] is None else f"{row['anonymous_bytes'] / 1e6:.1f} MB"
        lines.append(f"| {row['parameters'] / 1e9:.2f} B | {row['step']} | {row['seconds']:.4f} | {memory} |")
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return _in_child(*sys.argv[2:])
    parser = reporting.parser(__doc__)
    parser.add_argument("--folder", help="where to put the model files for the time being")
    parser.add_argument("--large", action="store_true", help="5 billion parameters too")
    options = parser.parse_args()
    environment = Environment(Path(sys.executable), options.comfyui.resolve())
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="halfsafe-scaling-") as folder:
        free = shutil.disk_usage(folder).free / 1e9
        if options.large and free < FREE_GIGABYTES + 5:
            parser.error(f"{free:.0f} GB are free in {folder}; --large needs {FREE_GIGABYTES + 5}")
        rows = run(environment, Path(folder), SIZES | (LARGE if options.large else {}))
    found = exponents(rows)
    targets = {step: reporting.target(value, EXPONENT_LIMIT) for step, value in found.items()}
    about = {"benchmark": "scaling", "model": "Wan2.1 shapes, bf16, in the page cache"}
    result = machine.conditions(environment) | about | {"rows": rows, "exponents": found, "targets": targets}
    if options.save:
        reporting.save(result)
    print(as_table(rows), json.dumps({"exponents": found}, indent=2), sep="\n")
    return reporting.exit_code(result)


def _in_child(action: str, path: str, *rest: str) -> int:
    if action == "write":
        print(_write(Path(path), *map(int, rest)))
        return 0
    with contextlib.redirect_stdout(io.StringIO()):
        result = measure(rest[0], Path(path), Path(rest[1]))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
