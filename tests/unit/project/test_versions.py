"""What `scripts/versions.py` makes of a run's results."""

from pathlib import Path
from subprocess import CompletedProcess

import versions
from versions import Outcome, as_table, read_junit

JUNIT = """<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1">
<testcase classname="tests.unit.test_a" name="test_bad"><failure/></testcase>
<testcase classname="tests.unit.test_a" name="test_broken"><error/></testcase>
<testcase classname="tests.unit.test_a" name="test_good"/></testsuite></testsuites>"""


def test_counts_and_failures_are_read(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    outcome = read_junit(tmp_path / "junit.xml", Outcome("unit", "3.11.0", "2.11.0"), 1)
    assert (outcome.passed, outcome.failed, outcome.skipped, outcome.ok) == (2, 2, 1, False)
    assert outcome.failures == ["tests.unit.test_a::test_bad", "tests.unit.test_a::test_broken"]
    assert "test_broken" in as_table([outcome])


def test_a_run_without_results_is_no_success(tmp_path):
    outcome = read_junit(tmp_path / "absent.xml", Outcome("unit", "3.11.0", "2.11.0"), -11)
    assert not outcome.ok and "-11" in as_table([outcome])
    assert not Outcome("unit", "3.11.0", "2.11.0").ok, "no test passed"
    assert Outcome("unit", "3.11.0", "2.11.0", passed=1).ok


def test_kernels_run_on_a_comfy_kitchen_before_the_installed_one(tmp_path, monkeypatch):
    """And have a row of their own in the table."""
    folder, runs = tmp_path / "comfy-kitchen-9.9", []
    folder.mkdir(parents=True)
    monkeypatch.setattr(versions.environment, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(versions.subprocess, "run", lambda command, **kwargs: runs.append((command, kwargs)) or CompletedProcess(command, 1))
    (outcome,) = versions._with_kitchen(Path("python"), "3.11.0", "2.11.0", "9.9", [], [])
    ((command, kwargs),) = runs
    assert "tests/unit" in command and "int8" in command[command.index("-k") + 1]
    assert kwargs["env"]["PYTHONPATH"] == str(folder)
    assert outcome.kitchen == "9.9" and " 9.9 " in as_table([outcome])


def test_a_tier_runs_as_on_another_cpu(tmp_path, monkeypatch):
    """And the tests of torch.compile apart from those of the host."""
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)  # this test may run as on another CPU itself
    runs = []
    monkeypatch.setattr(versions, "comfyui_version", lambda folder: "0.30.0")
    monkeypatch.setattr(versions.environment, "install_packages", lambda *_: None)
    monkeypatch.setattr(versions.subprocess, "run", lambda command, **kwargs: runs.append((command, kwargs["env"])) or CompletedProcess(command, 1))
    host, compiled = versions._on_one_comfyui(Path("python"), "3.11.0", "2.11.0", tmp_path, [("no-vnni", 4)], [])
    assert "tests/host/compile" in runs[1][0] and runs[0][0][runs[0][0].index("--ignore") + 1] == "tests/host/compile"
    assert (runs[1][1]["DNNL_MAX_CPU_ISA"], runs[1][1]["OMP_NUM_THREADS"]) == ("AVX2", "4") and "DNNL_MAX_CPU_ISA" not in runs[0][1]
    table = as_table([host, compiled]).splitlines()
    assert len({line.index("0.30.0") for line in table if "0.30.0" in line}) == 1 and "no-vnni" in table[-2]
