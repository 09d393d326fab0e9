"""Pack what a GPU machine without a network lacks to test and measure this pack: `gpu_run.py` uses it there.

    python scripts/gpu_bundle.py .gpu --comfyui DIR

The machine brings Python, torch and the packages in `BROUGHT`; the checkout travels too, and both have at most 64 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from setup import machine
from setup.environment import ROOT, SetupError, find_comfyui

MIB = 1 << 20
LIMIT = 64 * MIB
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
# What ComfyUI imports of its requirements and such a machine lacks. It never imports kornia, spandrel or PyOpenGL for a model.
WITH_DEPENDENCIES = ("alembic", "SQLAlchemy>=2.0.0", "pydantic~=2.0", "blake3")
ALONE = ("comfy-kitchen", "comfy-aimdo", "torchsde", "trampoline")
BROUGHT = (
    "torch", "torchvision", "torchaudio", "triton", "numpy", "scipy", "pillow", "transformers", "tokenizers", "sentencepiece",
    "safetensors", "einops", "aiohttp", "yarl", "pyyaml", "tqdm", "psutil", "filelock", "requests", "packaging", "pip",
    "setuptools", "pytest", "pytest-timeout", "hypothesis",
)  # fmt: skip
NOT_NEEDED_IN_WHEELS = {"comfy_kitchen": ("comfy_kitchen/backends/hip/_C",)}
NOT_NEEDED_OF_COMFYUI = re.compile(
    r"(tests|tests-unit|blueprints|comfy_api_nodes|models|input|output|script_examples|custom_nodes|\.[^/]+)(/|$)"
    r"|comfy/(text_encoders/[^/]*tokenizer[^/.]*)(/|$)|.*(__pycache__(/|$)|\.(md|yaml|example|svg|png)$)"
)
# ComfyUI imports av for videos and sound, whose wheel alone is 36 MB.
STUBS = ("av", "av/container", "av/subtitles", "av/subtitles/stream", "av/video", "av/video/reformatter")
STUB = "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n    return type(name, (), {})\n"
BLOCKER = """import sys


class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"{{name}} is not on the machine", name=name)


sys.meta_path.insert(0, Blocker)
"""


def main() -> int:
    options = _parse()
    try:
        build(options.folder, find_comfyui(options.comfyui), options.python)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--comfyui", type=Path, help="a ComfyUI folder (default: COMFYUI_DIR)")
    parser.add_argument("--python", default=PYTHON, help=f"the machine's Python (default: {PYTHON})")
    return parser.parse_args()


def build(folder: Path, comfyui: Path | None, python: str) -> None:
    """Make the folder; an earlier one of the same name is replaced.

    Raises:
        SetupError: no ComfyUI, no network, a folder that is something else, or a result above the limit.
    """
    if comfyui is None:
        raise SetupError("Name a ComfyUI folder: --comfyui DIR, or COMFYUI_DIR.")
    if folder.exists() and not (folder / "bundle.json").exists():
        raise SetupError(f"{folder} exists and is no bundle: name another folder.")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    download(folder / "wheels", comfyui / "requirements.txt", python)
    for wheel in (folder / "wheels").glob("*.whl"):
        if wheel.stat().st_size > MIB:
            slim(wheel, NOT_NEEDED_IN_WHEELS.get(wheel.name.partition("-")[0], ()))
    pack(comfyui, folder / "comfyui.tar.xz")
    for name in STUBS:
        (folder / "stubs" / name).mkdir(parents=True)
        (folder / "stubs" / name / "__init__.py").write_text(STUB, encoding="utf-8")
    wheels = sorted(wheel.name for wheel in (folder / "wheels").iterdir())
    about = {"python": python, "comfyui": machine.comfyui_version(comfyui), "wheels": wheels}
    (folder / "bundle.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    taken, beside = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), checkout_bytes()
    print(f"{folder}: {taken / MIB:.1f} MiB, ComfyUI {about['comfyui']}, {len(wheels)} wheels for Python {python}; the checkout: {beside / MIB:.1f} MiB")
    if taken + beside > LIMIT:
        raise SetupError(f"{folder} and the checkout have {(taken + beside) / MIB:.1f} MiB, more than {LIMIT // MIB}.")


def checkout_bytes() -> int:
    """The size of the project's files, those that git ignores left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sum((ROOT / name).stat().st_size for name in listed if name and (ROOT / name).is_file())


def download(folder: Path, requirements: Path, python: str) -> None:
    """Download the wheels that the machine lacks, in the versions ComfyUI asks for.

    Raises:
        SetupError: one could not be had.
    """
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary", ":all:", "-d", str(folder)]
    target = ["--implementation", "cp", "--python-version", python, *(part for tag in PLATFORMS for part in ("--platform", tag))]
    for arguments in (WITH_DEPENDENCIES, ["--no-deps", *pinned(ALONE, requirements)]):
        done = subprocess.run([*pip, *target, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SetupError(f"Downloading {', '.join(arguments)} failed:\n{done.stderr}")


def pinned(names: Iterable[str], requirements: Path) -> list[str]:
    """The names as a requirements file has them, with their versions; as they are where it does not have them."""
    lines = requirements.read_text(encoding="utf-8").split()
    known = {re.split(r"[<>=~!]", line)[0]: line for line in lines}
    return [known.get(name, name) for name in names]


def slim(wheel: Path, without: tuple[str, ...]) -> None:
    """Write a wheel again with LZMA, which halves CUDA's kernels, and without the files whose names start so, in its list of files too."""
    small = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_LZMA) as target:
        for name in source.namelist():
            if name.startswith(without):
                continue
            data = source.read(name)
            if name.endswith(".dist-info/RECORD"):
                data = b"".join(line for line in data.splitlines(True) if not line.startswith(tuple(map(str.encode, without))))
            target.writestr(name, data)
    small.replace(wheel)


def pack(comfyui: Path, archive: Path) -> None:
    """Pack a ComfyUI without what no model needs: tokenizers, API nodes, tests, pictures."""

    def needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if NOT_NEEDED_OF_COMFYUI.match(member.name) else member

    with tarfile.open(archive, "w:xz") as tar:
        for path in sorted(comfyui.iterdir()):
            tar.add(path, path.name, filter=needed)


def prepared(folder: Path, work: Path, dry: bool) -> dict[str, str]:
    """Install a bundle into an empty folder: the environment that Python finds it with.

    Raises:
        SetupError: its wheels do not fit this Python.
    """
    site, comfyui, blocker = work / "site", work / "comfyui", work / "blocker"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    wheels = map(str, sorted((folder / "wheels").glob("*.whl")))
    done = subprocess.run([*pip, "--no-cache-dir", "--target", str(site), *wheels], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"Installing the bundle's wheels failed:\n{done.stderr}")
    with tarfile.open(folder / "comfyui.tar.xz") as tar:
        tar.extractall(comfyui, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    paths = [folder / "stubs", site]
    if dry:
        names = lacking() - modules_in(*paths)
        blocker.mkdir()
        (blocker / "sitecustomize.py").write_text(BLOCKER.format(names=sorted(names)), encoding="utf-8")
        paths.insert(0, blocker)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "HALFSAFE_DEVICE_PROFILE")}
    more = {"HALFSAFE_DRY_RUN": "1"} if dry else {}
    settings = {"COMFYUI_DIR": str(comfyui), "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    return kept | settings | more | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def modules_in(*folders: Path) -> set[str]:
    """The modules and packages directly in these folders."""
    return {path.name.partition(".")[0] for folder in folders for path in folder.iterdir()}


def lacking(brought: Iterable[str] = BROUGHT) -> set[str]:
    """The modules installed here that come neither with a package of ``brought`` nor with one it needs."""
    known = needed_by(brought)
    return {
        module
        for module, packages in metadata.packages_distributions().items()
        if not known & {_normal(package) for package in packages}
    }


def needed_by(packages: Iterable[str]) -> set[str]:
    """These packages and all that they need, in the spelling of the index."""
    found: set[str] = set()
    waiting = [_normal(name) for name in packages]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        plain = (line for line in requirements if "extra ==" not in line)
        waiting += [_normal(re.match(r"[\w.-]+", line)[0]) for line in plain]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
