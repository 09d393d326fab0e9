"""Run every test on a fresh machine: set up, check the style, then each tier, two of them beside the others. `python scripts/test.py --help`."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setup import chromium
from setup.environment import (
    ROOT,
    Environment,
    SetupError,
    accelerator,
    clean_environ,
    newest_frontend,
    prepare,
    provide_kitchen,
)
from setup.machine import counts_of
from setup.progress import last_line, run_shown, stage

TIERS = {
    "unit": "tests/unit",
    "host": "tests/host",
    "next": "tests/host",  # the same tests under the layer call of the ComfyUI after 0.39
    "compile": "tests/host/compile",  # counts graphs: in a process that has compiled nothing else
    "browser": "tests/browser",
    "gpu": "tests/gpu",
}
BESIDE = ("browser", "compile")
"""What runs beside the other tiers, one after the other: a page waits half of the time, and the compiler's tests fill what is left in one process."""
# How a tier's tests are shared out between two processes: each begins with a half, and the one that ends first takes tests from
# the end of the other's. A page's tests share its server.
STEALING = ("--dist", "worksteal")
NEXT_CORE = (
    *(
        "compute/test_gate.py",
        "compute/test_bound.py",
        "compute/test_compute.py",
        "compute/test_compute_fp8.py",
        "compute/test_int8.py",
        "compute/test_int8_compute.py",
    ),
    *(
        "guard/test_guard.py",
        "guard/test_int8.py",
        "accumulation/test_accumulation_layers.py",
        "accumulation/test_accumulation_fp8.py",
        "lora/test_encoders_saving_merging.py",
    ),
    *("load/test_loaders.py", "study/test_calibrate.py"),
)
"""What of the host tests runs under the next ComfyUI's layer call too: compute, guard, sums, LoRAs, loading and calibration."""
IN_TWO_PROCESSES = {
    "unit": STEALING,
    "host": STEALING,
    "next": STEALING,
    "browser": ("--dist", "loadgroup", "--no-loadscope-reorder"),
}
ONE_THREAD_EACH = ("unit", "host", "next", "compile")


@dataclass(frozen=True)
class Result:
    """What one stage of the run came to; ``passed`` is None where it could not run."""

    name: str
    passed: bool | None
    summary: str
    seconds: float


def main() -> int:
    options, pytest_args = _parse(sys.argv[1:])
    try:
        environment = prepare(options.comfyui)
        provide_kitchen(environment.python)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    tiers = _tiers(options.tier, environment)
    with _beside(environment, tiers, pytest_args) as beside:
        results = _check_style(environment) if options.tier is None else []
        for tier in tiers:
            results.append(
                beside.wait_and_show(tier)
                if tier in beside.logs
                else _run_tier(tier, environment, pytest_args, beside=beside.last_line)
            )
    return _report(results, required=options.tier)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=TIERS, help="run this tier only")
    parser.add_argument("--comfyui", type=Path, help="a ComfyUI folder to test with, instead of the pinned one")
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


def _tiers(wanted: str | None, environment: Environment) -> list[str]:
    if wanted:
        return [wanted]
    has_gpu_tests = (ROOT / TIERS["gpu"]).is_dir()
    return ["unit", "host", "next", "compile", "browser"] + (
        ["gpu"] if has_gpu_tests and accelerator(environment.python) == "cuda" else []
    )


@dataclass
class Beside:
    """The tiers that run beside the others, in their order; what each prints is kept in its log until it is waited for."""

    logs: dict[str, Path]
    running: dict[str, Future[Result]]

    def last_line(self) -> str:
        """How far the one that runs now has come."""
        now = next((tier for tier, future in self.running.items() if not future.done()), None)
        return f", {now}: {last_line(self.logs[now])}" if now else ""

    def wait_and_show(self, tier: str) -> Result:
        with stage(f"\n== {tier}, which began beside the others", lambda: last_line(self.logs[tier])):
            result = self.running[tier].result()
        print(self.logs[tier].read_text(encoding="utf-8", errors="replace"), flush=True)
        return result


@contextlib.contextmanager
def _beside(environment: Environment, tiers: list[str], pytest_args: list[str]) -> Iterator[Beside]:
    """Run some tiers while the others run, where there are others."""
    chosen = [tier for tier in BESIDE if tier in tiers] if tiers[1:] else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(1) as thread:
        logs = {tier: Path(folder) / f"{tier}.log" for tier in chosen}
        for log in logs.values():
            log.touch()
        yield Beside(
            logs,
            {tier: thread.submit(_fetch_and_run, tier, environment, pytest_args, log) for tier, log in logs.items()},
        )


def _fetch_and_run(tier: str, environment: Environment, pytest_args: list[str], log: Path) -> Result:
    """Fetch the browser and the newest page without a word if the tier needs them, and run it. It fetches what this could not, and tells why."""
    if tier == "browser":
        command = [sys.executable, "-m", chromium.__name__, str(environment.python)]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, cwd=ROOT / "scripts", env=clean_environ(), **quiet)
    return _run_tier(tier, environment, pytest_args, log)


def _check_style(environment: Environment) -> list[Result]:
    commands = {
        "ruff": ["-m", "ruff", "check", "."],
        "format": ["-m", "ruff", "format", "--check", "--quiet", "."],
        "types": ["scripts/typecheck.py"],
    }
    return [_check(name, [str(environment.python), *command]) for name, command in commands.items()]


def _check(name: str, command: list[str]) -> Result:
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    code = run_shown(command, ROOT, clean_environ(PYTHONUNBUFFERED="1"))
    return Result(name, code == 0, "clean" if code == 0 else "failed", time.monotonic() - started)


def _run_tier(
    tier: str,
    environment: Environment,
    pytest_args: list[str],
    log: Path | None = None,
    beside: Callable[[], str] = str,
) -> Result:
    """Run a tier and show its output, or keep it in ``log``; ``beside`` says how far another one is."""
    if log is None:
        print(f"\n== {tier}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # pytest keeps gigabytes of three runs
        junit = Path(folder) / "junit.xml"
        command = [
            str(environment.python),
            "-m",
            "pytest",
            *_paths(tier),
            f"--junitxml={junit}",
            "--durations=5",
            *_color(),
            *_workers(tier),
        ]
        try:
            environ = _tier_environ(tier, environment)
        except SetupError as error:
            return Result(tier, None, str(error), time.monotonic() - started)
        command, environ = [*command, *pytest_args], environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder)
        code = run_shown(command, ROOT, environ, beside) if log is None else _run_logged(command, environ, log)
        return Result(tier, code == 0, counts_of(junit), time.monotonic() - started)


def _run_logged(command: list[str], environ: dict[str, str], log: Path) -> int:
    with log.open("wb") as output:
        return subprocess.run(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode


def _paths(tier: str) -> list[str]:
    return [f"{TIERS[tier]}/{path}" for path in NEXT_CORE] if tier == "next" else [TIERS[tier]]


def _color() -> list[str]:
    return ["--color=yes"] if sys.stdout.isatty() else []


def _workers(tier: str) -> list[str]:
    """Small models gain more from two processes of one thread each than from one of two."""
    without = [f"--ignore={TIERS['compile']}"] if tier == "host" else []
    return [*without, *(["-n", "2", *IN_TWO_PROCESSES[tier]] if tier in IN_TWO_PROCESSES else [])]


def _tier_environ(tier: str, environment: Environment) -> dict[str, str]:
    more = {"OMP_NUM_THREADS": "1"} if tier in ONE_THREAD_EACH else {}
    if tier == "next":
        more["HALFSAFE_NEXT_CORE"] = "1"
    if tier == "browser":
        more = {
            "CHROMIUM": str(chromium.provide_chromium(environment.python)),
            "HALFSAFE_FRONTEND": str(newest_frontend(environment.python)),
        }
    return clean_environ(PYTHONUNBUFFERED="1", HALFSAFE_STRICT="1", COMFYUI_DIR=str(environment.comfyui), **more)


def _report(results: list[Result], required: str | None = None) -> int:
    """Print the summary and return the exit code: 1 where a stage failed, or where the tier asked for by name could not run."""
    print("\n== summary")
    for result in results:
        word = {True: "ok", False: "FAILED", None: "NOT RUN"}[result.passed]
        summary = result.summary if result.passed is not None else "see below"
        print(f"{result.name:7} {word:7} {summary} in {result.seconds:.1f} s")
    for result in results:
        if result.passed is None:
            print(f"\n!!! The {result.name} tests did NOT run.\n{result.summary}")
    return 0 if all(r.passed or (r.passed is None and r.name != required) for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
