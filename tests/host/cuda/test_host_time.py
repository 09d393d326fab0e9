"""Functions of Python in a clean call of each setting, for one of ComfyUI's own.

As weights lie on NVIDIA's devices: under dynamic VRAM, of the model with the most layers; and of quantized layers, for one
of ComfyUI's own in fp16. `python -m benchmarks host_time` has them of all models and weights, and `test_auto_fp16.py` of
Wan without dynamic VRAM.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.shipped import ROOT

MOST = {"plain, guard": 1.03, "fp16_safe": 1.12}
MOST_TO_FP16 = {"fp8 products": 1.31, "int8": 1.51}
"""With comfy-kitchen's own functions of Python, which take 0.26 and 0.64 of them."""


def counted(comfyui_dir: Path, model: str, settings: tuple[str, ...], weights: tuple[str, ...]) -> list[dict]:
    options = ("--models", model, "--settings", *settings, "--weights", *weights, "--comfyui", str(comfyui_dir))
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.host_time", "--count", "--json", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))},
        capture_output=True,
        text=True,
    )
    rows = json.loads(ran.stdout or "{}").get("rows", [])
    assert len(rows) == len(settings) * len(weights), ran.stderr[-2000:]
    return rows


@pytest.mark.slow
def test_a_call_under_dynamic_vram_runs_about_as_many_functions_as_comfyuis(comfyui_dir):
    rows = counted(comfyui_dir, "SDXL", (*MOST,), ("dynamic VRAM, resident", "dynamic VRAM, streamed"))
    assert [row for row in rows if row["functions_to_core"] > MOST[row["setting"]]] == []


@pytest.mark.slow
def test_a_call_of_quantized_layers_runs_few_functions_more_than_one_in_fp16(comfyui_dir):
    rows = counted(comfyui_dir, "Wan", ("plain",), (*MOST_TO_FP16,))
    assert [row for row in rows if row["functions_to_fp16"] > MOST_TO_FP16[row["weights"]]] == []
