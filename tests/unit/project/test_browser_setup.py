"""Finding a Chromium for the browser tests, and saying how to get one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import environment
import pytest

SPEC = importlib.util.spec_from_file_location("halfsafe_test_script", Path(environment.__file__).with_name("test.py"))
test_script = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = test_script
SPEC.loader.exec_module(test_script)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty PATH and no well-known places."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "CHROMIUM_PLACES", {})
    for name in ("CHROMIUM", "CI"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def make_program(path: Path) -> Path:
    path.touch()
    path.chmod(0o755)
    return path


@pytest.mark.skipif(os.name == "nt", reason="a program needs a known suffix there")
@pytest.mark.parametrize("name", ["chromium", "google-chrome", "msedge"])
def test_a_program_on_the_path_is_found(nothing_installed: Path, name: str) -> None:
    program = make_program(nothing_installed / name)
    assert environment.find_chromium() == program


@pytest.mark.skipif(os.name == "nt", reason="a program needs a known suffix there")
def test_the_variable_wins(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(nothing_installed / "chromium")
    monkeypatch.setenv("CHROMIUM", str(make_program(nothing_installed / "my browser")))
    assert environment.find_chromium() == nothing_installed / "my browser"


@pytest.mark.skipif(os.name == "nt", reason="a program needs a known suffix there")
def test_an_application_in_a_well_known_place_is_found(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSAFE_TEST_PLACE", str(nothing_installed))
    monkeypatch.setattr(environment, "CHROMIUM_PLACES", {sys.platform: ("$HALFSAFE_TEST_PLACE/Some Browser",)})
    program = make_program(nothing_installed / "Some Browser")
    assert environment.find_chromium() == program


def test_without_one_the_message_says_how_to_get_it(nothing_installed: Path) -> None:
    with pytest.raises(environment.SetupError, match=r"apt-get install chromium.*set CHROMIUM"):
        environment.find_chromium()


def test_a_wrong_variable_is_named(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "no-such-browser")
    with pytest.raises(environment.SetupError, match="no-such-browser"):
        environment.find_chromium()


def test_a_browser_tier_without_a_browser_fails(nothing_installed: Path, tmp_path: Path) -> None:
    result = test_script._run_tier("browser", environment.Environment(Path(sys.executable), tmp_path), [])
    assert not result.passed and result.summary == "could not run"


def test_the_browser_tier_is_part_of_every_run() -> None:
    assert test_script._tiers(None, environment.Environment(Path(sys.executable), Path()))[:4] == ["unit", "host", "compile", "browser"]
