"""Run the tests on several versions of torch and ComfyUI: `python scripts/versions.py --help`.

Each torch has a virtual environment of its own below the user's cache folder, kept for the next run (1 to 6 GB each). tests/unit runs
on each of them, tests/host and the tests of torch.compile on each with each ComfyUI folder given. `--cpu` runs them as on other CPUs too.
The tests that are run before a release alone run too (marker `release`). What follows `--` goes to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setup import environment
from setup.environment import ROOT, SetupError, clean_environ
from setup.machine import comfyui_version, counts_of

TORCH = ("2.8.0", "2.11.0", "newest")
LIBRARIES = ("numpy", "safetensors", "Pillow", "comfy-kitchen", "packaging")
OF_THE_MAIN_ENVIRONMENT = "tests/unit/project/test_scripts.py::test_broken_interpreter_is_not_usable"
CPUS = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "no-vnni": {"DNNL_MAX_CPU_ISA": "AVX2"},
}
"""What a CPU has: torch's own kernels by ATen, oneDNN's by DNNL. A CPU without VNNI adds int8 products in int16."""
FOLDERS = {"unit": "tests/unit", "host": "tests/host", "compile": "tests/host/compile"}
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
KEYS = ("tier", "python", "torch", "comfyui", "cpu", "threads")


def main() -> int:
    options, pytest_args = _parse(sys.argv[1:])
    os.environ["HALFSAFE_RELEASE"] = "1"  # with what `scripts/test.py` leaves out
    if options.seed:
        os.environ["HALFSAFE_SEED"] = options.seed  # the tests' processes have it from here
    rows: list[dict] = []
    for torch in options.torch:
        for row in _on_one_torch(torch, options, pytest_args):
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if options.save:
                _save(row)
    return 0 if rows and all(row["exit_code"] == 0 for row in rows) else 1


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="VERSION", help=f"default: {' '.join(TORCH)}")
    parser.add_argument("--comfyui", nargs="+", type=Path, default=[], metavar="DIR", help="folders for tests/host")
    parser.add_argument("--cpu", nargs="+", choices=CPUS, default=["native"], help="as on these CPUs")
    parser.add_argument(
        "--threads",
        nargs="+",
        type=int,
        default=[0],
        metavar="N",
        help="with these numbers of threads; 0: torch's own choice",
    )
    parser.add_argument("--seed", metavar="N", help="HALFSAFE_SEED: other numbers where tests draw by chance")
    parser.add_argument("--save", action="store_true", help="add the outcomes to benchmarks/results/versions.json")
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


def _on_one_torch(torch: str, options: argparse.Namespace, pytest_args: list[str]):
    python = _environment(
        environment.cache_folder() / "versions" / f"python-{platform.python_version()}-torch-{torch}",
        torch,
        bool(options.comfyui),
    )
    environment.provide_kitchen(python)
    about = {"python": platform.python_version(), "torch": _torch_version(python)}
    for cpu in options.cpu:
        for threads in options.threads:
            yield _run("unit", python, None, about | {"comfyui": "-", "cpu": cpu, "threads": threads}, pytest_args)
            for comfyui in options.comfyui:
                environment.install_packages(
                    python, f"what {comfyui} requires", ["-r", str(comfyui / "requirements.txt")]
                )
                row = about | {"comfyui": comfyui_version(comfyui), "cpu": cpu, "threads": threads}
                yield from (_run(tier, python, comfyui, row, pytest_args) for tier in ("host", "compile"))


def _environment(folder: Path, torch: str, for_comfyui: bool) -> Path:
    """Return the interpreter of a virtual environment with this torch, made or completed if need be.

    Raises:
        SetupError: a package could not be installed.
    """
    inside, stamp = environment._python_in(folder), folder / "halfsafe.json"
    if stamp.exists() and (not for_comfyui or json.loads(stamp.read_text(encoding="utf-8"))["for_comfyui"]):
        return inside
    if not inside.exists():
        environment.run_step(f"Creating {folder.name}", [sys.executable, "-m", "venv", str(folder)])
    environment.install_packages(inside, f"torch {torch}", [*_torch_packages(torch, for_comfyui), *LIBRARIES])
    environment.install_packages(inside, "the test tools", environment.TOOLS)
    stamp.write_text(json.dumps({"for_comfyui": for_comfyui}), encoding="utf-8")
    return inside


def _torch_packages(version: str, for_comfyui: bool) -> list[str]:
    """Name torch and the packages built for that version that ComfyUI imports."""
    exact, most = ("", "") if version == "newest" else (f"=={version}", f"<={version}")
    # A torchaudio later than its torch does not load, and asks for none; from 2.11 on it has numbers of its own.
    return [f"torch{exact}", "torchvision", f"torchaudio{most}"] if for_comfyui else [f"torch{exact}"]


def _torch_version(python: Path) -> str:
    done = subprocess.run(
        [str(python), "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        env=clean_environ(),
        check=False,
    )
    if done.returncode:
        raise SetupError(f"torch cannot be imported: {done.stderr.splitlines()[-1]}")
    return done.stdout.strip()


def _run(tier: str, python: Path, comfyui: Path | None, row: dict, pytest_args: list[str]) -> dict:
    """Run a tier and return its row: versions, counts, seconds and pytest's exit code."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [str(python), "-m", "pytest", FOLDERS[tier], f"--junitxml={junit}", "-q", "-p", "no:cacheprovider"]
        command += [
            "--deselect",
            OF_THE_MAIN_ENVIRONMENT,
            *(["--ignore", FOLDERS["compile"]] if tier == "host" else []),
        ]
        more = {
            "COMFYUI_DIR": comfyui and str(comfyui.resolve()),
            "OMP_NUM_THREADS": row["threads"] and str(row["threads"]),
        }
        environ = clean_environ(
            HALFSAFE_STRICT="1", **CPUS[row["cpu"]], **{name: value for name, value in more.items() if value}
        )
        code = subprocess.run([*command, *pytest_args], cwd=ROOT, env=environ, check=False).returncode
        return {
            "tier": tier,
            **row,
            "outcome": counts_of(junit),
            "seconds": round(time.monotonic() - started, 1),
            "exit_code": code,
        }


def _save(row: dict) -> None:
    """Keep the newest row of each set of versions."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["outcomes"] if RESULTS.exists() else []
    rows = [one for one in rows if any(one.get(key) != row[key] for key in KEYS)] + [row]
    RESULTS.write_text(json.dumps({"system": platform.system(), "outcomes": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
