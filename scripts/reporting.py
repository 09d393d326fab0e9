"""What the benchmarks share: options, the conditions of a run, targets, and the files in `benchmarks/results/`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

from environment import ROOT, Environment

FOLDER = ROOT / "benchmarks" / "results"


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with `--comfyui`, in whose place COMFYUI_DIR may stand, and `--save`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = os.environ.get("COMFYUI_DIR")
    made.add_argument("--comfyui", type=Path, default=named, required=not named, help="a ComfyUI folder (default: COMFYUI_DIR)")
    made.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    return made


def target(measured: float, limit: float, at_least: bool = False) -> dict:
    """How a figure stands to its limit, which it may not pass; or, with ``at_least``, has to reach."""
    return {"limit": limit, "measured": measured, "met": measured >= limit if at_least else measured <= limit}


def exit_code(result: dict) -> int:
    """0 where every target of a result is met, else 2."""
    return 0 if all(target["met"] for target in result["targets"].values()) else 2


def save(result: dict) -> None:
    """Write a result to the file of its benchmark."""
    (FOLDER / f"{result['benchmark']}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def conditions(environment: Environment) -> dict:
    """What the figures were taken with. Errors depend on torch; times also on the machine."""
    code = "import json, torch; print(json.dumps([torch.__version__, torch.get_num_threads()]))"
    done = subprocess.run([str(environment.python), "-c", code], capture_output=True, text=True, check=True)
    torch_version, threads = json.loads(done.stdout)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch_version,
        "torch_threads": threads,
        "python": platform.python_version(),
        "system": platform.system(),
        "comfyui": comfyui_version(environment.comfyui),
    }


def gpu_conditions(environment: Environment) -> dict:
    """What the figures of a GPU were taken with; "cpu" as the device where there is none."""
    code = "import json, torch; there = torch.cuda.is_available(); print(json.dumps([torch.cuda.get_device_name() if there else 'cpu', torch.version.cuda]))"
    done = subprocess.run([str(environment.python), "-c", code], capture_output=True, text=True, check=True)
    device, cuda = json.loads(done.stdout)
    return conditions(environment) | {"device": device, "driver": driver(), "cuda": cuda}


def driver() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def comfyui_version(comfyui: Path) -> str:
    """The version a ComfyUI folder says it is."""
    return (comfyui / "comfyui_version.py").read_text(encoding="utf-8").split('"')[1]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
