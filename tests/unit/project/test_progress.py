"""Slow steps of the scripts say that they go on."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from setup import environment, progress

SECONDS = progress.HEARTBEAT_SECONDS
SLOW = "import time; print('half', flush=True); time.sleep(0.6); print('done', flush=True); raise SystemExit(3)"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.1)


def test_no_step_may_be_silent_for_ten_seconds() -> None:
    assert SECONDS < 10


def test_a_stage_tells_what_it_is_at(capsys) -> None:
    with progress.stage("Waiting", lambda: "for the test"):
        time.sleep(0.35)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Waiting ..." and lines[1] == "  ... 0 s for the test" and lines[-1].startswith("  done in 0.")


def test_a_stage_that_fails_is_not_done(capsys) -> None:
    with pytest.raises(ValueError, match="no"), progress.stage("Failing"):
        raise ValueError("no")
    assert capsys.readouterr().out == "Failing ...\n"


def test_a_commands_output_is_passed_on_and_its_silence_broken(capfd) -> None:
    assert progress.run_shown([sys.executable, "-c", SLOW], Path(), dict(os.environ)) == 3
    assert re.search(r"half\n(\[\d+ s\])+done\n$", capfd.readouterr().out)


def test_a_set_up_step_tells_the_last_line_and_the_bytes(capsys) -> None:
    code = (
        "import os, tempfile, time; print('Downloading torch', flush=True)\n"
        "open(os.path.join(tempfile.gettempdir(), 'part'), 'wb').write(bytes(3_000_000)); time.sleep(0.5)"
    )
    environment.run_step("Installing", [sys.executable, "-c", code])
    assert "3 MB; Downloading torch" in capsys.readouterr().out


def test_the_bytes_of_a_folder_that_vanishes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kept").write_bytes(bytes(7))
    (tmp_path / "gone").mkdir()
    (tmp_path / "deep" / "lost").touch()
    vanish, size = os.scandir, os.lstat

    def scan(path: str):
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return vanish(path)

    def look(path: str):
        if Path(path).name == "lost":
            raise FileNotFoundError(path)
        return size(path)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(os, "lstat", look)
    assert progress.folder_bytes(tmp_path) == 7


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of an installation into an environment without uv; those of a program in `fails` fail."""

    class Commands(list):
        fails = ()

    commands = Commands()

    def run(title: str, command: list[str], **_: object) -> None:
        commands.append(command)
        if Path(command[0]).stem in commands.fails or title in commands.fails:
            raise environment.SetupError(f"{title} failed")

    monkeypatch.setattr(environment, "run_step", run)
    monkeypatch.setattr(environment, "_indexes", lambda _: ["--find-links", "wheels"])
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    (tmp_path / "bin").mkdir()
    return commands


def test_uv_is_taken_from_the_path_else_installed(installs: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    environment.install_packages(python, "torch", ["torch"])
    assert installs[0][-1] == environment.UV
    assert Path(installs[1][0]).parent == python.parent and installs[1][-3:] == ["--find-links", "wheels", "torch"]
    monkeypatch.setattr(environment.shutil, "which", {"uv": "/bin/uv"}.get)
    environment.install_packages(python, "torch", ["torch"])
    assert installs[2][:5] == ["/bin/uv", "pip", "install", "--python", str(python)] and len(installs) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["bin"], "the cache went with it"


@pytest.mark.parametrize("missing", ["uv", "Installing uv"])
def test_pip_installs_where_uv_fails_or_cannot_be_had(installs: list, tmp_path: Path, missing: str) -> None:
    installs.fails = (missing,)
    environment.install_packages(tmp_path / "bin" / "python", "torch", ["torch"])
    assert installs[-1][1:4] == ["-m", "pip", "install"] and installs[-1][-1] == "torch"


def test_uv_looks_where_pip_would(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "pip.conf"
    kept.write_text("[global]\nindex-url = https://first/simple\nextra-index-url = https://a/simple\n  file:///b\nretries = 3\n", encoding="utf-8")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(kept))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    options = environment._indexes(Path(sys.executable))
    found = set(zip(options[::2], options[1::2], strict=True))
    assert {("--index-url", "https://first/simple"), ("--extra-index-url", "https://a/simple"), ("--extra-index-url", "file:///b"), ("--find-links", "/wheels")} <= found
    assert "3" not in options


def test_no_process_is_kept_from_keeping_its_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in environment.clean_environ()
    assert environment.clean_environ(PYTHONDONTWRITEBYTECODE="1")["PYTHONDONTWRITEBYTECODE"] == "1"
