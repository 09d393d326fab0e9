"""To the end of the first step: `python -m benchmarks first_step --kjnodes DIR --gguf DIR`, loading and one step of a sampler.

Against ComfyUI's loader with and without dynamic VRAM, KJNodes and ComfyUI-GGUF (folders of their checkouts; what is not given is left out),
from the disk and from the page cache, in fp32 on one thread. The sides take turns in one process after a small model; medians of the seconds
that the thread did not wait for a core (/proc/self/schedstat), the most memory. Dynamic VRAM is emulated: the step casts weights in host memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setup import machine
from setup.comfyui_server import make_base_directory
from setup.environment import ROOT, Environment, clean_environ, write_models

from . import reporting
from .measure import AnonymousMemory, set_up, weight_bytes

MODEL, WARMING = "wan_1_3b_part", "wan"
BF16, FP8, Q8_0 = f"{MODEL}.safetensors", f"{MODEL}_fp8.safetensors", "Q8_0.gguf"
SIDES = {
    "ComfyUI fp8": {"loader": "core", "storage": "fp8_e4m3fn", "file": BF16},
    "ComfyUI fp8, dynamic VRAM": {"loader": "core", "storage": "fp8_e4m3fn", "file": BF16, "dynamic": True},
    "ComfyUI bf16": {"loader": "core", "storage": "default", "file": BF16},
    "KJNodes fp8": {"loader": "kjnodes", "storage": "fp8_e4m3fn", "file": BF16},
    "ComfyUI-GGUF Q8_0 file": {"loader": "gguf", "file": Q8_0},
    "Halfsafe fp8": {"loader": "halfsafe", "storage": "fp8_e4m3fn", "file": BF16},
    "Halfsafe int8": {"loader": "halfsafe", "storage": "int8", "file": BF16},
    "Halfsafe bf16, dynamic VRAM": {"loader": "halfsafe", "storage": "as_file", "file": BF16, "dynamic": True},
    "Halfsafe, its fp8 file": {"loader": "halfsafe", "storage": "as_file", "file": FP8},
    "Halfsafe, its fp8 file, dynamic VRAM": {"loader": "halfsafe", "storage": "as_file", "file": FP8, "dynamic": True},
}
PEERS = ("kjnodes", "gguf")
KINDS = ("cold", "warm")
EACH_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
"""glibc keeps freed memory of up to 32 MB for itself otherwise, whose pages the next load need not ask for."""


def main() -> int:
    options = _parse()
    environment = Environment(Path(sys.executable), options.comfyui.resolve())
    given = {name: str(folder.resolve()) for name in PEERS if (folder := getattr(options, name))}
    sides = {name: job for name, job in SIDES.items() if job["loader"] not in PEERS or job["loader"] in given}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="halfsafe-first-step-") as folder:
        base = make_base_directory(Path(folder), ROOT)
        write_models(environment, base / "models" / "diffusion_models", MODEL, WARMING)
        taken = _in_process(environment, {"base": str(base), "packs": given, "sides": sides, "runs": options.runs})
    about = {
        "benchmark": "first_step",
        **machine.conditions(environment),
        "torch_threads": 1,
        "model": "8 of 30 blocks of Wan2.1 T2V 1.3B shapes, 0.40 billion parameters, 0.80 GB in bf16",
    }
    peers = {name: _commit(folder) for name, folder in given.items()}
    rows = [{"name": name, **_summary(found)} for name, found in taken.items()]
    result = {**about, "peers": peers, "runs": options.runs, "rows": rows, "targets": {}}
    return reporting.told(result, options, as_text)


def _parse():
    parser = reporting.parser(__doc__)
    parser.add_argument("--kjnodes", type=Path, metavar="DIR", help="a checkout of kijai/ComfyUI-KJNodes")
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="DIR",
        help="a checkout of city96/ComfyUI-GGUF, whose package gguf has to be installed",
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="loads of each side from the disk and from the page cache (default: 3)"
    )
    parser.add_argument("--folder", help="where to put the model files for the time being (2 GB, on a disk)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def _commit(folder: str) -> str:
    """A checkout's commit and its day; of a folder that is none, so much."""
    command = ["git", "-C", folder, "log", "-1", "--format=%h of %cs"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "not a git checkout"


def _in_process(environment: Environment, job: dict) -> dict[str, list[dict]]:
    command = [str(environment.python), "-m", "benchmarks.first_step", "--measure", json.dumps(job)]
    environ = clean_environ(COMFYUI_DIR=str(environment.comfyui), PYTHONDONTWRITEBYTECODE="1", **EACH_FREED)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environ, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _summary(found: list[dict]) -> dict:
    """The medians of seconds and the most of bytes, from the disk and from the page cache."""
    return {kind: {key: _of_all(key, [run[kind][key] for run in found]) for key in found[0][kind]} for kind in KINDS}


def _of_all(key: str, values: list) -> float | None:
    if None in values:
        return None
    return max(values) if key.endswith("bytes") else statistics.median(values)


def as_text(result: dict) -> str:
    """The figures as a table of Markdown."""
    lines = [f"{result['model']}; medians of {result['runs']}", ""]
    lines += [
        "| | load: disk | cache | to the end of the first step: disk | cache | computing, cache | anonymous memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cold, warm = row["cold"], row["warm"]
        seconds = (
            cold["loaded_seconds"],
            warm["loaded_seconds"],
            cold["step_seconds"],
            warm["step_seconds"],
            warm["step_cpu_seconds"],
        )
        memory = max(cold["anonymous_bytes"] or 0, warm["anonymous_bytes"] or 0)
        lines.append(f"| {row['name']} | {' | '.join(f'{value:.2f} s' for value in seconds)} | {memory / 1e9:.2f} GB |")
    return "\n".join(lines)


def measured(job: dict) -> dict[str, list[dict]]:
    """Each side's loads and steps: of a small model, then of its file from the disk and from the page cache, some times over."""
    taken: dict[str, list[dict]] = {name: [] for name in job["sides"]}
    ready = {name: _ready(side, job) for name, side in job["sides"].items()}
    for run in range(job["runs"]):
        for name in list(taken)[:: -1 if run % 2 else 1]:
            side, load = job["sides"][name], ready[name]
            path = Path(job["base"]) / "models" / "diffusion_models" / side["file"]
            _drop(path)
            cold = _load_and_step(load, side["file"], side)
            _cached(path)
            taken[name].append({"cold": cold, "warm": _load_and_step(load, side["file"], side)})
            print(f"{name}, run {run + 1} of {job['runs']}: {taken[name][-1]}", file=sys.stderr, flush=True)
    return taken


def _ready(side: dict, job: dict):
    """A side's loader, which has loaded and run a small model."""
    load = {"core": _core, "halfsafe": _halfsafe, "kjnodes": _kjnodes, "gguf": _gguf}[side["loader"]]({**job, **side})
    if side["loader"] != "gguf":
        _load_and_step(load, f"{WARMING}.safetensors", side)
    return load


def _load_and_step(load, name: str, job: dict) -> dict:
    import torch
    from support import families
    from support.mapped_loading import mapped_loading

    with torch.inference_mode(), AnonymousMemory() as memory:
        start = _Clock()
        with mapped_loading() if job.get("dynamic") else contextlib.nullcontext():
            model = load(name)
        loaded = _Clock()
        families.sample(model, "wan", steps=1)
        ended = _Clock()
    found = {"loaded_seconds": loaded.seconds - start.seconds, "loaded_cpu_seconds": loaded.computed - start.computed}
    found |= {"step_seconds": ended.seconds - start.seconds, "step_cpu_seconds": ended.computed - start.computed}
    found |= {"anonymous_bytes": memory.above_start, "weight_bytes": weight_bytes(model)}
    _unload(model)
    return found


class _Clock:
    """Now: seconds of the clock less those that this thread waited for a core, and of computing."""

    def __init__(self):
        waited = 0.0
        with contextlib.suppress(OSError), open("/proc/self/schedstat") as stat:
            waited = int(stat.read().split()[1]) / 1e9
        self.seconds, self.computed = time.perf_counter() - waited, time.process_time()


def _unload(model) -> None:
    import comfy.model_management

    comfy.model_management.unload_all_models()
    del model
    gc.collect()


def _drop(path: Path) -> None:
    """Drop a file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached(path: Path) -> None:
    """Read a file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 23):
            pass


def _core(job: dict):
    import nodes

    return lambda name: nodes.UNETLoader().load_unet(name, job["storage"])[0]


def _halfsafe(job: dict):
    from support import inprocess

    node = inprocess.node_classes(inprocess.load_pack())["HalfsafeLoadDiffusionModel"]
    return lambda name: node.execute(name, job["storage"], "fp32").args[0]


def _kjnodes(job: dict):
    """Its loader's module alone: the pack's others ask for packages that have nothing to do with it."""
    folder = Path(job["packs"]["kjnodes"])
    for package, place in (("kjnodes", folder), ("kjnodes.nodes", folder / "nodes")):
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    node = importlib.import_module("kjnodes.nodes.model_optimization_nodes").DiffusionModelLoaderKJ()
    return lambda name: node.patch_and_load(name, job["storage"], "fp32", False, "disabled", False)[0]


def _gguf(job: dict):
    import asyncio

    import nodes

    asyncio.run(nodes.load_custom_node(job["packs"]["gguf"], module_parent="custom_nodes"))
    node = nodes.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]()
    return lambda name: node.load_unet(name)[0]


def write(job: dict) -> None:
    """Write the files that sides load beside the bf16 one: in fp8 by this pack, in Q8_0 as ComfyUI-GGUF's converter does."""
    from halfsafe.precision.commands.convert import convert_file
    from halfsafe.precision.plan.rules import rules_from

    folder = Path(job["base"]) / "models" / "diffusion_models"
    convert_file(folder / BF16, folder / FP8, "fp8_e4m3fn", rules_from())
    if "gguf" in job["packs"]:
        _write_q8_0(folder)


def _write_q8_0(folder: Path) -> None:
    """Write the model as ComfyUI-GGUF's converter lays it out: matrices quantized, the rest F32."""
    import gguf
    from safetensors.torch import load_file

    writer = gguf.GGUFWriter(str(folder / Q8_0), "wan")
    for name, weight in load_file(folder / BF16).items():
        whole = weight.dim() != 2 or weight.numel() <= 1024 or "modulation" in name
        kind = gguf.GGMLQuantizationType["F32" if whole else "Q8_0"]
        writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _measure(job: dict) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        set_up(Path(job["base"]))
        write(job)
        result = measured(job)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(_measure(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--measure"] else main())
