"""What a first run on a GPU is trusted with: the baseline is fp16, no wait is timed as host time, rows can be chosen."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.inprocess import benchmark
from support.shipped import ROOT

gpu = benchmark("gpu")


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(comfyui=Path("comfyui"), out=tmp_path / "gpu.json", dry_run=True, only=())


@pytest.mark.slow
def test_a_dry_run_makes_the_chosen_rows_and_its_baseline_multiplies_in_fp16(comfyui_dir, tmp_path):
    """Judged at the operation: ComfyUI's loader with fp32 compute multiplies the same weights in fp32."""
    names = ["Flux, dynamic VRAM: fp8 file", "Flux, dynamic VRAM: core fp16", "Flux, dynamic VRAM: int8"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--comfyui", str(comfyui_dir), "--only", *names]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    rows = json.loads(ran.stdout or "{}").get("rows", ())
    found = {row["row"]: row for row in rows}
    assert found.keys() >= set(names) and ran.returncode == 0, (ran.stderr[-2000:], rows)
    assert all(row["error"] > 1e-5 and row["longest_kernels"] and row["kernels"] > 100 for row in rows), rows
    assert found[names[1]]["products"].keys() == {"fp16 x fp16 to fp16"} and "seconds_to_core" in found[names[2]]


def test_every_row_can_be_chosen_and_another_is_left_out():
    names = [name for part in ("device", *gpu.PARTS) for name in gpu.names_of(part)]
    assert len(names) == len(set(names)) > 30
    for name in names:
        assert gpu.is_wanted(name, ()) and gpu.is_wanted(name, (name,)) and not gpu.is_wanted(name, ("Chroma",))


def test_host_time_has_no_wait_in_it(monkeypatch):
    """CUDA's wait spins: it takes the thread's own time."""
    waited, tensor = 0.02, torch.ones(2)
    read = torch.Tensor.tolist

    def spinning(self):
        end = time.thread_time() + waited
        while time.thread_time() < end:
            pass
        return read(self)

    monkeypatch.setattr(torch.Tensor, "tolist", spinning)
    monkeypatch.setattr(gpu, "wait", lambda: None)
    clocks = gpu.timed(lambda: tensor.tolist())
    assert clocks["host_seconds"] < waited / 4 and clocks["seconds"] > waited


def test_a_part_that_hangs_is_ended_and_its_rows_are_told(args, monkeypatch):
    monkeypatch.setattr(sys, "executable", "sleep")
    monkeypatch.setattr(subprocess, "Popen", lambda command, popen=subprocess.Popen, **given: popen(["sleep", "60"], **given))
    (rows,) = gpu._in_a_process(args, "Flux", time.monotonic() + 0.5)
    assert [row["row"] for row in rows] == gpu.names_of("Flux") and {row["problem"] for row in rows} == {"the time was up"}
