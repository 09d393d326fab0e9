"""What figures were taken with: the machine, torch and ComfyUI."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from .environment import Environment


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


def counts_of(junit: Path) -> str:
    """Return the counts of a JUnit file in words."""
    if not junit.exists():
        return "did not run"
    suite = next(ElementTree.parse(junit).iter("testsuite"))
    total, failed, errors, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped"))
    return f"{total - failed - errors - skipped} passed, {failed} failed, {errors} errors, {skipped} skipped"


def cpu_of(junit: Path) -> tuple[float, list[dict]]:
    """Return the seconds of the processor that a run of the tests took, and of each test its ``name``, ``own_seconds`` and
    ``may_take_seconds``, the one that took the most first."""
    tests = []
    for case in ElementTree.parse(junit).iter("testcase") if junit.exists() else ():
        numbers = {str(one.get("name")): one.get("value") for one in case.iter("property")}
        if "cpu_seconds" in numbers:
            seconds = {name: float(value or 0) for name, value in numbers.items() if name.endswith("_seconds")}
            tests.append({"name": f"{case.get('classname')}.{case.get('name')}", **seconds})
    return sum(test["cpu_seconds"] for test in tests), sorted(tests, key=lambda test: -test["own_seconds"])
