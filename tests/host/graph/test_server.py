"""The pack inside a running ComfyUI."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import bench_import
import pytest
from comfyui_server import Server, ServerError, make_base_directory

ROOT = Path(__file__).absolute().parents[3]
NODE_IDS = {
    "HalfsafeLoadDiffusionModel",
    "HalfsafeLoadCheckpoint",
    "HalfsafeLoadCLIP",
    "HalfsafeLoadControlNet",
    "HalfsafeLoadVAE",
    "HalfsafeSaveModel",
    "HalfsafeLayerRules",
    "HalfsafeComputeDtype",
    "HalfsafeAccumulation",
    "HalfsafeAutoPrecision",
    "HalfsafeNaNGuard",
    "HalfsafeGuardVAE",
    "HalfsafeGuardCLIP",
    "HalfsafeCheckFinite",
    "HalfsafeReport",
    "HalfsafeDeviceInfo",
    "HalfsafeAnalyzeLayers",
    "HalfsafeMeasurePrecisions",
    "HalfsafeCompareImages",
}


def stock_graph(model: str = "wan.safetensors", weight_dtype: str = "default") -> dict:
    """A text-to-image prompt of stock nodes alone."""
    return {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": model, "weight_dtype": weight_dtype}},
        "2": {"class_type": "CLIPLoader", "inputs": {"clip_name": "clip_l.safetensors", "type": "sd3"}},
        "3": {"class_type": "VAELoader", "inputs": {"vae_name": "wan_vae.safetensors"}},
        "4": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["2", 0], "text": "a lighthouse"}},
        "5": {
            "class_type": "EmptyHunyuanLatentVideo",
            "inputs": {"width": 64, "height": 64, "length": 1, "batch_size": 1},
        },
        "6": {
            "class_type": "KSampler",
            "inputs": {
                **{"model": ["1", 0], "positive": ["4", 0], "negative": ["4", 0], "latent_image": ["5", 0]},
                **{"seed": 1, "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0},
            },
        },
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["3", 0]}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": "stock"}},
    }


def wait_until_running(server: Server, prompt_id: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while prompt_id not in {entry[1] for entry in json.loads(server.get("/queue"))["queue_running"]}:
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.05)


def test_pack_imports_without_a_failure(comfyui_dir: Path, tmp_path: Path) -> None:
    base = make_base_directory(tmp_path, ROOT)
    command = [*Server(comfyui_dir, base).command(port=8188), "--quick-test-for-ci"]
    done = subprocess.run(command, cwd=comfyui_dir, capture_output=True, text=True, timeout=240, check=False)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "Halfsafe-Pack" in log, "ComfyUI did not see the pack"
    assert not re.search(r"IMPORT FAILED|Cannot import|Traceback", log), log


def test_pack_imports_fast(comfyui_dir: Path) -> None:
    medians = bench_import.figures(Path(sys.executable), comfyui_dir, runs=1)["medians"]
    assert medians["cpu_seconds"] <= 1.0, "the pack slows ComfyUI's start"


def test_the_packs_nodes_are_registered(server: Server) -> None:
    assert {name for name in server.object_info() if name.startswith("Halfsafe")} == NODE_IDS


def test_workflows_are_served_as_templates(server):
    """ComfyUI serves one folder of a pack: with one named `examples` beside it, it would not be `workflows`."""
    (pack, names), *_ = [item for item in json.loads(server.get("/workflow_templates")).items() if "Halfsafe" in item[0]]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    for name in names:
        assert "nodes" in json.loads(server.get(f"/api/workflow_templates/{pack}/{name}.json"))
        assert server.get(f"/api/workflow_templates/{pack}/{name}.jpg")[:2] == b"\xff\xd8"


def test_stock_nodes_make_a_picture(server: Server) -> None:
    outputs = server.prompt(stock_graph())
    assert server.view(outputs["8"]["images"][0]).startswith(b"\x89PNG")


def test_refused_prompt_names_the_input(server: Server) -> None:
    with pytest.raises(ServerError, match="unet_name"):
        server.prompt(stock_graph(model="absent.safetensors"))


def test_interrupt_is_reported(server: Server) -> None:
    graph = stock_graph()
    graph["6"]["inputs"] |= {"steps": 5000, "seed": 2}
    prompt_id = server.queue(graph)
    wait_until_running(server, prompt_id)
    server.interrupt()
    assert server.wait(prompt_id, timeout=60)["status"]["status_str"] == "error"


def test_stop_ends_the_process(comfyui_dir: Path, tmp_path: Path) -> None:
    server = Server(comfyui_dir, make_base_directory(tmp_path, ROOT)).start()
    server.stop()
    assert server.process.poll() is not None
    with pytest.raises(OSError):
        server.get("/system_stats")


def test_failed_start_shows_the_log(comfyui_dir: Path, tmp_path: Path) -> None:
    server = Server(comfyui_dir, make_base_directory(tmp_path, ROOT), ["--no-such-flag"])
    with pytest.raises(ServerError, match="no-such-flag"):
        server.start()
