"""Draw the thumbnails of the workflows and the pictures of the README with the shapes model, in a real ComfyUI.

    COMFYUI_DIR=<folder> .venv/bin/python scripts/assets/pictures.py

`page_pictures.py` beside it takes the README's pictures of ComfyUI's page.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import thumbnails  # noqa: E402
from setup.comfyui_server import Server, make_base_directory  # noqa: E402
from setup.workflow import ask_for, bypass, shrink, small_file, substitute_files, to_prompt, written_back  # noqa: E402
from support import shapes, tiny_models  # noqa: E402

IMAGES = ROOT / "docs" / "images"
GUARDS = ("HalfsafeNaNGuard", "HalfsafeGuardVAE")
SIZE = {"width": shapes.SIZE, "height": shapes.SIZE, "steps": 16}
FIND, OLD_GPU = "Halfsafe 2 - Find the layer that turns black", "Halfsafe 4 - Old GPU without bf16"
SHOWN = (
    "a red circle", "a blue square", "a green triangle", "a yellow star on a black background",
    "a blue star on a pink background", "an orange cross on a grey background", "a yellow circle on a grey background",
    "a green square on a black background", "a purple heart on a pink background", "a red square on a black background",
)  # fmt: skip
SKETCHES = {
    "5": lambda: thumbnails.bars("which is fastest here?", (("fp32", 1.0, thumbnails.BAD), ("bf16", 0.6, thumbnails.COOL), ("fp8", 0.5, thumbnails.COOL), ("int8", 0.33, thumbnails.GOOD))),
    "6": lambda: thumbnails.chain("MiniMax H3", "on an RTX 20 or V100"),
    "7": lambda: thumbnails.chain("Qwen-Image 2.1", "without bf16"),
    "8": lambda: thumbnails.bars("int8, closer to the original", (("nearest", 1.0, thumbnails.BAD), ("calibrated", 0.6, thumbnails.GOOD))),
    "9": lambda: thumbnails.chain("Z-Image", "in int8, with a LoRA"),
}  # fmt: skip


@dataclass(frozen=True)
class Studio:
    """A running server and what its nodes are."""

    server: Server
    info: dict

    def draw(self, name: str, text: str = "", bypassed: tuple[str, ...] = (), **changes) -> list[bytes]:
        """The pictures a workflow saves, then those it previews; `changes` are set on the loader of the model."""
        outputs = self.server.prompt(self._prepare(name, text, bypassed, changes)[1])
        images = [image for node_id in sorted(outputs, key=int) for image in outputs[node_id].get("images", [])]
        return [self.server.view(image) for image in sorted(images, key=lambda image: image["type"] != "output")]

    def workflow(self, name: str, text: str = "", **changes) -> dict:
        """The workflow that `draw` runs, for the page to open."""
        workflow, prompt = self._prepare(name, text, (), changes)
        return written_back(workflow, self.info, prompt)

    def _prepare(self, name: str, text: str, bypassed: tuple[str, ...], changes: dict) -> tuple[dict, dict]:
        """Without a text a workflow stays as it is: one of the built-in model draws a red heart whatever is asked for."""
        workflow = bypass(json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8")), bypassed)
        prompt = substitute_files(to_prompt(workflow, self.info), self.info, small_file)
        for node in prompt.values():
            if "model_name" in node["inputs"]:
                node["inputs"] |= changes
        return workflow, shrink(ask_for(prompt, text), **SIZE) if text else prompt


def main() -> None:
    with open_studio() as studio:
        _thumbnails(studio)
        _readme(studio)


@contextlib.contextmanager
def open_studio(pack_name: str = "Halfsafe-Pack", extra_args: Iterable[str] = ()) -> Iterator[Studio]:
    """A ComfyUI with this pack and the shapes model."""
    with tempfile.TemporaryDirectory() as folder:
        base = make_base_directory(Path(folder), ROOT, pack_name)
        models = base / "models"
        (models / "diffusion_models" / shapes.MODEL.name).symlink_to(shapes.MODEL)
        (models / "vae" / shapes.VAE.name).symlink_to(shapes.VAE)
        tiny_models.clip_l(models / "text_encoders" / "clip_l.safetensors")
        with Server(Path(os.environ["COMFYUI_DIR"]), base, extra_args) as server:
            yield Studio(server, server.object_info())


def _thumbnails(studio: Studio) -> None:
    for path in sorted((ROOT / "workflows").glob("*.json")):
        target = path.with_suffix(".jpg")
        _thumbnail(studio, path.stem).save(target, quality=88, optimize=True, progressive=True)
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes", flush=True)


def _thumbnail(studio: Studio, title: str) -> shapes.Image.Image:
    """What a workflow shows; what it measures or connects is a sketch."""
    _, number, *_ = title.split(" ")
    if number == "with":
        return thumbnails.chain(title.removeprefix("Halfsafe with "))
    if number in SKETCHES:
        return SKETCHES[number]()
    if number == "3":
        kept = [
            studio.draw(title, SHOWN[4], storage=storage, compute="bf16")[0] for storage in ("as_file", "fp8_e4m3fn")
        ]
        return thumbnails.pictures(list(zip(kept, ("16 bits", "8 bits: half"), strict=True)))
    captions = {"1": ("black", "with Halfsafe"), "2": ("which layer?", "found"), "4": ("fp16", "fp16_safe")}[number]
    return thumbnails.pictures(list(zip((_black(studio), studio.draw(title)[-1]), captions, strict=True)))


def _black(studio: Studio) -> bytes:
    return studio.draw(FIND, "", GUARDS)[0]


def _readme(studio: Studio) -> None:
    grid = [
        studio.draw("Halfsafe 3 - Half the memory", text, storage=storage, compute=compute)[0]
        for storage, compute in (("as_file", "bf16"), ("fp8_e4m3fn", "bf16"))
        for text in SHOWN
    ]
    _save(IMAGES / "shapes.jpg", grid, len(SHOWN), 1)
    story = [_black(studio), studio.draw(FIND)[0], studio.draw(OLD_GPU)[0]]
    _save(IMAGES / "rescue.jpg", story, 3, 5 / 6)


def _save(path: Path, pictures: list[bytes], columns: int, factor: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet = shapes.side_by_side(pictures, columns)
    enlarged = sheet.resize(
        (round(sheet.width * factor), round(sheet.height * factor)), shapes.Image.Resampling.LANCZOS
    )
    enlarged.save(path, quality=88)
    print(f"{path.relative_to(ROOT)}: {enlarged.width} x {enlarged.height}, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
