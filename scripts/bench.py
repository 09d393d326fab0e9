"""Run a benchmark from any folder: `python scripts/bench.py NAME [options]` is `python -m benchmarks NAME [options]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
