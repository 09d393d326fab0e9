"""Which tests a change needs first: those of its rooms."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from .environment import ROOT, SetupError

MAIN = ("origin/main", "main")
ALWAYS = "tests/unit/project"
SHOWN = ("locales", "web")
"""Folders of what the page shows."""
OF_NODES = "tests/host/graph/test_object_info.py"
OF_WORDS = "tests/unit/report/test_page_words.py"
ELSEWHERE = {
    "nodes/host/comfyui": ("tests/host/graph/test_core_names.py",),
    "nodes/host/reporting": ("tests/host/graph/test_badges.py", "tests/host/graph/test_routes.py"),
}
"""Rooms whose tests have no folder of the room's name."""
NEVER = ("tests/browser", "tests/gpu", "tests/host/compile")


def changed_files() -> list[str]:
    """List the files that differ from the main branch, committed or not, by their paths in the repository.

    Raises:
        SetupError: this is no clone of the repository.
    """
    known = [branch for branch in MAIN if _git("rev-parse", "--verify", "--quiet", branch, check=False)]
    base = _git("merge-base", "HEAD", known[0])[0] if known else "HEAD"
    return sorted({*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")})


def tests_of(changed: Iterable[str]) -> list[str]:
    """List the folders and files of tests for changed files: those of their rooms, those named after them, and the project's own."""
    found = {ALWAYS}
    for path in map(PurePosixPath, changed):
        top, *rest = path.parts
        room = rest[-2] if rest[1:] else ""
        if top == "tests" and path.name.startswith("test_"):
            found.add(str(path))
        elif top in ("precision", "nodes"):
            found.add(f"tests/{'unit' if top == 'precision' else 'host'}/{room}" if room else OF_NODES)
            found |= {*ELSEWHERE.get(str(path.parent), ())}
            found |= {str(each.relative_to(ROOT)) for each in _named_after(path.stem)}
        elif top in SHOWN:
            found.add(OF_WORDS)
    there = [path for path in sorted(found) if (ROOT / path).exists() and not path.startswith(NEVER)]
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]


def _named_after(stem: str) -> list[Path]:
    tests = ROOT / "tests"
    return [*tests.rglob(f"test_{stem}.py"), *tests.rglob(f"test_{stem}_*.py")]


def _git(*arguments: str, check: bool = True) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SetupError(f"--quick asks git which files changed: {done.stderr.strip()}")
    return done.stdout.splitlines()
