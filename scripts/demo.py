"""See Halfsafe work in a real ComfyUI: a small model, a workflow, a picture and its precision report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from comfyui_server import Server, ServerError, make_base_directory
from environment import ROOT, Environment, SetupError, accelerator, clean_environ, prepare
from workflow import WorkflowError, shrink, small_file, substitute_files, to_prompt

WORKFLOW = ROOT / "workflows" / "quick-fp8.json"
MODELS = {"model_name": "diffusion_models", "clip_name1": "text_encoders", "vae_name": "vae"}
SIZE = {"width": 256, "height": 256, "steps": 6}


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.stdout.reconfigure(errors="replace")
    try:
        return _demo(options, prepare(options.comfyui))
    except (SetupError, ServerError, WorkflowError) as error:
        print(f"\n{error}\nThe demo stopped here.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="leave ComfyUI open in the browser until Ctrl-C")
    parser.add_argument("--comfyui", type=Path, help="an existing ComfyUI folder, instead of the pinned one")
    parser.add_argument("--model", type=Path, help="a real Wan 2.1 diffusion model, instead of a small random one")
    parser.add_argument("--clip", type=Path, help="its real text encoder; without it the prompt means nothing")
    parser.add_argument("--vae", type=Path, help="its real VAE; without it the picture is noise")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "demo", help="where to save the results")
    return parser.parse_args()


def _demo(options: argparse.Namespace, environment: Environment) -> int:
    real = {"model_name": options.model, "clip_name1": options.clip, "vae_name": options.vae}
    with tempfile.TemporaryDirectory(prefix="halfsafe-demo-", ignore_cleanup_errors=True) as folder:
        base = make_base_directory(Path(folder), ROOT)
        files = {name: _provide_model(environment, base, name, real[name]) for name in MODELS}
        device = accelerator(environment.python)
        print(f"Starting ComfyUI from {environment.comfyui} on {device} ...", flush=True)
        with Server(environment.comfyui, base, python=environment.python, cpu=device == "cpu") as server:
            try:
                _run_workflow(server, options.output, files)
            except (ServerError, WorkflowError) as error:
                raise ServerError(f"{error}\n--- end of ComfyUI's log ---\n{server.log_tail()}") from error
            if options.serve:
                _serve(server)
    return 0


def _provide_model(environment: Environment, base: Path, name: str, real: Path | None) -> str:
    """Link the real file, or write a small random one, and return its file name."""
    folder = base / "models" / MODELS[name]
    if real is None:
        file = small_file(name, "wan")
        print(f"Making a small {file} ...", flush=True)
        _make_model(environment, folder, Path(file).stem)
        return file
    if not real.is_file():
        raise SetupError(f"{real} is not a file.")
    link_file(real.resolve(), folder / real.name)
    return real.name


def _make_model(environment: Environment, folder: Path, name: str) -> None:
    command = [str(environment.python), str(ROOT / "tests" / "support" / "tiny_models.py"), str(folder), name]
    environ = clean_environ(COMFYUI_DIR=str(environment.comfyui))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"Making {name} failed:\n{done.stderr}")


def link_file(source: Path, target: Path) -> None:
    """Link a file, by whichever kind of link the system allows."""
    try:
        target.symlink_to(source)
    except OSError:
        os.link(source, target)


def _run_workflow(server: Server, output: Path, files: dict[str, str]) -> None:
    workflow = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    info = server.object_info()
    prompt = substitute_files(to_prompt(workflow, info), info, lambda name, _: files.get(name))
    report = next(node_id for node_id, node in prompt.items() if node["class_type"] == "HalfsafeReport")
    prompt["report_json"] = {"class_type": "PreviewAny", "inputs": {"source": [report, 1]}}
    print(f"Running {WORKFLOW.name} ...", flush=True)
    started = time.monotonic()
    outputs = server.prompt(shrink(prompt, **SIZE))
    print(f"  done in {time.monotonic() - started:.1f} s\n", flush=True)
    text, data = outputs[report]["text"][0], outputs["report_json"]["text"][0]
    picture = next(n for n, node in prompt.items() if node["class_type"] == "SaveImage")
    print(f"{text}\n")
    output.mkdir(parents=True, exist_ok=True)
    _write(output / "picture.png", server.view(outputs[picture]["images"][0]))
    _write(output / "report.txt", text.encode())
    _write(output / "report.json", data.encode())


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    print(f"Saved {path}")


def _serve(server: Server) -> None:
    print(f"ComfyUI is open at {server.url} with {WORKFLOW.name} among its templates. Ctrl-C stops it.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.process.wait()


if __name__ == "__main__":
    sys.exit(main())
