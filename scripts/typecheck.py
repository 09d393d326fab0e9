"""Check the types of `precision/` and `nodes/` with mypy, as the package `halfsafe` whatever this folder is called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
PACKAGES = ("precision", "nodes")


def main() -> int:
    """Run mypy on a copy, where relative imports have a package around them, and return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "halfsafe"
        package.mkdir()
        shutil.copy(ROOT / "__init__.py", package)
        for name in PACKAGES:
            shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
        options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        wanted = [word for name in PACKAGES for word in ("-p", f"halfsafe.{name}")]
        environ = {**os.environ, "MYPYPATH": folder}
        return subprocess.run(
            [sys.executable, "-m", "mypy", *options, *wanted], cwd=folder, env=environ, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
