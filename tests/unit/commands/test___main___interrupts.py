"""Ctrl+C at many moments of each command: one line and 130, or all done; nothing is half-written."""

import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
from halfsafe.precision.files.safetensors_file import open_checkpoint
from safetensors.torch import save_file
from support.faults import in_a_fork

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and fork")
ROOT = Path(__file__).resolve().parents[3]
MOMENTS = (0.05, 0.3, 0.6, 0.9, 0.97, 0.99, 1.0)
"""Shares of what Python reports of a command, of which imports are nine tenths."""
COMMANDS = {
    "inspect": ["inspect", "in.safetensors"],
    "scan": ["scan", "in.safetensors", "second.safetensors"],
    "plan": ["plan", "in.safetensors", "--device", "RTX 3090"],
    "doctor": ["doctor"],
    "convert": ["convert", "in.safetensors", "out.safetensors", "--storage", "int8"],
    "convert of several": ["convert", "in.safetensors", "second.safetensors", "out", "--storage", "fp8_e4m3fn", "--jobs", "2"],
}


class Interrupt:
    """Counts what Python reports of a process (imports, opened files, code), and interrupts it at one of them."""

    def __init__(self, at: int | None):
        self.at, self.count = at, 0

    def __call__(self, *event):
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def run(arguments: list[str], at: int | None) -> tuple[int, str, str, int]:
    """(exit code, output, errors, events) of a command in a process of its own, that had imported torch alone."""

    def child():
        for number, name in enumerate(("stdout", "stderr"), 1):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        for name in [name for name in sys.modules if name.partition(".")[0] == "halfsafe"]:
            del sys.modules[name]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["halfsafe", *arguments]
        interrupt, code = Interrupt(at), 0
        sys.addaudithook(interrupt)
        try:
            runpy.run_path(str(ROOT), run_name="__main__")
        except SystemExit as end:
            code = end.code
        count = interrupt.count
        Path("events").write_text(str(count))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)

    Path("events").write_text("0")
    code = in_a_fork(child)
    return code, Path("stdout").read_text(), Path("stderr").read_text(), int(Path("events").read_text())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("in", "second")):
        torch.manual_seed(seed)
        save_file({f"blocks.{n}.ffn.0.weight": torch.randn(96, 64) for n in range(4)}, f"{name}.safetensors")
    return tmp_path


def left(folder: Path) -> list[Path]:
    """What a command has left beside what was there before."""
    known = {folder / name for name in ("in.safetensors", "second.safetensors", "stdout", "stderr", "events")}
    return [path for path in folder.rglob("*") if path.is_file() and path not in known]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupt_at_any_moment(folder, command):
    (folder / "out").mkdir()
    code, whole, _, count = run(COMMANDS[command], None)
    assert code == 0 and whole and count > 100
    for path in left(folder):
        path.unlink()
    interrupted = 0
    for share in MOMENTS:
        code, out, err, _ = run(COMMANDS[command], int(count * share))
        assert "Traceback" not in err, err
        assert code in (0, 130)
        if code == 130:
            interrupted += 1
            assert err.endswith("halfsafe: interrupted\n")
        else:
            assert len(out.splitlines()) == len(whole.splitlines())
        for path in left(folder):
            assert len(open_checkpoint(path)) >= 4, "what is there is whole"
            path.unlink()
    assert interrupted >= 4
