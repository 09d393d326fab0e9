"""Say what a slow step is doing: no step of the scripts is silent for longer than ten seconds."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HEARTBEAT_SECONDS = 8
LINE_WIDTH = 100


@contextlib.contextmanager
def stage(title: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """Print a step's title, a line every few seconds with the seconds gone and `detail()`, and the seconds it took."""
    print(f"{title} ...", flush=True)
    started, ended = time.monotonic(), threading.Event()
    beat = threading.Thread(target=_beat, args=(ended, started, detail), daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
    print(f"  done in {time.monotonic() - started:.1f} s", flush=True)


def _beat(ended: threading.Event, started: float, detail: Callable[[], str]) -> None:
    while not ended.wait(HEARTBEAT_SECONDS):
        print(f"  ... {time.monotonic() - started:.0f} s {detail()}".rstrip(), flush=True)


def last_line(log: Path) -> str:
    """The last line that a command wrote into its log, cut to a line's width."""
    lines = log.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()
    return next((line.strip()[:LINE_WIDTH] for line in reversed(lines) if line.strip()), "")


def folder_bytes(folder: Path) -> int:
    """Sum the bytes of a folder's files, of which files and folders may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def run_shown(command: Sequence[str], cwd: Path, env: dict[str, str], detail: Callable[[], str] = str) -> int:
    """Run a command, pass on what it prints, and say after each silence that it still runs, with `detail()`; return its exit code."""
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0)
    parts: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(process, parts), daemon=True).start()
    started = time.monotonic()
    try:
        _pass_on(parts, started, detail)
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()


def _read(process: subprocess.Popen, parts: queue.Queue[bytes]) -> None:
    while part := process.stdout.read(65536):
        parts.put(part)
    parts.put(b"")


def _pass_on(parts: queue.Queue[bytes], started: float, detail: Callable[[], str]) -> None:
    while True:
        try:
            part = parts.get(timeout=HEARTBEAT_SECONDS)
        except queue.Empty:
            part = f"[{time.monotonic() - started:.0f} s{detail()}]".encode()
        if not part:
            return
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
