"""Damaged files, rules and reports in bulk: every answer is right or a typed error. `python scripts/fuzz.py --help`.

Each case is one genuine file of a random dialect, mutated (`tests/support/mutations.py`), and given to every target
(`tests/support/fuzz_targets.py`). Case N of a seed is always the same; `--only N` runs it alone and shows what it does.
The cases run in a process with limited memory; a crash, a hang and a write outside of the folder count as failures.
With `--atheris` (a package for Python 3.11 to 3.13, not needed otherwise) coverage of `precision/` guides the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

ROOT = Path(__file__).absolute().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
CHUNK = 200
MEMORY = 2 << 30
KEPT = 40


@dataclass
class Tally:
    """Counts of a run. ``failures``: one entry per place in the code, with the first case that showed it."""

    cases: int = 0
    outcomes: dict[str, Counter] = field(default_factory=dict)
    failures: dict[str, dict] = field(default_factory=dict)
    peak_mb: int = 0

    def count(self, target: str, outcome: str) -> None:
        self.outcomes.setdefault(target, Counter())[outcome] += 1

    def fail(self, target: str, case: int, problem: str, where: str) -> None:
        entry = self.failures.setdefault(f"{target}: {where}", {"case": case, "count": 0, "problem": problem})
        entry["count"] += 1

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.peak_mb = max(self.peak_mb, other.peak_mb)
        for target, counts in other.outcomes.items():
            self.outcomes.setdefault(target, Counter()).update(counts)
        for key, entry in other.failures.items():
            known = self.failures.setdefault(key, {**entry, "count": 0})
            known["count"] += entry["count"]


def main() -> int:
    options = _parse()
    if options.atheris:
        return _atheris(options)
    if options.only is not None:
        return _show(options.only, options.seed, options.targets)
    started = time.monotonic()
    tally = Tally()
    with contextlib.suppress(KeyboardInterrupt):  # what is done so far is told, and saved if asked for
        _supervise(options, tally)
    result = _result(tally, options.seed, time.monotonic() - started)
    print(as_text(result))
    if options.save:
        _save(result)
    return 1 if tally.failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="files (default: 2000)")
    parser.add_argument("--seconds", type=float, help="stop after this long, whatever the count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--targets", nargs="+", help="all of them without it")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that one case may take (default: 20)")
    parser.add_argument("--only", type=int, metavar="CASE", help="run one case here and show what happens")
    parser.add_argument("--atheris", action="store_true", help="let coverage guide the bytes")
    parser.add_argument("--save", action="store_true", help="add the run to benchmarks/results/fuzz.json")
    return parser.parse_args()


def _import_pack() -> None:
    """Make the pack importable as `halfsafe`, and `support` beside it."""
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest  # noqa: F401


def _supervise(options: argparse.Namespace, tally: Tally) -> None:
    begin = options.start
    until = time.monotonic() + (options.seconds or float("inf"))
    with tempfile.TemporaryDirectory(prefix="halfsafe-fuzz-", dir=_fast_folder()) as folder, _Worker(Path(folder), options) as worker:
        while begin < options.start + options.count and time.monotonic() < until:
            end = min(begin + CHUNK, options.start + options.count)
            for first, last in worker.run(begin, end, tally):
                worker.run(first, last, tally)
            begin = end
            if begin % (CHUNK * 10) == 0:
                print(f"{tally.cases} files, {len(tally.failures)} failures", file=sys.stderr, flush=True)


def _fast_folder() -> str | None:
    """A folder in memory where the system has one: every conversion waits for the disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class _Worker:
    """A process that runs cases, and is ended and replaced when one takes too long or crashes."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.options = folder, options
        self.context = multiprocessing.get_context("spawn")
        self.at = self.context.Value("q", -1, lock=False)
        self.process = None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        self.pipe, theirs = self.context.Pipe()
        arguments = (theirs, self.at, self.folder, self.options.seed, self.options.targets)
        self.process = self.context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def run(self, begin: int, end: int, tally: Tally) -> list[tuple[int, int]]:
        """Run the cases and add what they came to; or note the one that ended the process and give back the others."""
        if begin >= end:
            return []
        if self.process is None:
            self._begin()
        self.pipe.send((begin, end))
        case, since = -1, time.monotonic()
        while not self.pipe.poll(0.2):
            if self.at.value != case:
                case, since = self.at.value, time.monotonic()
            hung = time.monotonic() - since > self.options.limit
            if hung or not self.process.is_alive():
                return self._lost(begin, end, tally, "hang" if hung else f"crash {self.process.exitcode}")
        try:
            tally.add(self.pipe.recv())
        except EOFError:
            self.process.join()
            return self._lost(begin, end, tally, f"crash {self.process.exitcode}")
        return []

    def _lost(self, begin: int, end: int, tally: Tally, what: str) -> list[tuple[int, int]]:
        case = self.at.value
        self._end()
        tally.cases += 1
        tally.fail("process", case, what, what)
        return [(begin, case), (case + 1, end)]


def _serve(pipe, at, folder: Path, seed: int, targets: list[str] | None) -> None:
    """What the worker process does: wait for a range of cases, run them, send their tally."""
    _import_pack()
    import torch
    from support import fuzz_targets, mutations

    torch.set_num_threads(1)
    mutations.genuine()
    confinement = fuzz_targets.Confinement()
    _limit_memory()
    pipe.send("ready")
    while True:
        begin, end = pipe.recv()
        tally = Tally()
        for case in range(begin, end):
            at.value = case
            run_case(case, seed, folder, tally, confinement, targets)
        tally.peak_mb = _peak_mb()
        pipe.send(tally)


def _limit_memory() -> None:
    """At most 2 GB more than the libraries take; only Linux and its like can be told so."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY,) * 2)


def _peak_mb() -> int:
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 << 20 if sys.platform == "darwin" else 1 << 10)


def run_case(case: int, seed: int, folder: Path, tally: Tally, confinement, targets: list[str] | None = None) -> None:
    """Mutate one file and give it to every target. Nothing is raised: failures are counted."""
    from support import fuzz_targets, mutations

    random = Random(f"{seed}:{case}")
    name, content = "in.safetensors", mutations.mutated(random)
    path = folder / name
    tally.cases += 1
    for target in targets or fuzz_targets.TARGETS:
        path.write_bytes(content)
        own = Random(f"{seed}:{case}:{target}")
        try:
            with confinement.within(folder):
                tally.count(target, fuzz_targets.judge(target, path, own))
            left = {file.name for file in folder.iterdir()} - {name, "out.safetensors"}
            if left:
                raise fuzz_targets.Wrong(f"files were left: {left}")
        except Exception as error:
            confinement.escapes.clear()
            tally.count(target, "FAILED")
            tally.fail(target, case, f"{type(error).__name__}: {error}"[:300], place_of(error))
        for file in folder.iterdir():
            file.unlink()


def place_of(error: Exception) -> str:
    """Type and innermost line of the project's own code that an exception came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    inner = [frame for frame in frames if f"{os.sep}precision{os.sep}" in frame.filename] or frames
    frame = inner[-1] if inner else None
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.name}:{frame.lineno}" if frame else type(error).__name__


def _show(case: int, seed: int, targets: list[str] | None) -> int:
    """One case in this process, with the whole traceback of each failure."""
    _import_pack()
    from support import fuzz_targets, mutations

    name, content = "in.safetensors", mutations.mutated(Random(f"{seed}:{case}"))
    print(f"{name}, {len(content)} bytes: {content[:1500]!r}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        for target in targets or fuzz_targets.TARGETS:
            path.write_bytes(content)
            try:
                print(target, fuzz_targets.judge(target, path, Random(f"{seed}:{case}:{target}")))
            except Exception:
                print(target, "FAILED")
                traceback.print_exc(file=sys.stdout)
    return 0


def _atheris(options: argparse.Namespace) -> int:
    """libFuzzer on the bytes of a file, guided by the coverage of `precision/`; stops at the first failure."""
    import atheris

    _import_pack()
    with atheris.instrument_imports(include=["halfsafe.precision"]):
        from support import fuzz_targets, mutations

    folder = Path(tempfile.mkdtemp(prefix="halfsafe-fuzz-", dir=_fast_folder()))
    corpus = folder / "corpus"
    corpus.mkdir()
    for name, content in mutations.genuine().items():
        (corpus / name.replace(" ", "-")).write_bytes(content)
    path = folder / "in.safetensors"

    def one(content: bytes) -> None:
        path.write_bytes(content)
        for target in options.targets or ("read", "inspect", "scan", "convert", "plan"):
            fuzz_targets.judge(target, path, Random(len(content)))

    limits = [f"-runs={options.count}", f"-max_total_time={int(options.seconds or 0)}", f"-seed={options.seed or 1}"]
    atheris.Setup([sys.argv[0], *limits, "-rss_limit_mb=4096", "-max_len=20000", f"-artifact_prefix={folder}/", str(corpus)], one)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(corpus)
    return 0


def _result(tally: Tally, seed: int, seconds: float) -> dict:
    import torch

    return {
        "seed": seed,
        "files": tally.cases,
        "seconds": round(seconds, 1),
        "targets": {name: dict(sorted(counts.items())) for name, counts in sorted(tally.outcomes.items())},
        "failures": dict(list(tally.failures.items())[:KEPT]),
        "peak_memory_mb": tally.peak_mb,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }


def as_text(result: dict) -> str:
    """Outcomes by target, then failures."""
    lines = [f"{result['files']} files, seed {result['seed']}, {result['seconds']} s, {result['peak_memory_mb']} MB at most"]
    for target, counts in result["targets"].items():
        lines.append(f"  {target:8} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    for place, entry in result["failures"].items():
        lines += [f"  FAILED {entry['count']} x {place}", f"    case {entry['case']}: {entry['problem']}"]
    return "\n".join(lines)


def _save(result: dict) -> None:
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if RESULTS.exists() else []
    key = ("seed", "torch")
    runs = [run for run in runs if any(run[name] != result[name] for name in key)] + [result]
    total = sum(run["files"] for run in runs)
    RESULTS.write_text(json.dumps({"files": total, "runs": runs}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
