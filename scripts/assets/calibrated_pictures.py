"""Draw the shapes model from files of the workflow "Save a calibrated int8 file", with and without the calibration, in a ComfyUI without this pack.

    COMFYUI_DIR=<folder of a ComfyUI that runs w6a8 and w4a8> .venv/bin/python scripts/assets/calibrated_pictures.py

The workflow saves each storage twice in a ComfyUI with the pack, calibrated on one prompt. Another ComfyUI without the pack loads the files with
its own nodes and draws other prompts: how far each picture is from the original's is printed, one prompt's are kept as
`docs/images/calibrated.jpg`, and the pack's own loader of one of them has to draw the same. comfy-kitchen is the one set up beside the environment.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pictures import IMAGES, ROOT
from PIL import Image
from setup.comfyui_server import Server, make_base_directory
from setup.environment import kitchen_folder
from setup.workflow import ask_for, node, shrink, small_file, substitute_files, to_prompt
from support import shapes, tiny_models

STORAGES = ("int8", "w6a8", "w4a8")
CALIBRATED_ON = "a red circle"
STEPS, SEED = 8, 5
COMPARED = "w4a8, calibrated"
AMPLIFIED = 4
Pictures = dict[str, np.ndarray]


def main() -> None:
    prompts = [shape.prompt() for shape in shapes.all_shapes()[7::72]]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        with server(base / "with", pack=True) as ours:
            files = save_all(ours)
            pictures = draw(ours, loader(files[COMPARED]), prompts)
        with server(base / "without", pack=False, models=base / "with") as stock:
            found = {name: draw(stock, node("UNETLoader", unet_name=file, weight_dtype="default"), prompts) for name, file in files.items()}
    report(found, pictures)
    sheet(found).save(IMAGES / "calibrated.jpg", quality=88)


@contextlib.contextmanager
def server(base: Path, pack: bool, models: Path | None = None) -> Iterator[Server]:
    """A ComfyUI with the shapes model; ``models``: where another one has its models and what it saved."""
    make_base_directory(base, ROOT)
    folder = (models or base) / "models"
    if not pack:
        (base / "custom_nodes" / "Halfsafe-Pack").unlink()
    if models is None:
        (folder / "diffusion_models" / shapes.MODEL.name).symlink_to(shapes.MODEL)
        (folder / "vae" / shapes.VAE.name).symlink_to(shapes.VAE)
        tiny_models.clip_l(folder / "text_encoders" / "clip_l.safetensors")
    options = ["--models-directory", str(folder), "--output-directory", str((models or base) / "output")]
    with Server(Path(os.environ["COMFYUI_DIR"]), base, options, environ={"PYTHONPATH": str(kitchen_folder())}) as running:
        if pack != ("HalfsafeCalibrate" in running.object_info()):
            raise SystemExit(f"the pack is {'not ' * pack}there:\n{running.log_tail()}")
        yield running


def save_all(ours: Server) -> dict[str, str]:
    """Run the workflow for every storage, with the calibration and without it; what each file is -> its name."""
    info = ours.object_info()
    workflow = json.loads((ROOT / "workflows" / "Halfsafe 8 - Save a calibrated int8 file.json").read_text(encoding="utf-8"))
    prompt = shrink(ask_for(substitute_files(to_prompt(workflow, info), info, small_file), CALIBRATED_ON), width=shapes.SIZE, height=shapes.SIZE, steps=1)
    saver = next(made for made in prompt.values() if made["class_type"] == "HalfsafeSaveModel")
    calibration = saver["inputs"].pop("calibration")
    files = {"original": shapes.MODEL.name}
    for storage in STORAGES:
        for rounding, given in (("nearest", {}), ("calibrated", {"calibration": calibration})):
            made = {**saver, "inputs": {**saver["inputs"], "storage": storage, "filename_prefix": f"diffusion_models/{storage}-{rounding}", **given}}
            ours.prompt({name: made if found is saver else found for name, found in prompt.items()})
            files[f"{storage}, {rounding}"] = f"{storage}-{rounding}_00001_.safetensors"
    return files


def loader(file: str) -> dict:
    """The pack's loader of a file, in the compute dtype that ComfyUI's own takes."""
    return node("HalfsafeLoadDiffusionModel", model_name=file, storage="as_file", compute="fp32")


def draw(running: Server, model: dict, prompts: list[str]) -> Pictures:
    """A picture of every prompt, with ComfyUI's own nodes besides the loader."""
    pictures = {}
    for text in prompts:
        outputs = running.prompt({
            "1": model,
            "2": node("CLIPLoader", clip_name="clip_l.safetensors", type="wan"),
            "3": node("VAELoader", vae_name=shapes.VAE.name),
            "4": node("CLIPTextEncode", clip=["2", 0], text=text),
            "5": node("CLIPTextEncode", clip=["2", 0], text=""),
            "6": node("EmptyHunyuanLatentVideo", width=shapes.SIZE, height=shapes.SIZE, length=1, batch_size=1),
            "7": node("KSampler", model=["1", 0], positive=["4", 0], negative=["5", 0], latent_image=["6", 0], seed=SEED, steps=STEPS,
                      cfg=3.0, sampler_name="euler", scheduler="simple", denoise=1.0),
            "8": node("VAEDecode", samples=["7", 0], vae=["3", 0]),
            "9": node("PreviewImage", images=["8", 0]),
        })  # fmt: skip
        picture = Image.open(io.BytesIO(running.view(outputs["9"]["images"][0])))
        pictures[text] = np.asarray(picture.convert("RGB"), dtype=np.float32)
    return pictures


def report(found: dict[str, Pictures], ours: Pictures) -> None:
    """Print the distance of each file's pictures from the original's, and of the pack's pictures from stock ComfyUI's."""
    print("| file | PSNR to the original's pictures, mean and least |\n|---|---|")
    for name, pictures in found.items():
        to_original = [psnr(picture, found["original"][text]) for text, picture in pictures.items()]
        print(f"| {name} | {sum(to_original) / len(to_original):.1f} / {min(to_original):.1f} |", flush=True)
    print(f"the pack's loader of {COMPARED}, to stock's: {min(psnr(found[COMPARED][text], picture) for text, picture in ours.items()):.1f} dB")


def psnr(picture: np.ndarray, other: np.ndarray) -> float:
    """The peak signal-to-noise ratio of two pictures of 8 bits, dB."""
    difference = float(np.square(picture - other).mean())
    return 10 * np.log10(255**2 / difference) if difference else float("inf")


def sheet(found: dict[str, Pictures]) -> Image.Image:
    """Original, int8, w6a8, w4a8: to nearest, what differs, calibrated, what differs."""
    text = next(iter(found["original"]))
    original = found["original"][text]
    rows = []
    for rounding in ("nearest", "calibrated"):
        drawn = [original, *(found[f"{storage}, {rounding}"][text] for storage in STORAGES)]
        rows += [np.hstack(drawn), np.hstack([(128 + AMPLIFIED * (picture - original)).clip(0, 255) for picture in drawn])]
    return Image.fromarray(np.vstack(rows).astype(np.uint8))


if __name__ == "__main__":
    main()
