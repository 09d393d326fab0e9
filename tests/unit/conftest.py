"""Fixtures of tests without ComfyUI."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(params=["unnamed", "named"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to write: a Linux file without a name, and a temporary file."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return request.param
