"""Random graphs of loaders, storages, LoRAs, merges, the pack's nodes, other packs' code and ends, each judged by ComfyUI alone in fp32: `python scripts/compose.py --comfyui DIR --seed 1 --cases 500`.

Prints each wrong case with its row, and the number of cases by outcome. `--row "family=wan storage=int8 ..."` runs one again; a factor that it leaves out has
its first value (`FACTORS` of `tests/support/compose.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parent.parent
TEST = "tests/host/graph/test_composed.py::test_a_graph_is_right_or_refused_in_a_sentence"


class Outcomes:
    """Print what is wrong as it comes, and count the outcomes; ``every``: print all."""

    def __init__(self, every: bool):
        self.every, self.counts, self.sentences = every, Counter(), Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        row = report.nodeid.partition("[")[2].removesuffix("]")
        kind, text = dict(report.user_properties).get("outcome", ("wrong", report.longreprtext))
        self.counts[kind] += 1
        if self.every or kind == "wrong":
            print(f"{kind}\t{report.duration:.2f}\t{text}\t{row}", flush=True)
        elif kind.startswith("refused"):
            self.sentences[text[:160]] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("COMFYUI_DIR"), help="a ComfyUI folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--row", action="append", default=[], help="run this case; may be given several times")
    parser.add_argument("--every", action="store_true", help="print every case, not only wrong ones")
    options = parser.parse_args()
    os.environ |= {"COMFYUI_DIR": str(options.comfyui), "HALFSAFE_STRICT": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [f"--composed-seed={options.seed}", f"--composed-cases={options.cases}"]
    chosen += [f"--composed-row={row}" for row in options.row]
    os.chdir(ROOT)
    outcomes = Outcomes(options.every)
    quiet = ("-p", "no:cacheprovider", "-p", "no:terminal")
    status = pytest.main([TEST, *chosen, *quiet], plugins=[outcomes])
    print("".join(f"{count:6} refused: {text}\n" for text, count in outcomes.sentences.most_common()), end="")
    print(f"seed {options.seed}: {dict(outcomes.counts)}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
