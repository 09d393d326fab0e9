"""Hundreds of prompts in one ComfyUI: `python -m benchmarks soak --comfyui DIR [--prompts N] [--save]`.

A real server runs small models in fp16 and fp8, in turns: clean ones, ones that overflow and are rescued, ones that are
stopped by the guard and ones that are interrupted. After each prompt its memory, threads and open files are read, and
the backend flags from the report's JSON. Linux only, where /proc tells them.

Memory is anonymous resident memory. Its slope is that of a straight line through all but the first quarter of the
prompts; what ComfyUI itself keeps of each prompt, its history, is part of it. With `--without` no node of the pack runs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from setup import machine
from setup.comfyui_server import Server, ServerError, error_text, make_base_directory
from setup.environment import ROOT, Environment, write_models
from setup.workflow import node

from . import reporting

MODELS = {"diffusion_models": ("wan", "wan_overflowing"), "text_encoders": ("clip_l",), "vae": ("wan_vae",)}
SLOPE_LIMIT = 256 * 1024
WARM = 4
KINDS = ("clean", "rescued", "fp8", "stopped", "accumulation", "interrupted")
EXPECTED = {"stopped": ("error",), "interrupted": ("error", "success")}
STEPS = {"interrupted": 60}


def graph(kind: str, seed: int) -> dict:
    """A text-to-image prompt of 64 x 64 pixels in two steps: loader 1, guard 9, report 10, text 4, sampler 6, picture 8."""
    file = "wan.safetensors" if kind in ("clean", "accumulation") else "wan_overflowing.safetensors"
    storage, compute = ("fp8_e4m3fn", "fp16_safe") if kind == "fp8" else ("fp16", "fp16")
    sampled = {"seed": seed, "steps": STEPS.get(kind, 2), "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
    on_nan = "stop" if kind == "stopped" else "retry_higher"
    return {
        "1": node("HalfsafeLoadDiffusionModel", model_name=file, storage=storage, compute=compute),
        "11": node("HalfsafeAccumulation", model=["1", 0], **accumulation("on" if kind == "accumulation" else "unchanged")),
        "9": node("HalfsafeNaNGuard", model=["11", 0], on_nan=on_nan, max_retries=8),
        "2": node("CLIPLoader", clip_name="clip_l.safetensors", type="sd3"),
        "3": node("VAELoader", vae_name="wan_vae.safetensors"),
        "12": node("HalfsafeGuardVAE", vae=["3", 0], on_nan="retry_higher"),
        "4": node("CLIPTextEncode", clip=["2", 0], text=f"a lighthouse, {seed % 7}"),
        "5": node("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1 + seed % 2),
        "6": node("KSampler", model=["9", 0], positive=["4", 0], negative=["4", 0], latent_image=["5", 0], denoise=1.0, **sampled),
        "7": node("VAEDecode", samples=["6", 0], vae=["12", 0]),
        "8": node("SaveImage", images=["7", 0], filename_prefix="soak"),
        "10": node("HalfsafeReport", model=["9", 0], after=["6", 0]),
    }


def stock(graph: dict) -> dict:
    """The same prompt with nodes of ComfyUI alone."""
    graph = {key: value for key, value in graph.items() if key not in ("9", "10", "11", "12")}
    file = graph["1"]["inputs"]["model_name"]
    graph["1"] = node("UNETLoader", unet_name=file, weight_dtype="default")
    graph["6"]["inputs"]["model"], graph["7"]["inputs"]["vae"] = ["1", 0], ["3", 0]
    return graph


def accumulation(value: str) -> dict[str, str]:
    names = ("reduced_precision_reduction", "tf32", "fp8_fast_accumulation", "attention")
    return {**dict.fromkeys(names, "unchanged"), "fp16_accumulation": value}


def soak(server: Server, prompts: int, without: bool = False) -> list[dict]:
    """Run the prompts and return what was read after each."""
    samples = []
    for index in range(prompts):
        kind = KINDS[index % len(KINDS)]
        prompt = graph(kind, index)
        entry = _run(server, stock(prompt) if without else prompt, kind)
        status = entry["status"]["status_str"]
        if not without and status not in EXPECTED.get(kind, ("success",)):
            raise ServerError(f"prompt {index} ({kind}): {error_text(entry)}")
        samples.append({"kind": kind, "status": status, "outside": _outside(entry), **resources(server.process.pid)})
        if index % 20 == 0:
            print(f"{index}: {samples[-1]['anonymous_bytes'] / 1e6:.0f} MB", file=sys.stderr, flush=True)
    return samples


def _run(server: Server, prompt: dict, kind: str) -> dict:
    prompt_id = server.queue(prompt)
    if kind == "interrupted":
        time.sleep(0.7)
        server.interrupt()
    return server.wait(prompt_id)


def _outside(entry: dict) -> dict | None:
    """Each backend setting outside of the model's calls, as the report node found it; None without a report."""
    report = entry["outputs"].get("10", {}).get("halfsafe_report")
    return {name: flag["outside"] for name, flag in json.loads(report[0])["flags"].items()} if report else None


def resources(pid: int) -> dict[str, int]:
    """Anonymous memory in bytes, threads and open files of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"anonymous_bytes": int(status["RssAnon"].split()[0]) * 1024, "threads": int(status["Threads"]), "files": files}


def figures(samples: list[dict]) -> dict:
    """The slope and the spread of each resource over the settled part, and the targets."""
    settled = samples[len(samples) // WARM :]
    columns = {name: [sample[name] for sample in settled] for name in ("anonymous_bytes", "threads", "files")}
    slopes = {name: statistics.linear_regression(range(len(values)), values).slope for name, values in columns.items()}
    growth = {name: (len(values) - 1) * slopes[name] for name, values in columns.items()}
    flags = [sample["outside"] for sample in samples if sample["outside"]]
    changed = [name for name in (flags[0] if flags else {}) if any(values[name] != flags[0][name] for values in flags)]
    return {
        "kinds": {kind: _statuses(samples, kind) for kind in KINDS},
        "slope_bytes_per_prompt": round(slopes["anonymous_bytes"]),
        "range": {name: [min(values), max(values)] for name, values in columns.items()},
        "outside": flags[0] if flags else {},
        "targets": {
            "slope_bytes_per_prompt": reporting.target(round(slopes["anonymous_bytes"]), SLOPE_LIMIT),
            "threads_grown": reporting.target(round(growth["threads"], 2), 2),
            "files_grown": reporting.target(round(growth["files"], 2), 2),
            "flags_changed": reporting.target(len(changed), 0),
        },
    }


def _statuses(samples: list[dict], kind: str) -> dict[str, int]:
    found = [sample["status"] for sample in samples if sample["kind"] == kind]
    return {status: found.count(status) for status in sorted(set(found))}


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=200, help="prompts to run (default: 200)")
    parser.add_argument("--without", action="store_true", help="run ComfyUI's own nodes only, for comparison")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args()
    if not Path("/proc/self/status").exists():
        parser.error("memory, threads and files are read from /proc, which this system does not have")
    if options.prompts < 2 * WARM:
        parser.error(f"at least {2 * WARM} prompts are needed to tell a slope")
    environment = Environment(Path(sys.executable), options.comfyui.resolve())
    with tempfile.TemporaryDirectory(prefix="halfsafe-soak-") as folder:
        base = make_base_directory(Path(folder), ROOT)
        for kind, names in MODELS.items():
            write_models(environment, base / "models" / kind, *names)
        began = time.perf_counter()
        with Server(environment.comfyui, base, python=environment.python) as server:
            samples = soak(server, options.prompts, options.without)
    result = _result(environment, samples, options.without) | {"seconds": round(time.perf_counter() - began, 1)}
    if options.save:
        reporting.save(result)
    print(json.dumps(result if options.json else {key: result[key] for key in ("kinds", "range", "targets")}, indent=2))
    return reporting.exit_code(result)


def _result(environment: Environment, samples: list[dict], without: bool) -> dict:
    curve = [round(sample["anonymous_bytes"] / 1e6, 1) for sample in samples]
    about = {"benchmark": "soak", "prompts": len(samples), "nodes": "ComfyUI" if without else "Halfsafe"}
    return machine.conditions(environment) | about | figures(samples) | {"anonymous_megabytes": curve}


if __name__ == "__main__":
    sys.exit(main())
