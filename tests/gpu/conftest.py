"""Fixtures of the tests that need a CUDA device, in a real ComfyUI named by COMFYUI_DIR.

HALFSAFE_DRY_RUN=1 runs them on a CPU, to see that they are sound themselves; it proves nothing about a GPU. Each test leaves
a line of JSON in the file that HALFSAFE_TEST_LINES names, when it begins and when it ends, and one that takes longer than
HALFSAFE_TEST_SECONDS ends the process, also where it waits in a kernel; the tracebacks of all threads are in that file's
neighbour with ".hung" at its end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from setup.comfyui_server import make_base_directory
from support import inprocess

ROOT = Path(__file__).absolute().parents[2]
DRY = bool(os.environ.get("HALFSAFE_DRY_RUN"))
GAINING = "sm_86"
READY = bool(os.environ.get("COMFYUI_DIR")) and (DRY or torch.cuda.is_available())
_base = tempfile.TemporaryDirectory(prefix="halfsafe-gpu-")

if READY:
    make_base_directory(Path(_base.name), ROOT)
    inprocess.setup_comfyui(Path(os.environ["COMFYUI_DIR"]).resolve(), Path(_base.name), *(["--cpu"] if DRY else []))


LINES = os.environ.get("HALFSAFE_TEST_LINES")
SECONDS = float(os.environ.get("HALFSAFE_TEST_SECONDS", 0))


def _write(**line) -> None:
    if LINES:
        with open(LINES, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="begun")
    if SECONDS:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=open(f"{LINES}.hung", "a", encoding="utf-8"))  # noqa: SIM115


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        why = report.longrepr[2] if report.skipped else report.longreprtext[-2000:]
        _write(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), why=why)


def pytest_runtest_logfinish() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The device under test."""
    if not READY:
        pytest.skip("needs a CUDA device and COMFYUI_DIR")
    return torch.device("cpu" if DRY else "cuda")


@pytest.fixture(scope="session")
def capabilities(device: torch.device) -> dict[str, bool]:
    """What this device can do, by the pack's own probes."""
    from halfsafe.precision.devices.detect import detect

    return detect(device).capabilities


@pytest.fixture
def gaining(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that gains by fp16 sums, where this one does not; then the pack plans none."""
    from halfsafe.precision.devices.detect import PROFILE_VARIABLE, detect

    if not detect(device).capabilities["fp16_accumulation"]:
        monkeypatch.setenv(PROFILE_VARIABLE, GAINING)


@pytest.fixture(scope="session", autouse=True)
def exact_fp32(device: torch.device) -> Iterator[None]:
    """References in fp32 without TF32, which torch uses in cuDNN's convolutions unless it is told not to."""
    from halfsafe.precision.base.flags import SETTINGS, state_of

    before = {name: state_of(name) for name in ("tf32_matmul", "tf32_convolution")}
    for name in before:
        SETTINGS[name].write(False)
    yield
    for name, state in before.items():
        SETTINGS[name].write(state)


@pytest.fixture(scope="session")
def models_dir(device: torch.device) -> Path:
    return Path(_base.name) / "models"


@pytest.fixture(scope="session")
def comfy(device: torch.device) -> SimpleNamespace:
    """The in-process ComfyUI: `core` (core nodes by id) and `run(id, **inputs)` for the pack's nodes."""
    import nodes as core

    ours = inprocess.node_classes(inprocess.load_pack())
    return SimpleNamespace(nodes=ours, core=core.NODE_CLASS_MAPPINGS, run=inprocess.runner(ours))
