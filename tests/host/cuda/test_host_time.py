"""Functions of Python in a clean call of each setting, for one of ComfyUI's own.

As weights lie on NVIDIA's devices: under dynamic VRAM, of the model with the most layers; and of quantized layers, for one
of ComfyUI's own in fp16. `python -m benchmarks host_time` has them of all models and weights, and `test_auto_fp16.py` of
Wan without dynamic VRAM.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import tiny_models
from support.inprocess import benchmark
from support.shipped import ROOT

MOST = {"plain, guard": 1.03, "fp16_safe": 1.12}
MOST_TO_FP16 = {"fp8 products": 1.31, "int8": 1.51}
"""With comfy-kitchen's own functions of Python, which take 0.26 and 0.64 of them."""


MOST_OF_FOUR_BLOCKS = {
    ("dynamic VRAM, resident", "fp16_safe", "functions_to_core"): 1.03,
    ("dynamic VRAM, streamed", "plain, guard", "functions_to_core"): 1.12,
    ("fp8", "plain", "functions_to_fp16"): 1.18,
    ("fp8 products", "plain", "functions_to_fp16"): 1.44,
    ("int8", "plain", "functions_to_fp16"): 1.78,
    ("int8 with LoRA", "plain", "functions_to_fp16"): 2.17,
    ("fp8, dynamic VRAM, resident", "fp16_safe", "functions_to_fp16"): 1.14,
}
"""The same of a Wan of four blocks, in this process: what a layer takes weighs less in it. Measured, and two in a hundred more."""


@pytest.mark.not_as_on_cuda("products are replaced by constants")
@pytest.mark.parametrize("case", MOST_OF_FOUR_BLOCKS, ids=", ".join)
def test_a_call_of_a_small_model_runs_few_functions(comfy, models_dir, monkeypatch, case):
    weights, setting, figure = case
    host_time = benchmark("host_time")
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")  # it is set anew below, and put back after the test
    path = models_dir / "diffusion_models" / "host_time.safetensors"
    monkeypatch.setattr(
        host_time,
        "write",
        lambda comfy, name, dtype: ("wan", tiny_models.wan(path, dim=128, blocks=4, ffn=256, dtype=dtype)),
    )
    made = SimpleNamespace(run=comfy.run, folder=path.parent)
    (row,) = host_time._rows(made, "Wan", weights, argparse.Namespace(count=True, settings=(setting,)))
    assert row[figure] <= MOST_OF_FOUR_BLOCKS[case], row


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


@pytest.mark.release
def test_a_call_under_dynamic_vram_runs_about_as_many_functions_as_comfyuis(comfyui_dir):
    rows = counted(comfyui_dir, "SDXL", (*MOST,), ("dynamic VRAM, resident", "dynamic VRAM, streamed"))
    assert [row for row in rows if row["functions_to_core"] > MOST[row["setting"]]] == []


@pytest.mark.release
def test_a_call_of_quantized_layers_runs_few_functions_more_than_one_in_fp16(comfyui_dir):
    rows = counted(comfyui_dir, "Wan", ("plain",), (*MOST_TO_FP16,))
    assert [row for row in rows if row["functions_to_fp16"] > MOST_TO_FP16[row["weights"]]] == []
