"""See Halfsafe work in a real ComfyUI: a tiny trained model, a picture in fp8, and a black picture avoided."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from setup.comfyui_server import PACK_NAME, Server, ServerError, make_base_directory
from setup.environment import (
    ROOT,
    Environment,
    SetupError,
    accelerator,
    clean_environ,
    installed,
    prepare,
    write_models,
)
from setup.progress import stage as told
from setup.workflow import WorkflowError, ask_for, bypass, shrink, small_file, substitute_files, to_prompt, written_back

MODELS = {"model_name": "diffusion_models", "clip_name1": "text_encoders", "vae_name": "vae"}
STOCK_NAMES = {"unet_name": "model_name", "clip_name": "clip_name1"}  # of the same files in ComfyUI's own loaders
SHAPES = ROOT / "tests" / "support" / "shapes.py"
GUARDS = ("HalfsafeNaNGuard", "HalfsafeGuardVAE")
FILLED = "Halfsafe [1-58] - *.json"
ASKED, BUILT_IN = "a blue star on a pink background", "a red heart"
SMALL = {"width": 128, "height": 128, "steps": 16}
FEW_STEPS = {"width": 256, "height": 256, "steps": 6}


@dataclass(frozen=True)
class Scene:
    """One run of a workflow: what is said before it, and what of it is changed."""

    name: str
    says: str
    workflow: str
    bypassed: tuple[str, ...] = ()


QUICK = Scene("picture", "the model in scaled fp8", "Halfsafe 3 - Half the memory")
STORY = (
    Scene("fp16", "a model that overflows in fp16, unguarded", "Halfsafe 2 - Find the layer that turns black", GUARDS),
    Scene("fp16_guarded", "the same, with NaN Guard", "Halfsafe 2 - Find the layer that turns black"),
    Scene("fp16_safe", "the same in fp16_safe, which cannot overflow", "Halfsafe 4 - Old GPU without bf16"),
)


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.stdout.reconfigure(errors="replace")
    try:
        return _demo(options, installed(options.comfyui) if options.installed else prepare(options.comfyui))
    except (SetupError, ServerError, WorkflowError) as error:
        print(f"\n{error}\nThe demo stopped here.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="leave ComfyUI open in the browser until Ctrl-C")
    parser.add_argument(
        "--installed",
        action="store_true",
        help="install nothing: this Python has all that ComfyUI needs, but for its page",
    )
    parser.add_argument("--comfyui", type=Path, help="an existing ComfyUI folder, instead of the pinned one")
    parser.add_argument("--prompt", help="what to draw, such as 'a blue star on a pink background'")
    parser.add_argument(
        "--model", type=Path, help="a real Wan 2.1 diffusion model, instead of a tiny one that draws shapes"
    )
    parser.add_argument("--clip", type=Path, help="its real text encoder; without it the prompt means nothing")
    parser.add_argument("--vae", type=Path, help="its real VAE; without it the picture is noise")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "demo", help="where to save the results")
    return parser.parse_args()


def _demo(options: argparse.Namespace, environment: Environment) -> int:
    real = {"model_name": options.model, "clip_name1": options.clip, "vae_name": options.vae}
    with tempfile.TemporaryDirectory(prefix="halfsafe-demo-", ignore_cleanup_errors=True) as folder:
        base = make_base_directory(Path(folder), ROOT, copied=options.serve)
        files = _provide_models(environment, base, real)
        device = accelerator(environment.python)
        no_page = ("--front-end-root", str(base / "input")) if options.installed else ()
        server = Server(environment.comfyui, base, no_page, environment.python, cpu=device == "cpu")
        with contextlib.ExitStack() as scopes:
            with told(f"Starting ComfyUI from {environment.comfyui} on {device}"):
                scopes.enter_context(server)
            stage = Stage(server, environment, options, files)
            if options.serve:
                _open(stage, base)
            try:
                shown = _show(stage)
            except (ServerError, WorkflowError) as error:
                raise ServerError(f"{error}\n--- end of ComfyUI's log ---\n{server.log_tail()}") from error
            if options.serve:
                print(f"ComfyUI stays open at {server.url}. Ctrl-C stops it.", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    server.process.wait()
    return 0 if shown else 1


def _provide_models(environment: Environment, base: Path, real: dict[str, Path | None]) -> dict[str, str]:
    """Input name -> file name of every model, as Halfsafe's loaders and ComfyUI's own call their inputs."""
    files = {name: _provide_model(environment, base, name, file) for name, file in real.items()}
    return files | {stock: files[name] for stock, name in STOCK_NAMES.items()}


def _provide_model(environment: Environment, base: Path, name: str, real: Path | None) -> str:
    """Link the real file, the tiny trained one of this repository, or write a random one; return its file name."""
    folder = base / "models" / MODELS[name]
    file = small_file(name, "wan") if real is None else real.name
    trained = ROOT / "tests" / "assets" / file
    if real is not None or trained.is_file():
        _link_model(real or trained, folder / file)
    else:
        print(f"Making a small {file} ...", flush=True)
        write_models(environment, folder, Path(file).stem)
    return file


def _link_model(source: Path, target: Path) -> None:
    if not source.is_file():
        raise SetupError(f"{source} is not a file.")
    link_file(source.resolve(), target)


def _run_shapes(environment: Environment, *arguments: object) -> str:
    """Run `tests/support/shapes.py`, which needs torch, and return what it printed."""
    command = [str(environment.python), str(SHAPES), *map(str, arguments)]
    done = subprocess.run(command, env=clean_environ(), capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        raise SetupError(f"{SHAPES.name} failed:\n{done.stderr}")
    return done.stdout


def link_file(source: Path, target: Path) -> None:
    """Link a file, by whichever kind of link the system allows."""
    try:
        target.symlink_to(source)
    except OSError:
        os.link(source, target)


@dataclass(frozen=True)
class Stage:
    """Where the scenes are played: a running server with these model files by input name."""

    server: Server
    environment: Environment
    options: argparse.Namespace
    files: dict[str, str]


def _show(stage: Stage) -> bool:
    """Play the scenes and save what they give. Returns whether each showed what it should."""
    folder = stage.options.output
    folder.mkdir(parents=True, exist_ok=True)
    if stage.options.model:
        print(f"Saved {_play(stage, QUICK)}, and the report of its layers beside it.")
        return True
    asked = stage.options.prompt or ASKED
    pictures = [_play(stage, QUICK, asked), *(_play(stage, scene) for scene in STORY)]
    _run_shapes(stage.environment, "sheet", folder / "side-by-side.png", *pictures[1:])
    right = _tell(stage, (QUICK, *STORY), pictures, asked)
    print(
        f"\nSaved in {folder}: these pictures, side-by-side.png, and every layer of each run in report*.txt and .json."
    )
    return right


def _tell(stage: Stage, scenes: tuple[Scene, ...], pictures: list[Path], asked: str) -> bool:
    """Say what each picture shows, and whether it is what it should be."""
    seen = [json.loads(line) for line in _run_shapes(stage.environment, "read", *pictures).splitlines()]
    expected = [asked, *(None if scene.bypassed else BUILT_IN for scene in STORY)]
    right = seen == expected or bool(stage.options.prompt)
    print(
        "\nIt works: black without Halfsafe, right with it."
        if right
        else f"\nNot as it should be: {expected} was expected."
    )
    for scene, shows in zip(scenes, seen, strict=True):
        print(f"  {scene.name + '.png':18} {shows or 'black':34} {scene.says}")
    return right


def _play(stage: Stage, scene: Scene, asked: str | None = None) -> Path:
    """Run a scene, save its picture and report, and return the picture's path."""
    prompt = _prompt_of(stage, scene, asked)
    report = next(node_id for node_id, node in prompt.items() if node["class_type"] == "HalfsafeReport")
    picture = next(node_id for node_id, node in prompt.items() if node["class_type"] == "SaveImage")
    prompt["report_json"] = {"class_type": "PreviewAny", "inputs": {"source": [report, 1]}}
    with told(f"Running {scene.says}"):
        outputs = stage.server.prompt(prompt)
    stem, suffix = stage.options.output / scene.name, "" if scene is QUICK else f"-{scene.name}"
    stem.with_name(f"report{suffix}.txt").write_text(outputs[report]["text"][0], encoding="utf-8")
    stem.with_name(f"report{suffix}.json").write_text(outputs["report_json"]["text"][0], encoding="utf-8")
    path = stem.with_suffix(".png")
    path.write_bytes(stage.server.view(outputs[picture]["images"][0]))
    return path


def _prompt_of(stage: Stage, scene: Scene, asked: str | None) -> dict:
    workflow = json.loads((ROOT / "workflows" / f"{scene.workflow}.json").read_text(encoding="utf-8"))
    info = stage.server.object_info()
    prompt = substitute_files(
        to_prompt(bypass(workflow, scene.bypassed), info), info, lambda name, _: stage.files.get(name)
    )
    if scene is not QUICK:
        return prompt
    return shrink(ask_for(prompt, asked), **SMALL) if asked else shrink(prompt, **FEW_STEPS)


def _open(stage: Stage, base: Path) -> None:
    """Tell the page's address, its templates filled with this demo's models so that Run works as they are."""
    templates = base / "custom_nodes" / PACK_NAME / "workflows"
    for path in templates.glob(FILLED):  # the others are of models that this demo has no small one of
        path.write_text(json.dumps(_filled(stage, path)), encoding="utf-8")
    print(
        f"ComfyUI is open at {stage.server.url}. Its templates Halfsafe 1 to 5 and 8, under {PACK_NAME}, have the demo's models: open one and press Run.",
        flush=True,
    )


def _filled(stage: Stage, path: Path) -> dict:
    """A template with the names of the models that are there and, for the tiny one, what it can draw on a CPU."""
    workflow, info = json.loads(path.read_text(encoding="utf-8")), stage.server.object_info()
    shipped = to_prompt(workflow, info)
    prompt = substitute_files(shipped, info, lambda name, _: stage.files.get(name))
    if prompt == shipped:  # of the built-in model
        return workflow
    if not stage.options.model:
        prompt = shrink(ask_for(prompt, stage.options.prompt or ASKED), **SMALL)
    return written_back(workflow, info, prompt)


if __name__ == "__main__":
    sys.exit(main())
