"""What a run on a GPU is trusted with: items and rows can be chosen, a row that fails or hangs leaves the others, no wait is timed as host
time, the baseline is fp16, and the table fits a screen."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.inprocess import benchmark, turn_on_dynamic_vram
from support.shipped import ROOT

gpu = benchmark("gpu")
checks, models, rows, table = (sys.modules[f"benchmarks.gpu_{name}"] for name in ("checks", "models", "rows", "table"))

PROCESS = """
import json, sys, time
path, *names = sys.argv[1:]
for name in names:
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        sys.exit("no kernel image")
    row = {"row": name, "said": "done"} | ({"problem": "an illegal address"} if name == "breaks the device" else {})
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\\n")
    if "problem" in row:
        sys.exit(0)
"""
MACHINE = {
    "device": "NVIDIA RTX 6000 Ada Generation",
    "driver": "580.159.04",
    "torch": "2.11.0+cu130",
    "comfyui": "0.30.0",
    "date": "2026-11-27",
    "dry_run": False,
}


@pytest.fixture
def args(tmp_path):
    return argparse.Namespace(comfyui=Path("comfyui"), out=tmp_path / "gpu.json", dry_run=True, models=tmp_path)


def measured(names, seconds=20, longest=1.0):
    return list(
        rows.measured(
            names,
            lambda left, lines: [sys.executable, "-c", PROCESS, str(lines), *left],
            time.monotonic() + seconds,
            longest,
        )
    )


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("hangs", "no end after 1 s"),
        ("dies", "ended with 1: no kernel image"),
        ("breaks the device", "an illegal address"),
    ],
)
def test_a_bad_row_leaves_the_others_and_is_told(bad, problem):
    found = measured(["first", bad, "second", "third"])
    assert [row["row"] for row in found] == ["first", bad, "second", "third"]
    assert [problem in row.get("problem", "") for row in found] == [False, True, False, False]
    assert [row.get("said") for row in found if "problem" not in row] == ["done"] * 3


def test_rows_that_the_time_is_too_short_for_are_told():
    began = time.monotonic()
    found = measured(["first", "hangs", "second"], seconds=1.5, longest=30)
    assert time.monotonic() - began < 25 and [row["row"] for row in found] == ["first", "hangs", "second"]
    assert [row.get("problem") for row in found] == [None, rows.NOT_BEGUN, rows.NOT_BEGUN]


@pytest.mark.parametrize("answers", [True, False])
def test_a_process_goes_on_after_a_row_that_failed_unless_its_device_is_lost(args, monkeypatch, answers):
    def fail():
        raise RuntimeError("out of luck")

    monkeypatch.setattr(gpu, "load_comfy", lambda *_, **__: None)
    monkeypatch.setattr(gpu, "_makers", lambda *_: [("a", dict), ("b", fail), ("c", dict)])
    monkeypatch.setattr(gpu, "_device_answers", lambda: answers)
    args.part = "SDXL"
    assert gpu.run_part(args) == 0
    found = [json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()]
    assert [row["row"] for row in found] == (["a", "b", "c"] if answers else ["a", "b"]) and "out of luck" in found[1][
        "problem"
    ]


def test_parts_and_beginnings_of_rows_choose_rows():
    names = gpu.chosen(())
    assert len(names) == len(set(names)) and [*dict.fromkeys(name.partition(": ")[0] for name in names)] == [*gpu.PARTS]
    assert gpu.chosen(("layers", "tests")) == [name for name in names if name.startswith(("layers", "tests"))]
    assert gpu.chosen(("Flux, dynamic VRAM: int8",)) == [
        "Flux, dynamic VRAM: int8",
        "Flux, dynamic VRAM: int8 unpacked",
    ]
    assert gpu.chosen(("Chroma",)) == []


def test_what_is_not_timed_runs_side_by_side_and_nothing_beside_what_is(args, monkeypatch):
    running, beside, limits = set(), {}, {}

    def rows_of(_, part, names, ends):
        running.add(part)
        limits[part] = ends
        time.sleep(0.05)
        beside[part] = {*running}
        yield from ({"row": name, "said": "done"} for name in names)
        running.discard(part)

    monkeypatch.setattr(gpu, "rows_of", rows_of)
    args.dry_run, args.only, args.seconds = False, (), gpu.ALL_SECONDS / 2
    result, began = {"rows": []}, time.monotonic()
    gpu.run_all(args, gpu.chosen(()), result)
    written = json.loads(args.out.read_text(encoding="utf-8"))["rows"]
    assert [row["row"] for row in result["rows"]] == gpu.chosen(()) == [row["row"] for row in written]
    assert all(beside[part] == {part} for part in gpu.PARTS if part not in gpu.UNTIMED)
    assert any(beside[part] == {*gpu.UNTIMED} for part in gpu.UNTIMED)
    ends = {part: until - began for part, until in limits.items()}
    assert all(ends[part] == pytest.approx(seconds / 2, abs=2) for part, (seconds, _) in gpu.PARTS.items()), ends


def row_of(name, kind):
    if kind == "problem":
        return {"row": name, "problem": "RuntimeError: CUDA error: an illegal memory access was encountered\n" * 9}
    if name.split(": ")[0] in ("layers", *gpu.UNTIMED):
        return {"row": name, "said": "a blue star on a pink background; " * 9}
    clocks = {"seconds": 12.3456, "seconds_to_core": 123.456, "device_seconds_to_core": 1.2}
    return {"row": name, **clocks, "busy_ms": 12345.6, "error": 1.23e-3, "peak_bytes": 9 << 30}


@pytest.mark.parametrize("kind", ["problem", "figures"])
def test_the_table_of_a_whole_run_fits_a_screen(kind):
    targets = {name: {"limit": 1.02, "measured": 1.234, "met": False} for name in gpu.chosen(())}
    text = table.as_table(MACHINE | {"rows": [row_of(name, kind) for name in gpu.chosen(())], "targets": targets})
    lines = text.splitlines()
    assert len(lines) <= table.LINES and max(map(len, lines)) <= table.COLUMNS == 80, (len(lines), text)
    shown = [line for line in lines if ("PROBLEM" if kind == "problem" else "123.46 1.00") in line]
    assert len(shown) >= 2 * len(models.CALLS), text
    assert all(part.partition(",")[0] in text for part in gpu.PARTS)


def test_a_row_is_held_against_the_fp16_of_its_own_state():
    """Of a video its own; of formats that of dynamic VRAM; of compiled models that of static weights."""
    found = {
        name: {"row": name, "seconds": 1.0, "busy_ms": busy}
        for name, busy in (
            ("Flux, dynamic VRAM: core fp16", 2.0),
            ("Flux: core fp16", 4.0),
            ("Wan 1.3B, video: core fp16", 8.0),
        )
    }
    asked = {
        "Flux, dynamic VRAM, formats: mxfp8": 2.0,
        "Flux, compiled: fp8 compiled": 4.0,
        "Wan 1.3B, video: int8": 8.0,
    }
    for name in asked:
        found[name] = {"row": name, "seconds": 1.0, "seconds_to_core": 1.0, "busy_ms": 8.0}
    lines = table.as_table(MACHINE | {"rows": list(found.values())}).splitlines()
    shown = {line[:20]: line.split() for line in lines}
    for name, core in asked.items():
        words = shown[name.replace("dynamic VRAM", "dyn.")[:20]]
        assert f"{8 / core:.2f}" in words, (name, words)


def test_a_test_that_hangs_on_the_device_leaves_the_tests_after_it(args, monkeypatch):
    asked = []

    def ended(command, seconds, env):
        asked.append([part.removeprefix("--deselect=") for part in command if part.startswith("--deselect=")])
        with open(env["HALFSAFE_TEST_LINES"], "a", encoding="utf-8") as file:
            for test in ("a", "b", "c"):
                if test in asked[-1]:
                    continue
                file.write(json.dumps({"test": test, "outcome": "begun"}) + "\n")
                if test == "b":
                    return 1, "Timeout (0:01:00)!"
                file.write(json.dumps({"test": test, "outcome": "passed"}) + "\n")
        return 0, ""

    monkeypatch.setattr(checks, "ended", ended)
    row = checks.run_tests(args, float("inf"))
    assert asked == [[], ["a", "b"]] and (row["passed"], row["failed"], row["problem"]) == (2, {"b": "hung"}, "b")


def test_a_command_that_lasts_is_asked_to_end_and_then_ended():
    polite = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended its server')); print('begun', flush=True); time.sleep(60)"
    code, printed = rows.ended([sys.executable, "-c", polite], 1.5, os.environ)
    assert code is None and "begun" in printed and "ended its server" in printed
    assert rows.ended([sys.executable, "-c", "print('done')"], float("inf"), os.environ) == (0, "done\n")


def test_dynamic_vram_is_turned_on_with_a_log_level_as_comfyui_sets_one(monkeypatch):
    """Without one comfy-aimdo writes each allocation to stderr, where a failed test's words then cannot be seen."""
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy_aimdo.control

    levels = []
    monkeypatch.setattr(comfy.model_management, "get_all_torch_devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.CoreModelPatcher)
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", False)
    for name, answer in (("init", True), ("init_devices", True)):
        monkeypatch.setattr(comfy_aimdo.control, name, lambda *_, answer=answer: answer)
    for name in ("info", "warning", "error"):
        monkeypatch.setattr(comfy_aimdo.control, f"set_log_{name}", lambda name=name: levels.append(name))
    assert turn_on_dynamic_vram() and len(levels) == 1


@pytest.mark.not_as_on_cuda("it measures ComfyUI as it runs on this device")
def test_a_row_of_a_model_multiplies_in_fp16_in_its_baseline_and_is_held_against_it(
    args, comfy, models_dir, monkeypatch
):
    """Two rows of a dry run, in this process; the test after it starts the whole command."""
    made = SimpleNamespace(run=comfy.run, folder=models_dir / "diffusion_models")
    monkeypatch.setattr(gpu, "load_comfy", lambda *_, **__: made)
    args.part, args.rows = "Flux", ["Flux: core fp16", "Flux: int8"]
    assert gpu.run_part(args) == 0
    core, ours = (json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines())
    assert core["products"].keys() == {"fp16 x fp16 to fp16"} and core["error"] > 1e-5, core
    assert ours["error"] > 1e-5 and "seconds_to_core" in ours, ours


@pytest.mark.release
def test_a_dry_run_makes_the_chosen_rows_and_its_baseline_multiplies_in_fp16(comfyui_dir, tmp_path):
    """Judged at the operation: ComfyUI's loader with fp32 compute multiplies the same weights in fp32."""
    names = ["Flux, dynamic VRAM: core fp16", "Flux, dynamic VRAM: core int8", "layers: host", "device: rules"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    options = ["--dry-run", "--comfyui", str(comfyui_dir), "--out", str(tmp_path / "gpu.json"), "--only", *names]
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    found = {row["row"]: row for row in json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]}
    assert list(found) == names and ran.returncode == 0, (ran.stderr[-2000:], found)
    assert found["device: rules"]["otherwise"] == {} and "0 of " in found["device: rules"]["said"]
    fp16, int8, layers, _ = found.values()
    assert fp16["error"] > 1e-5 and fp16["products"].keys() == {"fp16 x fp16 to fp16"}, fp16
    assert "seconds_to_core" in int8 and any("int8" in product for product in int8["products"]), int8
    ours = {way: "host_us" in figures for way, figures in layers["ways"].items() if not way.startswith("part")}
    assert ours == dict.fromkeys(ours, True) and sum(way.startswith("ours") for way in ours) == 4, layers


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
    monkeypatch.setattr(models, "wait", lambda: None)
    clocks = models.timed(lambda: tensor.tolist())
    assert clocks["host_seconds"] < waited / 4 and clocks["seconds"] > waited
