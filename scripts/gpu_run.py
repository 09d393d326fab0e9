"""Test or measure the pack on a GPU machine without a network: two commands, each of less than ten minutes.

    python3 scripts/gpu_run.py tests .gpu --out RESULTS       # tests/gpu, a process for each file
    python3 scripts/gpu_run.py measure .gpu --out RESULTS     # benchmarks/gpu.py
    python scripts/gpu_run.py tests .gpu --out RESULTS --dry-run      # on a CPU, without what that machine lacks

`.gpu` is the folder that `gpu_bundle.py` made. `tests` leaves `tests.jsonl`, a line for each test as it begins and ends,
`tests.jsonl.hung` with the tracebacks of one that hung, `tests.json`, `tests.md` and a log for each file; `measure` leaves `gpu.json`,
written after each row, and its log. Exits with 1 where a test fails, hangs or ends its process, where a file has no test that ran, and
where a measurement could not be made; a missed target is in `gpu.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_bundle import prepared
from setup import machine
from setup.environment import ROOT, Environment, SetupError

SECONDS = 540
"""For what comes after the wheels are installed, in all; a dry run takes as long as it takes, up to ``DRY_TIMES_AS_LONG``."""
DRY_TIMES_AS_LONG = 6
TEST_SECONDS = {"compile": 150, "dynamic_vram": 120}
ONE_TEST, DRY_TEST = 45, 1200
LAST = ("dynamic_vram", "compile")
MISSED_TARGET = 2
FRAMES = ("--frames", "9")
"""9,216 tokens of video: the 21,504 of all frames would take the time of two other rows for each."""
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Those of the machine: they ask for packages of their own, and change how tests run."""
MAY_BE_SKIPPED = ("dynamic_vram",)
"""In a dry run: it needs a CUDA device."""


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what it started ends with it
    try:
        return run(options.part, options.folder, options.out, options.dry_run)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tests", "measure"))
    parser.add_argument("folder", type=Path, help="what gpu_bundle.py made")
    parser.add_argument("--out", type=Path, required=True, help="where to leave the results")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, without the packages that the machine lacks")
    return parser.parse_args()


def run(part: str, folder: Path, out: Path, dry: bool) -> int:
    """Run the tests or the measurements with what a bundle holds; the exit code.

    Raises:
        SetupError: the folder is no bundle, or its wheels do not fit this Python.
    """
    if not (folder / "bundle.json").exists():
        raise SetupError(f"{folder} is no bundle: make one with `python scripts/gpu_bundle.py {folder}`.")
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + SECONDS * (DRY_TIMES_AS_LONG if dry else 1)
    with tempfile.TemporaryDirectory(prefix="halfsafe-gpu-run-") as work:
        environ = prepared(folder.resolve(), Path(work), dry)
        return (tests if part == "tests" else measure)(environ, out, dry, ends)


def tests(environ: dict[str, str], out: Path, dry: bool, ends: float) -> int:
    """Run each file of tests/gpu in a process of its own, those that take longest last."""
    lines, files = out / "tests.jsonl", {}
    lines.write_text("", encoding="utf-8")
    about = machine.gpu_conditions(Environment(Path(sys.executable), Path(environ["COMFYUI_DIR"]))) | {"dry_run": dry}
    for file in ordered((ROOT / "tests" / "gpu").glob("test_*.py")):
        name, before = file.stem.removeprefix("test_"), len(read(lines))
        limit = DRY_TEST if dry else TEST_SECONDS.get(name, ONE_TEST)
        command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", str(file)]
        own = environ | {"HALFSAFE_TEST_LINES": str(lines.resolve()), "HALFSAFE_TEST_SECONDS": str(limit), **NO_PLUGINS}
        code = logged(command, own, out / f"{name}.log", ends - time.monotonic())
        files[name] = outcome(read(lines)[before:], code)
        (out / "tests.json").write_text(json.dumps(about | {"files": files}, indent=2) + "\n", encoding="utf-8")
    (out / "tests.md").write_text(table(read(lines)), encoding="utf-8")
    print(json.dumps(files, indent=2))
    return int(any(is_bad(found, dry and name in MAY_BE_SKIPPED) for name, found in files.items()))


def measure(environ: dict[str, str], out: Path, dry: bool, ends: float) -> int:
    """Run benchmarks/gpu.py; a missed target is no failure."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--comfyui", environ["COMFYUI_DIR"], "--out", str(out / "gpu.json")]
    left = ends - time.monotonic()
    code = logged([*command, *(["--dry-run"] if dry else [*FRAMES, "--seconds", str(int(left - 60))])], environ, out / "measure.log", left)
    return int(code not in (0, MISSED_TARGET))


def ordered(files) -> list[Path]:
    """Test files by name, those of ``LAST`` after the others."""
    return sorted(files, key=lambda file: (LAST.index(name) + 1 if (name := file.stem.removeprefix("test_")) in LAST else 0, name))


def read(lines: Path) -> list[dict]:
    """The lines of JSON that tests left; the last may be cut off."""
    found = []
    for line in lines.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def outcome(lines: list[dict], code: int | None) -> dict:
    """Which tests of a file passed, failed, were skipped, or began and never ended. ``exit_code``: None out of time."""
    last = {line["test"]: line["outcome"] for line in lines}
    named = {key: [test for test, found in last.items() if found == key] for key in ("failed", "begun")}
    counts = {key: sum(found == key for found in last.values()) for key in ("passed", "skipped")}
    return {"exit_code": code, **counts, "failed": named["failed"], "never_ended": named["begun"]}


def table(lines: list[dict]) -> str:
    """A table of tests and what became of each, in Markdown: their names say what passing tells."""
    last = {line["test"]: line for line in lines}
    rows = ["| file | test | outcome | s | why |", "|---|---|---|---|---|"]
    for test, line in last.items():
        file, _, name = test.partition("::")
        why = line.get("why", "").strip().splitlines()[-1:] or [""]
        words = name.removeprefix("test_").replace("_", " ").replace("|", "/")
        rows.append(f"| {Path(file).stem.removeprefix('test_')} | {words} | {line['outcome']} | {line.get('seconds', '')} | {why[0].removeprefix('Skipped: ')} |")
    return "\n".join(rows) + "\n"


def is_bad(found: dict, may_be_skipped: bool = False) -> bool:
    """Whether a file's tests failed, did not end, or were all skipped."""
    return found["exit_code"] != 0 or bool(found["failed"] or found["never_ended"]) or not (found["passed"] or may_be_skipped)


def logged(command: list[str], environ: dict[str, str], log: Path, seconds: float) -> int | None:
    """Run a command in the project's folder, its output in a file, whose end is printed: its exit code, None out of time.

    What it started ends with it: left alone, a child would go on using the GPU.
    """
    print(f"== {log.stem}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]), flush=True)
    return code


def end_group(process: subprocess.Popen) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
