"""Halfsafe, ComfyUI and other packs on the same work: `bench_peers.py --comfyui DIR --kjnodes DIR --gguf DIR --wrapper DIR`.

The folders are checkouts of kijai/ComfyUI-KJNodes, city96/ComfyUI-GGUF and kijai/ComfyUI-WanVideoWrapper; `--deps` names
folders with what they import. A pack that is not given is left out and named; what a pack cannot do here stands in the
result with its error.

load: a bf16 file with the shapes of Wan2.1 1.3B to fp8 (GGUF: a Q8_0 file of it), then one call in fp32; the pack's import.
options: every weight dtype and compute dtype of a loader. accumulation: torch's flags before, in and after a run.
nan: models that overflow in fp16. fp8_product: fp8 operands with outliers. overhead: a run of 20 steps with nodes that set flags.

Each load is a process of its own, the sides take turns, the numbers are medians; files are in the page cache, bytecode is in
place. Errors and flags are not timed and are taken once, in one process for each pack. About eight minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import peers_table
import reporting
from comfyui_server import make_base_directory
from environment import ROOT, Environment, clean_environ

MODEL = "Wan2.1 T2V 1.3B shapes, bf16, 1.42 billion parameters, 2.84 GB, in the page cache"
PROFILE = "cpu; accumulation, fp8_product and overhead as on sm_89, whose flags and kernels a CPU does not have"
CHECKOUTS = {"KJNodes": "kjnodes", "GGUF": "gguf", "WanVideoWrapper": "wrapper"}
SECTIONS = ("options", "accumulation", "nan", "fp8_product", "overhead", "load")
BF16_FILE, Q8_FILE = {"file": "wan_1_3b_shaped.safetensors"}, {"file": "wan_1_3b_shaped.gguf"}
REFERENCE = "as stored"
LOADS = {
    REFERENCE: {"side": "ComfyUI", "storage": "default", **BF16_FILE},
    "ComfyUI UNETLoader fp8_e4m3fn": {"side": "ComfyUI", "storage": "fp8_e4m3fn", **BF16_FILE},
    "Halfsafe fp8_e4m3fn": {"side": "Halfsafe", "storage": "fp8_e4m3fn", **BF16_FILE},
    "KJNodes DiffusionModelLoaderKJ fp8_e4m3fn": {"side": "KJNodes", "storage": "fp8_e4m3fn", **BF16_FILE},
    "GGUF UnetLoaderGGUF Q8_0": {"side": "GGUF", "storage": "Q8_0", **Q8_FILE},
    "WanVideoWrapper fp8_e4m3fn": {"side": "WanVideoWrapper", "storage": "fp8_e4m3fn", **BF16_FILE},
    "WanVideoWrapper fp8_e4m3fn_scaled": {"side": "WanVideoWrapper", "storage": "fp8_e4m3fn_scaled", **BF16_FILE},
}
OPTIONS = {side: {"side": side} for side in ("ComfyUI", "KJNodes", "Halfsafe")}
SUMS = {
    "Halfsafe Accumulation": {"side": "HalfsafeAccumulation", "pack": "Halfsafe"},
    "KJNodes ModelPatchTorchSettings": {"side": "ModelPatchTorchSettings", "pack": "KJNodes"},
    "KJNodes DiffusionModelLoaderKJ": {"side": "DiffusionModelLoaderKJ", "pack": "KJNodes"},
    "WanVideoWrapper WanVideoModelLoader": {"side": "WanVideoModelLoader", "pack": "WanVideoWrapper"},
}
NAN = {
    "ComfyUI fp16": {"side": "ComfyUI", "storage": "default", "compute": "fp16"},
    "ComfyUI bf16": {"side": "ComfyUI", "storage": "default", "compute": "bf16"},
    "KJNodes fp16": {"side": "KJNodes", "storage": "fp16", "compute": "fp16"},
    "WanVideoWrapper fp16": {"side": "WanVideoWrapper", "storage": "default", "compute": "fp16"},
    "Halfsafe fp16_safe": {"side": "Halfsafe", "storage": "default", "compute": "fp16_safe"},
    "Halfsafe fp16 + NaN Guard": {"side": "Halfsafe", "storage": "default", "compute": "fp16", "guard": True},
}
PRODUCTS = {side: {"side": side} for side in ("ComfyUI", "KJNodes", "WanVideoWrapper", "Halfsafe")}
EXACT = {"options": OPTIONS, "accumulation": SUMS, "nan": NAN, "fp8_product": PRODUCTS}


class Bench:
    """The jobs of a run: ComfyUI, a base directory, the peers' folders by name."""

    def __init__(self, environment: Environment, base: Path, packs: dict[str, Path], deps: list[Path]):
        self.environment, self.base = environment, base
        self.packs, self.deps = packs, [str(folder) for folder in deps]

    def measure(self, name: str, **job: object) -> dict:
        """The figures of one job of benchmarks/peers_measure.py, in a process of its own."""
        packs = {pack: str(folder) for pack, folder in self.packs.items()}
        job = {"measure": name, "base": str(self.base), "packs": packs, "deps": self.deps, **job}
        command = [str(self.environment.python), str(ROOT / "benchmarks" / "peers_measure.py"), json.dumps(job)]
        cache = str(self.base / "bytecode")
        environ = clean_environ(COMFYUI_DIR=str(self.environment.comfyui), PYTHONPYCACHEPREFIX=cache)
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        print(name, job.get("side", ""), done.stdout.strip()[:160], file=sys.stderr, flush=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def there(self, jobs: dict[str, dict]) -> dict[str, dict]:
        """The jobs whose pack is given."""
        return {name: job for name, job in jobs.items() if pack_of(job) not in CHECKOUTS or pack_of(job) in self.packs}

    def exact(self, sections: list[str]) -> dict[str, list[dict]]:
        """The rows of each section in the order of its jobs, taken in one process for each pack."""
        parts = [
            {"measure": section, "name": name, **job} for section in sections for name, job in self.there(EXACT[section]).items()
        ]
        rows = {}
        for pack in dict.fromkeys(map(pack_of, parts)):
            theirs = [part for part in parts if pack_of(part) == pack]
            found = self.measure("several", side=pack, parts=theirs)["rows"]
            rows |= {(part["measure"], part["name"]): row for part, row in zip(theirs, found, strict=True)}
        return {section: [rows[section, name] for name in self.there(EXACT[section])] for section in sections}

    def in_turns(self, measure: str, jobs: dict[str, dict], runs: int) -> list[dict]:
        """Medians of ``runs`` for each job, the jobs taking turns; one that fails is not repeated."""
        taken: dict[str, list[dict]] = {name: [] for name in self.there(jobs)}
        for index in range(runs):
            for name in list(taken)[:: -1 if index % 2 else 1]:
                if not any("fails" in run for run in taken[name]) and (name != REFERENCE or not index):
                    taken[name].append(self.measure(measure, **jobs[name]))
        return [{"name": name, **medians(found)} for name, found in taken.items()]


def pack_of(job: dict) -> str:
    """The pack that does a job."""
    return job.get("pack", job["side"])


def medians(found: list[dict]) -> dict:
    """The median of each number of several runs; of words and of nothing, the first."""
    return {key: _median([run.get(key) for run in found]) for key in found[0]}


def _median(values: list) -> object:
    numbers = [value for value in values if isinstance(value, int | float)]
    return statistics.median(numbers) if numbers else values[0]


def run(bench: Bench, sections: list[str], runs: int) -> dict:
    """The figures of each section. The Q8_0 file is written by the `gguf` package that the peer itself reads it with."""
    bench.measure("files")
    if "load" in sections and "GGUF" in bench.packs:
        bench.measure("gguf_file")
    found = bench.exact([name for name in sections if name in EXACT])
    if "overhead" in sections:
        found["overhead"] = bench.measure("overhead", pairs=5 * runs)
    if "load" in sections:
        found["load"] = bench.in_turns("load", LOADS, runs)
    return {name: found[name] for name in sections}


def commit_of(folder: Path) -> str:
    """A checkout's commit and its day."""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def conditions(environment: Environment, packs: dict[str, Path]) -> dict:
    """What the figures were taken with, and which packs were left out."""
    left_out = [f"{name}: not given (--{flag} DIR)" for name, flag in CHECKOUTS.items() if name not in packs]
    peers = {name: commit_of(folder) for name, folder in packs.items()}
    found = {"model": MODEL, "halfsafe_device_profile": PROFILE, "peers": peers, "left_out": left_out}
    return {"benchmark": "peers", **reporting.conditions(environment), **found}


def _parse() -> argparse.Namespace:
    parser = reporting.parser(__doc__)
    for name, flag in CHECKOUTS.items():
        parser.add_argument(f"--{flag}", type=Path, metavar="DIR", help=f"a checkout of {name}")
    parser.add_argument("--deps", type=Path, nargs="*", default=[], metavar="DIR", help="folders with what the peers import")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help="where to put the model files for the time being (5 GB)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    if options.save and set(options.only) != set(SECTIONS):
        parser.error("--save writes a whole result: leave --only out")
    for flag in CHECKOUTS.values():
        folder = getattr(options, flag)
        if folder is not None and not (folder / "__init__.py").is_file():
            parser.error(f"--{flag}: there is no pack in {folder}")
    return options


def main() -> int:
    options = _parse()
    environment = Environment(Path(sys.executable), Path(options.comfyui).resolve())
    given = {name: getattr(options, flag) for name, flag in CHECKOUTS.items()}
    packs = {name: folder.resolve() for name, folder in given.items() if folder}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="halfsafe-peers-") as folder:
        bench = Bench(environment, make_base_directory(Path(folder), ROOT), packs, [path.resolve() for path in options.deps])
        sections = run(bench, [name for name in SECTIONS if name in options.only], options.runs)
    result = conditions(environment, packs) | {"runs": options.runs, "sections": sections}
    if options.save:
        reporting.save(result)
    print(json.dumps(result, indent=2) if options.json else peers_table.as_text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
