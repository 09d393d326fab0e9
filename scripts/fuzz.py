"""Damaged files in bulk: every answer is right or a typed error. `python scripts/fuzz.py --help`.

Case N of a seed is always the same: a genuine file of a random dialect, mutated (`tests/support/mutations.py`), and given to every target
(`tests/support/fuzz_targets.py`). A case that hangs or crashes ends the run; its number stands in the last line. `--only N` runs one alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from random import Random

ROOT = Path(__file__).absolute().parent.parent
MEMORY = 2 << 30


def main() -> int:
    options = _parse()
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest  # noqa: F401  # makes the pack importable as `halfsafe`
    import torch

    torch.set_num_threads(1)
    _limit_memory()
    outcomes, failures = Counter(), {}
    cases = [options.only] if options.only is not None else range(options.start, options.start + options.count)
    with tempfile.TemporaryDirectory(prefix="halfsafe-fuzz-") as folder:
        for case in cases:
            print(f"\rcase {case}, {len(failures)} failures", end="", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(options.limit, exit=True)
            for place, text in run_case(case, options.seed, Path(folder), outcomes).items():
                failures.setdefault(place, f"case {case}: {text}")
    faulthandler.cancel_dump_traceback_later()
    print(
        f"\n{len(cases)} files, seed {options.seed}: {', '.join(f'{count} {name}' for name, count in sorted(outcomes.items()))}"
    )
    print("".join(f"FAILED {place}\n  {text}\n" for place, text in failures.items()), end="")
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="files (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that one case may take (default: 20)")
    parser.add_argument("--only", type=int, metavar="CASE", help="run this one case")
    return parser.parse_args()


def _limit_memory() -> None:
    """At most 2 GB more than the libraries take; only Linux and its like can be told so."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY,) * 2)


def run_case(case: int, seed: int, folder: Path, outcomes: Counter) -> dict[str, str]:
    """Mutate one file, give it to every target, and return place in the code -> traceback of what was neither right nor refused."""
    from support import fuzz_targets, mutations

    content, path, failures = mutations.mutated(Random(f"{seed}:{case}")), folder / "in.safetensors", {}
    for target in fuzz_targets.TARGETS:
        path.write_bytes(content)
        try:
            outcomes[fuzz_targets.judge(target, path, Random(f"{seed}:{case}:{target}"))] += 1
            left = {file.name for file in folder.iterdir()} - {path.name, "out.safetensors"}
            if left:
                raise fuzz_targets.Wrong(f"files were left: {left}")
        except Exception as error:
            outcomes["FAILED"] += 1
            failures[f"{target}: {_place_of(error)}"] = traceback.format_exc()
        for file in folder.iterdir():
            file.unlink()
    return failures


def _place_of(error: Exception) -> str:
    """Type of an exception and the innermost line of the project that it came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    frame = frames[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.name}:{frame.lineno}"


if __name__ == "__main__":
    sys.exit(main())
