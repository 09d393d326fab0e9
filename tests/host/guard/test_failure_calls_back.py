"""How often a call that failed crosses the border of core and host: the ladder is in the core, what it repeats in the host."""

import sys
from pathlib import Path

import pytest
from support import families
from support.guarding import guarded, plain_fp16, report_of
from support.shipped import ROOT

CORE, HOST = ROOT / "precision" / "guard", ROOT / "nodes" / "host"
CLIMBING = ("ladder", "evidence", "failed_call", "log")
"""What decides; what watches operations inside of a repeat calls the host for each of them."""
MOST_CROSSINGS = 8


@pytest.fixture(scope="module")
def overflowing(models_dir):
    return families.files_in(models_dir / "diffusion_models", "calls_back")("wan", "ffn")


def crossings_of(work):
    """The functions by which the guard's core is entered from the host, to resolve a failed call, or calls the host back."""
    seen = []

    def note(frame, event, _):
        if event != "call":
            return
        callee, caller = Path(frame.f_code.co_filename), Path(frame.f_back.f_code.co_filename) if frame.f_back else None
        enters = caller and callee.parent == CORE and HOST in caller.parents and frame.f_code.co_name == "resolved"
        calls_back = caller and caller.parent == CORE and caller.stem in CLIMBING and HOST in callee.parents
        if enters or calls_back:
            seen.append(f"{caller.stem} -> {callee.stem}.{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def test_a_nan_that_is_cured_crosses_core_and_host_at_most_eight_times(comfy, overflowing):
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    seen = crossings_of(lambda: families.sample(model, "wan"))
    assert report_of(model).verdict == "recovered" and report_of(model).extra_calls == 2
    until_told = seen[: seen.index("log -> notices.notify") + 1]  # the sum of the run is told at its end
    assert "model -> ladder.resolved" in until_told and len(until_told) <= MOST_CROSSINGS, until_told
