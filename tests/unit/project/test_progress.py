"""Slow steps of the scripts say that they go on."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import environment
import progress
import pytest

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


def test_uv_is_used_where_it_is_there_and_pip_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(title: str, command: list[str]) -> None:
        commands.append(command)
        if "uv" in Path(command[0]).name and len(commands) == 2:
            raise environment.SetupError("uv finds no index")

    monkeypatch.setattr(environment, "run_step", run)
    monkeypatch.setattr(environment.shutil, "which", {"uv": "/bin/uv"}.get)
    environment.install_packages(Path("python"), "torch", ["torch"])
    environment.install_packages(Path("python"), "torch", ["torch"])
    assert [command[:4] for command in commands] == [
        ["/bin/uv", "pip", "install", "--python"],
        ["/bin/uv", "pip", "install", "--python"],
        ["python", "-m", "pip", "install"],
    ]
