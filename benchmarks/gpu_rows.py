"""The rows of a part of benchmarks/gpu.py, from a process of its own: a row that fails, hangs or ends the process leaves the others."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

from setup.environment import ROOT

NOT_BEGUN = "the time was up"
TAIL, AT_ITS_END = 500, 20


def measured(
    names: list[str],
    command: Callable[[list[str], Path], list[str]],
    ends: float,
    longest: float,
    env: Mapping[str, str] | None = None,
) -> Iterator[dict]:
    """Yield a row for each name, in order, as it comes.

    Args:
        command: what starts a process for some names, which writes each row as a line of JSON to a file. It may end before the last one,
            after a row with a problem that makes the device useless to it.
        ends: when no row is begun, and one that lasts is ended, by ``time.monotonic``; ``longest``: the seconds of one row.
    """
    left = list(names)
    while left and time.monotonic() < ends:
        before = len(left)
        why = yield from _of_a_process(left, command, ends, longest, env)
        if left and (why or len(left) == before):
            yield {"row": left.pop(0), "problem": why or "no answer"}
    yield from ({"row": name, "problem": NOT_BEGUN} for name in left)


def _of_a_process(
    left: list[str], command: Callable, ends: float, longest: float, env: Mapping[str, str] | None
) -> Generator[dict, None, str]:
    """Yield what one process writes and take it off ``left``; return why the next row did not come, "" if the process ended by itself."""
    with tempfile.TemporaryDirectory(prefix="halfsafe-gpu-") as folder, tempfile.TemporaryFile("w+") as log:
        lines = Path(folder) / "rows.jsonl"
        lines.touch()
        with subprocess.Popen(command(left, lines), cwd=ROOT, env=env, stdout=log, stderr=log) as process:
            seen, since, why = 0, time.monotonic(), ""
            while True:
                ended = process.poll() is not None
                rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").split("\n")[:-1]]
                for row in rows[seen:]:
                    seen, since = seen + 1, time.monotonic()
                    left.remove(row["row"])
                    yield row
                if ended or not left:
                    break
                if time.monotonic() > min(ends, since + longest):
                    why = NOT_BEGUN if time.monotonic() > ends else f"no end after {longest:.0f} s"
                    process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(AT_ITS_END)
            process.kill()
        if not why and process.returncode:
            log.seek(0)
            why = f"its process ended with {process.returncode}: {log.read()[-TAIL:]}"
        return why


def ended(command: list[str], seconds: float, env: Mapping[str, str]) -> tuple[int | None, str]:
    """Run a command and return its exit code, None if it had to be ended, and what it printed. It is asked to end first, so that it can
    end what it started."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log) as process,
    ):
        code: int | None = None
        try:
            code = process.wait(seconds if seconds != float("inf") else None)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(AT_ITS_END)
            process.kill()
        log.seek(0)
        return code, log.read()
