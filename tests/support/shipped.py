"""Which files belong to the project, and which of them the registry ships."""

from __future__ import annotations

import fnmatch
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent.parent


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files of the project relative to its root: git's list, or what `.gitignore` leaves where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except OSError:
        return _walk()
    if done.returncode or not (ROOT / ".git").exists():
        return _walk()
    paths = (Path(name) for name in done.stdout.decode().split("\0") if name)
    return tuple(sorted(path for path in paths if (ROOT / path).is_file()))


def shipped_files() -> list[Path]:
    """The files a registry archive holds."""
    patterns = read_patterns(ROOT / ".comfyignore")
    return [path for path in tracked_files() if not is_ignored(path, patterns)]


def read_patterns(path: Path) -> list[str]:
    """The patterns of an ignore file."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def is_ignored(path: Path, patterns: list[str]) -> bool:
    """Whether a path matches one of the plain patterns these ignore files use (no negation, no `**`)."""
    return any(_matches(path, pattern) for pattern in patterns)


def _matches(path: Path, pattern: str) -> bool:
    folders_only, anchored = pattern.endswith("/"), pattern.startswith("/")
    name = pattern.strip("/")
    parts = path.parts[:-1] if folders_only else path.parts
    candidates = parts[:1] if anchored else parts
    return any(fnmatch.fnmatchcase(part, name) for part in candidates)


def _walk() -> tuple[Path, ...]:
    patterns = [*read_patterns(ROOT / ".gitignore"), ".git/"]
    found, folders = [], [ROOT]
    while folders:
        for entry in folders.pop().iterdir():
            relative = entry.relative_to(ROOT)
            if is_ignored(relative / "x" if entry.is_dir() else relative, patterns):
                continue
            (folders if entry.is_dir() else found).append(entry if entry.is_dir() else relative)
    return tuple(sorted(found))
