"""What `python -m halfsafe` prints fits a terminal of 80 columns."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from halfsafe import __main__ as cli
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from safetensors.torch import save_file
from support import dialects, tiny_models

PACK = Path(__file__).absolute().parents[3]
COLUMNS = 80
COMMANDS = ("inspect", "scan", "convert", "plan", "doctor")


def too_wide(text: str) -> list[str]:
    """The lines of more columns, but for those of one word that is longer than a line: a path, a tensor's name."""
    lines = [line.rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if len(line) > COLUMNS and len(line.split()) > 1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: one of Wan's names, a scaled one, one with NaN in a layer of a long name."""
    folder = tmp_path_factory.mktemp("columns")
    tiny_models.wan(folder / "wan.safetensors")
    dialects.scaled_fp8(folder / "scaled.safetensors", *dialects.reference())
    name = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_out.0"
    save_file({f"{name}.weight": torch.full((4, 4), float("nan"))}, folder / "nan.safetensors")
    return folder


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_fits(command: tuple[str, ...], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    out = capsys.readouterr().out
    assert "usage: halfsafe" in out and not too_wide(out)


@pytest.mark.parametrize(
    "arguments",
    [
        *(("inspect", name) for name in ("wan", "scaled", "nan")),
        *(("scan", name) for name in ("wan", "scaled", "nan")),
        ("scan", "wan", "scaled"),
        *(("plan", "wan", "--device", device, "--goal", goal) for device, goal in itertools.product(PROFILE_NAMES[::4], ("speed", "memory"))),
        ("doctor",),
        ("doctor", "--comfyui"),
    ],
    ids=" ".join,
)
def test_what_a_command_prints_fits(arguments: tuple[str, ...], files: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.chdir(files)
    if arguments[-1] == "--comfyui":
        if not os.environ.get("COMFYUI_DIR"):
            pytest.skip("needs a ComfyUI")
        arguments = (*arguments, os.environ["COMFYUI_DIR"])
    names = {path.stem: path.name for path in files.iterdir()}
    cli.main([names.get(argument, argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert out and not too_wide(out) and not too_wide(err)


def test_a_conversion_and_its_bar_fit_and_tell_the_time_left(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(cli, "Progress", slow_and_large(cli.Progress))
    assert cli.main(["convert", "wan.safetensors", str(tmp_path / "out.safetensors"), "--storage", "fp8_e4m3fn"]) == 0
    out, err = capsys.readouterr()
    bars = [line for line in err.replace("\n", "\r").split("\r") if line]
    assert len(bars) > 3 and all(bar.endswith(" left") and bar.startswith("[") for bar in bars), bars
    assert max(map(len, bars)) <= COLUMNS and not too_wide(out)


def slow_and_large(progress: type) -> type:
    """A bar of the widest figures: hundreds of GiB, hours left."""

    class Large(progress):
        def __init__(self, total: int, verb: str):
            super().__init__(total * 10**4, verb)
            self.began -= 10**4

        def __call__(self, count: int) -> None:
            super().__call__(count * 10**4)

    return Large


@pytest.mark.parametrize(("asked", "profile", "label"), [("t4", "sm_75", "Turing"), ("rtx 3060", "sm_86", "Ampere")])
def test_a_plan_names_the_device_that_was_asked_for(asked: str, profile: str, label: str, files: Path, capsys: pytest.CaptureFixture) -> None:
    cli.main(["plan", str(files / "wan.safetensors"), "--device", asked])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Device"))
    assert label in line and f"profile {profile}" in line, line


def test_the_module_itself_fits(files: Path) -> None:
    command = [sys.executable, str(PACK), "plan", "wan.safetensors", "--device", "t4"]
    done = subprocess.run(command, cwd=files, env={**os.environ, "COLUMNS": str(COLUMNS)}, capture_output=True, text=True, encoding="utf-8", check=True)
    assert not too_wide(done.stdout)
