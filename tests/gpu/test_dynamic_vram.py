"""Dynamic VRAM turned on for real, in a process of its own: it has to be there before anything touches CUDA.

On a CPU, in a dry run, the process starts, finds no device to lend memory of, and the tests are skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[2]
BOUNDS = {"fp32": 5e-3, "bf16": 0.05, "fp16": 0.02, "fp16_safe": 0.01, "fp8": 0.15}
SCRIPT = "import conftest, sys; sys.argv[0] = 'main.py'; from pathlib import Path; from support import dynamic_process as p; p.main(*map(Path, sys.argv[1:]))"


@pytest.fixture(scope="module")
def found(device, tmp_path_factory) -> dict:
    paths = os.pathsep.join(filter(None, (str(ROOT / "tests"), str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", SCRIPT, os.environ["COMFYUI_DIR"], str(tmp_path_factory.mktemp("dynamic"))]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-4000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    if "unavailable" in result:
        pytest.skip(result["unavailable"])
    return result


@pytest.mark.parametrize("compute", BOUNDS)
def test_a_lora_is_right_in_every_run(found, capabilities, compute):
    if compute == "fp8" and not capabilities["fp8_matmul"]:
        pytest.skip("no fp8 products here")
    assert all(error < BOUNDS[compute] for error in found[compute])
