"""Tests with the comfy-kitchen that `scripts/test.py` puts into the cache, in a process of its own: one process holds one."""

import os
import subprocess
import sys

import pytest
from setup.environment import ROOT, clean_environ, kitchen_folder


def run_tests_with_kitchen(*paths: str) -> None:
    """Run test files; skip without such a comfy-kitchen, but fail where HALFSAFE_STRICT is set."""
    folder = kitchen_folder()
    if not folder.exists():
        (pytest.fail if os.environ.get("HALFSAFE_STRICT") else pytest.skip)(f"run scripts/test.py, which puts {folder.name} into its cache")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(PYTHONPATH=str(folder)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
