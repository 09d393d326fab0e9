"""Halfsafe against the alternative, the same work in the same run: `python -m benchmarks NAME [options]`; `NAME --help` lists them.

load: a bf16 file with the shapes of Wan2.1 1.3B (2.84 GB) to scaled fp8 and to int8 in memory, against ComfyUI's UNETLoader.
first_step: loading and one step, from the disk and from the page cache, against ComfyUI's loaders, KJNodes and ComfyUI-GGUF.
convert: the same file disk to disk, against reading all, quantizing all to fp8 and saving all.
safe16, fp8mm, patch, guard: what a compute plan and the guard cost and how close they come.
lora: LoRAs beside 8-bit weights against LoRAs merged into them.
import: how long ComfyUI takes to import the pack.
calibrate: weights rounded by a calibration against rounded to nearest, on trained models.
host_time: what a call costs the host in each setting.
cost: what fp16_safe costs beside fp16, by count and estimated for several cards.
decibels: errors of each storage and product on trained models, as SNR in dB.
drift: how far clean runs of every family are from the thresholds of the guard's check.
gpu: everything that a GPU is needed for.

Prints what was measured, with `--json` every run, and saves it with `--save`. Exits with 2 where a target is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from setup.environment import ROOT, Environment, SetupError, clean_environ, prepare

MODULES = {
    **dict.fromkeys(("load", "convert"), "files"),
    **dict.fromkeys(("safe16", "fp8mm", "patch", "guard", "lora"), "compute"),
    **{
        "import": "import_time",
        "cost": "cost",
        "host_time": "host_time",
        "calibrate": "calibrate",
        "first_step": "first_step",
        "decibels": "decibels",
        "drift": "drift",
        "gpu": "gpu",
    },
}
SHARED = ("files", "compute")


def main() -> int:
    """Run the benchmark named on the command line in an environment that has torch and a ComfyUI, and return its exit code."""
    named = sys.argv[1:2] and sys.argv[1] in MODULES
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=not named
    )
    parser.add_argument("name", choices=MODULES)
    parser.add_argument("--comfyui", type=Path, help="a ComfyUI folder to use instead of the pinned one")
    options, rest = parser.parse_known_args()
    try:
        environment = _environment(options.comfyui)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    module = MODULES[options.name]
    arguments = [options.name] if module in SHARED else []
    command = [
        str(environment.python),
        "-m",
        f"benchmarks.{module}",
        *arguments,
        "--comfyui",
        str(environment.comfyui),
        *rest,
    ]
    return subprocess.run(command, check=False, env=clean_environ(PYTHONPATH=str(ROOT))).returncode


def _environment(comfyui: Path | None) -> Environment:
    """This interpreter where it has torch and a ComfyUI is named, else the project's own environment."""
    named = comfyui or os.environ.get("COMFYUI_DIR")
    if named and importlib.util.find_spec("torch"):
        return Environment(Path(sys.executable), Path(named).resolve())
    return prepare(comfyui)


if __name__ == "__main__":
    sys.exit(main())
