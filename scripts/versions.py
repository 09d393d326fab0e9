"""Run the tests on several versions of torch, ComfyUI and comfy-kitchen: `python scripts/versions.py --help`.

Each Python and torch has a virtual environment of its own below the user's cache folder, kept for the next run unless
`--remove` is given (one takes 1 to 6 GB). Tier 0 (tests/unit) runs on each of them, tier 1 (tests/host) on each of them
with each ComfyUI folder given, those of torch.compile in a process of their own; the tests of formats and kernels once more with each
comfy-kitchen given. `--cpu` runs tier 0 and the tests of torch.compile as on other CPUs too, each with every number of `--threads`.
What follows `--` goes to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path

from setup import environment
from setup.environment import ROOT, SetupError, clean_environ
from setup.machine import comfyui_version

TORCH = ("2.8.0", "2.11.0", "newest")
LIBRARIES = ("numpy", "safetensors", "Pillow", "comfy-kitchen", "packaging")
QUICK = ("-m", "not slow", "-k", "loaders or saver or compute or object_info or bad_files")
KERNELS = ("-k", "int8 or fp8 or kitchen or dialect or formats or quantiz or low_bits or calibrated")
OF_THE_MAIN_ENVIRONMENT = "tests/unit/project/test_scripts.py::test_broken_interpreter_is_not_usable"
CPUS = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "no-vnni": {"DNNL_MAX_CPU_ISA": "AVX2"},
}
"""What a CPU has: torch's own kernels by ATen, oneDNN's by DNNL. A CPU without VNNI adds int8 products in int16."""
FOLDERS = {"unit": "tests/unit", "host": "tests/host", "compile": "tests/host/compile"}
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PROBLEM_LINES = 5
KEYS = {"tier": "", "python": "", "torch": "", "comfyui": "", "kitchen": "-", "cpu": "native", "threads": 0}
"""What tells one outcome from another, and what it was before there was a choice."""


@dataclass
class Outcome:
    """What one tier came to on one set of versions; ``failures`` are test ids. ``threads``: 0 for torch's own choice."""

    tier: str
    python: str
    torch: str
    comfyui: str = "-"
    kitchen: str = "-"
    cpu: str = "native"
    threads: int = 0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.problem and self.passed > 0


def main() -> int:
    options, pytest_args = _parse(sys.argv[1:])
    if options.seed:
        os.environ["HALFSAFE_SEED"] = options.seed  # the tests' processes have it from here
    outcomes: list[Outcome] = []
    for python in options.python or [sys.executable]:
        for torch in options.torch:
            outcomes += _on_one_torch(python, torch, options, pytest_args)
            print(f"\n{as_table(outcomes)}", flush=True)
    if options.save:
        _save(outcomes)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="VERSION", help=f"default: {' '.join(TORCH)}")
    parser.add_argument("--python", nargs="+", metavar="EXECUTABLE", help="interpreters; this one without it")
    parser.add_argument("--comfyui", nargs="+", type=Path, default=[], metavar="DIR", help="folders for tier 1")
    parser.add_argument("--kitchen", nargs="+", default=[], metavar="VERSION", help="comfy-kitchens for the tests of formats and kernels")
    parser.add_argument("--cpu", nargs="+", choices=CPUS, default=["native"], help="as on these CPUs")
    parser.add_argument("--threads", nargs="+", type=int, default=[0], metavar="N", help="with these numbers of threads; 0: torch's own choice")
    parser.add_argument("--seed", metavar="N", help="HALFSAFE_SEED: other numbers where tests draw by chance")
    parser.add_argument("--quick", action="store_true", help="a fast subset of tier 1")
    parser.add_argument("--remove", action="store_true", help="delete each environment after its tests")
    parser.add_argument("--save", action="store_true", help="add the outcomes to benchmarks/results/versions.json")
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


def _on_one_torch(python: str, torch: str, options: argparse.Namespace, pytest_args: list[str]) -> list[Outcome]:
    version = _python_version(python)
    folder = environment.cache_folder() / "versions" / f"python-{version}-torch-{torch}"
    try:
        ready = _environment(folder, python, torch, bool(options.comfyui))
        environment.provide_kitchen(ready)
        held = _torch_version(ready)
        extra = [*(QUICK if options.quick else ()), *pytest_args]
        on_cpus = [(cpu, threads) for cpu in options.cpu for threads in options.threads]
        units = [_run_tier(Outcome("unit", version, held, cpu=cpu, threads=threads), ready, None, pytest_args) for cpu, threads in on_cpus]
        hosts = [outcome for comfyui in options.comfyui for outcome in _on_one_comfyui(ready, version, held, comfyui, on_cpus, extra)]
        return [*units, *hosts, *(o for kitchen in options.kitchen for o in _with_kitchen(ready, version, held, kitchen, options.comfyui, pytest_args))]
    except SetupError as error:
        return [Outcome("unit", version, torch, problem=str(error))]
    finally:
        if options.remove:
            shutil.rmtree(folder, ignore_errors=True)


def _on_one_comfyui(
    python: Path, version: str, torch: str, comfyui: Path, on_cpus: list[tuple[str, int]], pytest_args: list[str]
) -> list[Outcome]:
    compiled = [Outcome("compile", version, torch, comfyui_version(comfyui), cpu=cpu, threads=threads) for cpu, threads in on_cpus]
    outcomes = [Outcome("host", version, torch, comfyui_version(comfyui)), *compiled]
    try:
        environment.install_packages(python, f"what ComfyUI {outcomes[0].comfyui} requires", ["-r", str(comfyui / "requirements.txt")])
    except SetupError as error:
        for outcome in outcomes:
            outcome.problem = str(error)
        return outcomes
    return [_run_tier(outcome, python, comfyui, pytest_args if outcome.tier == "host" else []) for outcome in outcomes]


def _with_kitchen(python: Path, version: str, torch: str, kitchen: str, comfyuis: list[Path], pytest_args: list[str]) -> list[Outcome]:
    """The tests of formats and kernels with a comfy-kitchen that lies before the installed one."""
    folder = environment.provide_kitchen(python, kitchen)
    outcomes = [Outcome("unit", version, torch, "-", kitchen), *(Outcome("host", version, torch, comfyui_version(c), kitchen) for c in comfyuis)]
    args = [*KERNELS, *pytest_args]
    return [_run_tier(o, python, c, args, folder) for o, c in zip(outcomes, [None, *comfyuis], strict=True)]


def _python_version(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _torch_version(python: Path) -> str:
    code = "import torch; print(torch.__version__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, env=clean_environ(), check=False)
    if done.returncode:
        raise SetupError(f"torch cannot be imported: {done.stderr.splitlines()[-1]}")
    return done.stdout.strip()


def _environment(folder: Path, python: str, torch: str, for_comfyui: bool) -> Path:
    """The interpreter of a virtual environment with this torch, made or completed if need be."""
    inside = environment._python_in(folder)
    stamp = folder / "halfsafe.json"
    if stamp.exists() and (not for_comfyui or json.loads(stamp.read_text(encoding="utf-8"))["for_comfyui"]):
        return inside
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        environment.run_step(f"Creating {folder.name}", [python, "-m", "venv", str(folder)])
    environment.install_packages(inside, f"torch {torch}", [*_torch_packages(torch, for_comfyui), *LIBRARIES])
    environment.install_packages(inside, "the test tools", environment.TOOLS)
    stamp.write_text(json.dumps({"for_comfyui": for_comfyui}), encoding="utf-8")
    return inside


def _torch_packages(version: str, for_comfyui: bool) -> list[str]:
    """torch, and the packages built for that very version which ComfyUI imports."""
    exact, most = ("", "") if version == "newest" else (f"=={version}", f"<={version}")
    # A torchaudio later than its torch does not load, and asks for none; from 2.11 on it has numbers of its own.
    return [f"torch{exact}", "torchvision", f"torchaudio{most}"] if for_comfyui else [f"torch{exact}"]


def _run_tier(outcome: Outcome, python: Path, comfyui: Path | None, pytest_args: list[str], first: Path | None = None) -> Outcome:
    """Run a tier. ``first``: a folder whose packages come before the installed ones."""
    versions = f"torch {outcome.torch}, ComfyUI {outcome.comfyui}, comfy-kitchen {outcome.kitchen}"
    print(f"\n== {outcome.tier}: Python {outcome.python}, {versions}, CPU {outcome.cpu}, threads {outcome.threads}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [str(python), "-m", "pytest", FOLDERS[outcome.tier], f"--junitxml={junit}", "-q", "-p", "no:cacheprovider"]
        command += ["--deselect", OF_THE_MAIN_ENVIRONMENT, *(["--ignore", FOLDERS["compile"]] if outcome.tier == "host" else [])]
        more = {"COMFYUI_DIR": comfyui and str(comfyui.resolve()), "PYTHONPATH": first and str(first), "OMP_NUM_THREADS": outcome.threads and str(outcome.threads)}
        environ = clean_environ(HALFSAFE_STRICT="1", **CPUS[outcome.cpu], **{name: value for name, value in more.items() if value})
        code = subprocess.run([*command, *pytest_args], cwd=ROOT, env=environ, check=False).returncode
        outcome.seconds = round(time.monotonic() - started, 1)
        return read_junit(junit, outcome, code)


def read_junit(path: Path, outcome: Outcome, code: int) -> Outcome:
    """``outcome`` with the counts and failures of a JUnit file; a problem where there is none, as after a crash."""
    if not path.exists():
        outcome.problem = f"pytest ended with {code} and no results"
        return outcome
    suite = next(ElementTree.parse(path).iter("testsuite"))
    total, failures, errors, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped"))
    outcome.failed, outcome.skipped = failures + errors, skipped
    outcome.passed = total - failures - errors - skipped
    bad = (case for case in suite.iter("testcase") if case.find("failure") is not None or case.find("error") is not None)
    outcome.failures = [f"{case.get('classname')}::{case.get('name')}" for case in bad]
    return outcome


def as_table(outcomes: list[Outcome]) -> str:
    """One line per outcome, failures below it."""
    head = f"{'tier':7} {'python':8} {'torch':14} {'ComfyUI':8} {'kitchen':7} {'CPU':8} {'threads':>7} {'passed':>6} {'failed':>6} {'skipped':>7} {'seconds':>8}"
    lines = [head]
    for o in outcomes:
        lines.append(f"{o.tier:7} {o.python:8} {o.torch:14} {o.comfyui:8} {o.kitchen:7} {o.cpu:8} {o.threads or '-':>7} {o.passed:6} {o.failed:6} {o.skipped:7} {o.seconds:8.1f}")
        lines += [f"      {failure}" for failure in o.failures]
        lines += [f"      {line}" for line in o.problem.splitlines()[-PROBLEM_LINES:]]
    return "\n".join(lines)


def _save(outcomes: list[Outcome]) -> None:
    """Keep the newest outcome of each set of versions."""
    earlier = json.loads(RESULTS.read_text(encoding="utf-8"))["outcomes"] if RESULTS.exists() else []
    rows = [*earlier, *(asdict(outcome) for outcome in outcomes)]
    newest = {tuple(row.get(key, missing) for key, missing in KEYS.items()): row for row in rows}
    result = {"system": platform.system(), "cores": os.cpu_count(), "outcomes": list(newest.values())}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
