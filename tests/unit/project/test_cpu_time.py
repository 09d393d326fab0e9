"""What the suite costs: a test that takes too much of the processor fails, and is named with what it took; the list of exceptions only falls."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
from setup import quick
from setup.machine import cpu_of
from support import cpu_time
from support.shipped import ROOT

BUSY = """
import time, pytest
def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
@pytest.fixture(scope="module")
def shared(): busy(0.3)
def test_small(): pass
def test_of_a_shared_fixture(shared): pass
def test_large(): busy(0.3)
@pytest.mark.release
def test_before_a_release(): busy(0.3)
@pytest.mark.parametrize("case", [1])
def test_known(case): busy(0.3)
"""


def test_a_test_that_takes_too_much_fails_and_what_it_shares_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = release\n")
    junit = tmp_path / "junit.xml"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={tmp_path}", f"--junitxml={junit}"]
    with monkeypatch.context() as patch:  # this test is held to the limit too
        patch.setattr(cpu_time, "LIMIT", 0.05)
        patch.setattr(cpu_time, "EXCEPTIONS", {"test_busy.py::test_known": 0.2})
        code = pytest.main([*options, str(tmp_path)], plugins=[cpu_time.CpuTime()])
    assert code == pytest.ExitCode.TESTS_FAILED
    text = junit.read_text(encoding="utf-8")
    assert text.count("<failure") == 1 and "test_busy.py::test_large took 0.3 seconds of the processor" in text
    total, tests = cpu_of(junit)
    own = {test["name"].rpartition(".")[2]: test["own_seconds"] for test in tests}
    assert (
        {test["may_take_seconds"] for test in tests} == {0.05, 0.2, math.inf}
        and total > 0.9 > 3 * own["test_of_a_shared_fixture"]
        and own["test_large"] > 0.2
        and own["test_small"] < 0.1
    )


def test_the_list_of_exceptions_is_short_and_names_tests_that_exist() -> None:
    """It only falls: a test that became cheaper is taken off it, and with it this number."""
    assert len(cpu_time.EXCEPTIONS) <= 30
    gone = []
    for name, seconds in cpu_time.EXCEPTIONS.items():
        path, _, test = name.partition("::")
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        ]
        if test not in functions or seconds <= cpu_time.LIMIT:
            gone.append(name)
    assert gone == []


@pytest.mark.parametrize(
    "room", sorted(path.parent.relative_to(ROOT).as_posix() for tree in ("precision", "nodes") for path in (ROOT / tree).rglob("__init__.py") if path.parent.parent.name in ("precision", "host"))
)  # fmt: skip
def test_a_change_of_a_room_has_tests_that_run_first(room: str) -> None:
    chosen = quick.tests_of([f"{room}/something.py"])
    assert "tests/unit/project" in chosen and len(chosen) > 1 and all((ROOT / path).exists() for path in chosen)


def test_a_changed_test_runs_and_one_of_a_folder_that_runs_is_not_asked_for_twice() -> None:
    changed = ["tests/host/load/test_save.py", "nodes/host/load/save.py", "tests/browser/test_nodes.py", "web/run.mjs"]
    assert {path for path in quick.tests_of(changed) if path.startswith("tests/host/load")} == {"tests/host/load"}
    assert "tests/unit/report/test_page_words.py" in quick.tests_of(changed) and not any(
        "browser" in path for path in quick.tests_of(changed)
    )
