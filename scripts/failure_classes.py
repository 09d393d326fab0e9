"""Print the table of failure classes, measured now: `python scripts/failure_classes.py --comfyui DIR > docs/failure-classes.md`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.failure_classes import Measured, table  # noqa: E402

HEAD = """# Failures that users report, and what the guard does about them

Each class is made to happen in a real ComfyUI with small models of random weights, on a CPU. Errors are relative to the same
model in fp32 ("no result": the run ended with an error, as it should). "extra calls": how often the model ran again. Classes that
no test makes say why. Measured with torch {torch} on {machine} by `scripts/failure_classes.py`; the tests are in
`tests/host/guard/test_classes.py`, which fail when a verdict or an error bound no longer holds.

"simulated": what a device or another pack would do is imitated, so the row shows what the guard does, not that the device does so.
"clean" with a large error: the guard cannot see it, since nothing is NaN or Inf.

"""


def measure(comfyui: Path) -> list[Measured]:
    """The rows the tests keep.

    Raises:
        SystemExit: a test failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        test = "tests/host/guard/test_classes.py"
        command = [sys.executable, "-m", "pytest", "-q", test, f"--junitxml={results}"]
        environ = {**os.environ, "COMFYUI_DIR": str(comfyui), "HALFSAFE_STRICT": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout)
        found = ElementTree.parse(results).iter("property")
        return [_row(entry.get("value")) for entry in found if entry.get("name") == "failure_class"]


def _row(text: str) -> Measured:
    return Measured(**json.loads(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("COMFYUI_DIR"), help="a ComfyUI folder")
    comfyui = parser.parse_args().comfyui
    if comfyui is None:
        parser.error("name a ComfyUI with --comfyui or COMFYUI_DIR")
    rows = measure(comfyui)
    print(HEAD.format(torch=version("torch"), machine=platform.machine()) + table(rows))


if __name__ == "__main__":
    main()
