"""What `scripts/versions.py` makes of a run's results."""

import json

import pytest
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


def test_saved_outcomes_replace_those_of_the_same_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    versions._save([Outcome("unit", "3.11.0", "2.8.0", passed=1), Outcome("unit", "3.11.0", "2.11.0", passed=1)])
    versions._save([Outcome("unit", "3.11.0", "2.8.0", passed=7)])
    saved = json.loads((tmp_path / "versions.json").read_text())["outcomes"]
    assert {row["torch"]: row["passed"] for row in saved} == {"2.8.0": 7, "2.11.0": 1}


@pytest.mark.parametrize("version", ["2.8.0", "newest"])
def test_torch_is_asked_for_by_version(version):
    assert versions._torch_packages(version, False) == ["torch" if version == "newest" else "torch==2.8.0"]
    assert {"torchvision", "torchaudio"} < set(versions._torch_packages(version, True))
