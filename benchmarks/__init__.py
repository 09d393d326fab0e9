"""Benchmarks: Halfsafe against the alternative, the same work in the same run. `python -m benchmarks NAME`, see `README.md`."""

import sys
from pathlib import Path

SCRIPTS = str(Path(__file__).absolute().parents[1] / "scripts")
if SCRIPTS not in sys.path:
    sys.path.append(SCRIPTS)
