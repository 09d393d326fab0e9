"""Test and measure the pack on a GPU machine without a network: `pack` here, `run` there, one command of six minutes.

    python scripts/gpu.py pack .gpu --comfyui DIR
    python3 scripts/gpu.py run .gpu --out RESULTS [--only PART ...]

The machine brings Python, torch and what ComfyUI commonly needs; `.gpu` holds the rest: a ComfyUI without what no model and no server without
a page needs, and wheels. `run` prints a table, and leaves `gpu.json`, a row written as it comes (benchmarks/gpu.py), and the
outcome of each test. `--dry-run` runs it on a CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from setup.environment import ROOT, SetupError, installed

MIB = 1 << 20
PLATFORMS = tuple(f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
# What ComfyUI imports of its requirements and such a machine lacks. It never imports kornia, spandrel or PyOpenGL for a model.
WITH_DEPENDENCIES = ("alembic", "SQLAlchemy>=2.0.0", "pydantic~=2.0", "blake3")
WITHOUT = ("comfy-kitchen", "comfy-aimdo", "torchsde", "trampoline")
NOT_NEEDED_OF_COMFYUI = re.compile(
    r"(tests|tests-unit|blueprints|comfy_api_nodes|models|input|output|script_examples|custom_nodes|\.[^/]+)(/|$)"
    r"|comfy/(text_encoders/(?!t5_)[^/]*tokenizer[^/.]*)(/|$)|.*(__pycache__(/|$)|\.(md|yaml|example|svg|png)$)"
)
# The T5 tokenizer stays: the demo's text encoder needs it. ComfyUI imports av for videos and sound, whose wheel alone is 36 MB.
STUBS = ("av", "av/container", "av/subtitles", "av/subtitles/stream", "av/video", "av/video/reformatter")
STUB = "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n    return type(name, (), {})\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--comfyui", type=Path, help="a ComfyUI folder (default: COMFYUI_DIR)")
    packing.add_argument("--python", default="3.12", help="the machine's Python (default: 3.12)")
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--seconds", default="360", help="scales the time of each part (default: 360)")
    running.add_argument("--only", nargs="+", default=(), metavar="PART", help="only these parts or rows")
    running.add_argument("--dry-run", action="store_true", help="on a CPU, with small models")
    options = parser.parse_args()
    try:
        if options.command == "pack":
            pack(options.folder, installed(options.comfyui).comfyui, options.python)
            return 0
        return run(options)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1


def pack(folder: Path, comfyui: Path, python: str) -> None:
    """Make the folder anew.

    Raises:
        SetupError: the folder has other contents, or a wheel could not be had.
    """
    if folder.exists() and not (folder / "comfyui.tar.xz").exists():
        raise SetupError(f"{folder} exists and was not packed here: name another folder.")
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    lines = (comfyui / "requirements.txt").read_text(encoding="utf-8").split()
    versions = {re.split(r"[<>=~!]", line)[0]: line for line in lines}
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
        "-d",
        str(wheels),
    ]
    target = [
        "--implementation",
        "cp",
        "--python-version",
        python,
        *(part for tag in PLATFORMS for part in ("--platform", tag)),
    ]
    for names in (WITH_DEPENDENCIES, ("--no-deps", *(versions.get(name, name) for name in WITHOUT))):
        _checked([*pip, *target, *names], f"Downloading {', '.join(names)}")
    for wheel in wheels.glob("*.whl"):
        if wheel.stat().st_size > MIB:
            slim(wheel)
    with tarfile.open(folder / "comfyui.tar.xz", "w:xz") as tar:
        for path in sorted(comfyui.iterdir()):
            tar.add(path, path.name, filter=lambda member: None if NOT_NEEDED_OF_COMFYUI.match(member.name) else member)
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {taken / MIB:.1f} MiB for Python {python}")


def slim(wheel: Path) -> None:
    """Write a wheel again with LZMA, which halves CUDA's kernels."""
    small = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_LZMA) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    small.replace(wheel)


def run(options: argparse.Namespace) -> int:
    """Unpack into a folder of its own and run benchmarks/gpu.py with it; its exit code.

    Raises:
        SetupError: the folder was not packed here, or its wheels do not fit this Python.
    """
    if not (options.folder / "comfyui.tar.xz").exists():
        raise SetupError(
            f"{options.folder} was not packed: make it with `python scripts/gpu.py pack {options.folder}`."
        )
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="halfsafe-gpu-") as name:
        work = Path(name)
        wheels = map(str, sorted((options.folder / "wheels").glob("*.whl")))
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        _checked([*pip, "--no-cache-dir", "--target", str(work / "site"), *wheels], "Installing the wheels")
        for stub in STUBS:
            (work / "stubs" / stub).mkdir(parents=True)
            (work / "stubs" / stub / "__init__.py").write_text(STUB, encoding="utf-8")
        with tarfile.open(options.folder / "comfyui.tar.xz") as tar:
            tar.extractall(work / "comfyui", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        environ = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "HALFSAFE_DEVICE_PROFILE")
        }
        environ |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "scripts"))), "PYTHONUTF8": "1"}
        # ComfyUI's main.py turns this allocator on by default (cuda_malloc.py).
        environ |= {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
        command = [
            str(python_with(work)),
            "-m",
            "benchmarks.gpu",
            "--comfyui",
            str(work / "comfyui"),
            "--out",
            str((options.out / "gpu.json").absolute()),
        ]
        command += ["--dry-run"] if options.dry_run else ["--seconds", options.seconds]
        command += ["--only", *options.only] if options.only else []
        return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


def python_with(work: Path) -> Path:
    """Make an interpreter that finds what was unpacked, then all that this one finds, whatever its environment: a server is started without
    PYTHONPATH."""
    venv.create(work / "env", symlinks=True)
    (packages,) = (work / "env" / "lib").glob("python*/site-packages")
    own = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    lines = [str(work / "stubs"), str(work / "site"), *(f"import site; site.addsitedir({path!r})" for path in own)]
    (packages / "machine.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return work / "env" / "bin" / "python"


def _checked(command: list[str], title: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{title} failed:\n{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
