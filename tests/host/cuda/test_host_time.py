"""Functions of Python in a clean call of each setting, for one of ComfyUI's own, as weights lie on NVIDIA's devices: under dynamic VRAM;
of the model with the most layers. `python -m benchmarks host_time` has them of Wan and Flux too, and `test_auto_fp16.py` of Wan without dynamic VRAM."""

import json
import os
import subprocess
import sys

import pytest
from support.shipped import ROOT

MOST = {"plain, guard": 1.03, "fp16_safe": 1.12}
COMMAND = ("-m", "benchmarks.host_time", "--count", "--json", "--models", "SDXL", "--settings", *MOST)


@pytest.mark.slow
def test_a_call_under_dynamic_vram_runs_about_as_many_functions_as_comfyuis(comfyui_dir):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    weights = ("--weights", "dynamic VRAM, resident", "dynamic VRAM, streamed", "--comfyui", str(comfyui_dir))
    ran = subprocess.run(
        [sys.executable, *COMMAND, *weights],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    rows = json.loads(ran.stdout or "{}").get("rows", ())
    assert len(rows) == 4, ran.stderr[-2000:]
    assert [row for row in rows if row["functions_to_core"] > MOST[row["setting"]]] == []
