"""Test and measure the pack on a GPU machine without a network: it needs one folder and one command there.

    python scripts/gpu_bundle.py build .gpu --comfyui DIR             # here: what that machine lacks, below 60 MiB
    python scripts/gpu_bundle.py run .gpu --out RESULTS --dry-run     # here: the same on a CPU, as bare as that machine
    python3 scripts/gpu_bundle.py run .gpu --out RESULTS              # there, in under ten minutes

The machine brings Python, torch and the packages in `BROUGHT`; the checkout travels too. `run` installs the folder's wheels
for itself, runs tests/gpu and benchmarks/gpu.py and leaves `tests.json`, `gpu.json` and the logs in RESULTS. It exits
with 1 where a test fails or a part could not run; a missed target is in `gpu.json`.
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
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from setup import machine
from setup.environment import ROOT, Environment, SetupError, find_comfyui

MIB = 1 << 20
LIMIT = 60 * MIB
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
    r"|comfy/(sd1_tokenizer|text_encoders/[^/]*tokenizer[^/.]*)(/|$)|.*(__pycache__(/|$)|\.(md|yaml|example|svg|png)$)"
)
# ComfyUI imports av for videos and sound, whose wheel alone is 36 MB.
STUBS = ("av", "av/container", "av/subtitles", "av/subtitles/stream", "av/video", "av/video/reformatter")
STUB = "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n    return type(name, (), {})\n"
DYNAMIC_VRAM = ROOT / "tests" / "gpu" / "test_dynamic_vram.py"
SECONDS = {"tests": 200, "dynamic_vram": 60, "bench": 270}
DRY_TIMES_AS_LONG = 5
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
        if options.action == "build":
            build(options.folder, find_comfyui(options.comfyui), options.python)
            return 0
        return run(options.folder, options.out, options.dry_run)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    building = actions.add_parser("build", help="make the folder; needs a network")
    building.add_argument("folder", type=Path)
    building.add_argument("--comfyui", type=Path, help="a ComfyUI folder (default: COMFYUI_DIR)")
    building.add_argument("--python", default=PYTHON, help=f"the machine's Python (default: {PYTHON})")
    running = actions.add_parser("run", help="test and measure; needs no network")
    running.add_argument("folder", type=Path)
    running.add_argument("--out", type=Path, required=True, help="where to leave the results")
    running.add_argument("--dry-run", action="store_true", help="on the CPU, without the packages that the machine lacks")
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
        slim(wheel, NOT_NEEDED_IN_WHEELS.get(wheel.name.partition("-")[0], ()))
    pack(comfyui, folder / "comfyui.tar.xz")
    for name in STUBS:
        (folder / "stubs" / name).mkdir(parents=True)
        (folder / "stubs" / name / "__init__.py").write_text(STUB, encoding="utf-8")
    wheels = sorted(wheel.name for wheel in (folder / "wheels").iterdir())
    about = {"python": python, "comfyui": machine.comfyui_version(comfyui), "wheels": wheels}
    (folder / "bundle.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {taken / MIB:.1f} MiB, ComfyUI {about['comfyui']}, {len(wheels)} wheels for Python {python}")
    if taken > LIMIT:
        raise SetupError(f"{folder} has {taken / MIB:.1f} MiB, more than {LIMIT // MIB}.")


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
    """Write a wheel again without the files whose names start so, in its list of files too."""
    if not without:
        return
    small = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
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


def run(folder: Path, out: Path, dry: bool) -> int:
    """Run tests/gpu and the benchmark with what the folder holds; the exit code.

    Raises:
        SetupError: the folder is no bundle, or its wheels do not fit this Python.
    """
    if not (folder / "bundle.json").exists():
        raise SetupError(f"{folder} is no bundle: make one with `python scripts/gpu_bundle.py build {folder}`.")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="halfsafe-gpu-run-") as name:
        work = Path(name)
        environ = prepared(folder.resolve(), work, dry)
        comfyui = environ["COMFYUI_DIR"]
        pytest = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"]
        parts = {"tests": [*pytest, "tests/gpu", f"--ignore={DYNAMIC_VRAM}", f"--junitxml={work / 'tests.xml'}"]}
        if DYNAMIC_VRAM.exists():
            parts["dynamic_vram"] = [*pytest, str(DYNAMIC_VRAM), f"--junitxml={work / 'dynamic_vram.xml'}"]
        bench = [sys.executable, "-m", "benchmarks.gpu", "--comfyui", comfyui, "--out", str(out / "gpu.json")]
        parts["bench"] = [*bench, *(["--dry-run"] if dry else ["--seconds", str(SECONDS["bench"] - 30)])]
        about = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
        result = machine.gpu_conditions(Environment(Path(sys.executable), Path(comfyui))) | {"bundle": about, "dry_run": dry}
        for part, command in parts.items():
            code = logged(command, environ, out / f"{part}.log", SECONDS[part] * (DRY_TIMES_AS_LONG if dry else 1))
            result[part] = {"exit_code": code} | outcome(work / f"{part}.xml")
            (out / "tests.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 1 if any(result[part]["exit_code"] not in (0, 2 if part == "bench" else 0) for part in parts) else 0


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
    settings = {"COMFYUI_DIR": str(comfyui), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
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


def logged(command: list[str], environ: dict[str, str], log: Path, seconds: int) -> int | None:
    """Run a command in the project's folder, its output in a file, whose end is printed: its exit code, None out of time."""
    print(f"== {log.stem}", flush=True)
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]), flush=True)
    return code


def outcome(junit: Path) -> dict:
    """Counts and the names of what failed from a report of pytest; nothing where there is none."""
    if not junit.exists():
        return {}
    suite = next(ElementTree.parse(junit).iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    bad = [f"{case.get('classname')}::{case.get('name')}" for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None]
    return counts | {"failed": bad}


if __name__ == "__main__":
    sys.exit(main())
