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

from setup.comfyui_server import Server, make_base_directory  # noqa: E402
from setup.workflow import ask_for, bypass, shrink, small_file, substitute_files, to_prompt, written_back  # noqa: E402
from support import shapes, tiny_models  # noqa: E402

IMAGES = ROOT / "docs" / "images"
OVERFLOWING = "shapes_overflowing.safetensors"
GUARDS = ("HalfsafeNaNGuard", "HalfsafeGuardVAE")
SIZE = {"width": shapes.SIZE, "height": shapes.SIZE, "steps": 16}
SHOWN = (
    "a red circle", "a blue square", "a green triangle", "a yellow star on a black background",
    "a blue star on a pink background", "an orange cross on a grey background", "a yellow circle on a grey background",
    "a green square on a black background", "a purple heart on a pink background", "a red square on a black background",
)  # fmt: skip
THUMBNAILS = {
    "quick-fp8": ["a blue star on a pink background"],
    "old-gpu-without-bf16": ["a yellow star on a black background"],
    "ampere-accumulation": ["a blue circle on a grey background"],
    "analyse-and-save-fp8": ["a green triangle"],
    "calibrate-and-save": ["an orange heart"],
    "everything-automatic": [SHOWN[0], SHOWN[1], SHOWN[3], SHOWN[4]],
    "fp8-against-the-original": ["an orange cross on a grey background"],
    "which-precision": ["a purple heart on a pink background"],
}


@dataclass(frozen=True)
class Studio:
    """A running server and what its nodes are."""

    server: Server
    info: dict

    def draw(self, name: str, text: str, overflowing: bool = False, bypassed: tuple[str, ...] = (), **changes) -> list[bytes]:
        """The pictures a workflow saves, then those it previews; `changes` are set on the loader of the model."""
        outputs = self.server.prompt(self._prepare(name, text, overflowing, bypassed, changes)[1])
        images = [image for node_id in sorted(outputs, key=int) for image in outputs[node_id].get("images", [])]
        return [self.server.view(image) for image in sorted(images, key=lambda image: image["type"] != "output")]

    def workflow(self, name: str, text: str, overflowing: bool = False, **changes) -> dict:
        """The workflow that `draw` runs, for the page to open."""
        workflow, prompt = self._prepare(name, text, overflowing, (), changes)
        return written_back(workflow, self.info, prompt)

    def _prepare(self, name: str, text: str, overflowing: bool, bypassed: tuple[str, ...], changes: dict) -> tuple[dict, dict]:
        def choose(field: str, wanted: str) -> str | None:
            return OVERFLOWING if overflowing and field == "model_name" else small_file(field, wanted)

        workflow = bypass(json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8")), bypassed)
        prompt = ask_for(substitute_files(to_prompt(workflow, self.info), self.info, choose), text)
        for node in prompt.values():
            if "model_name" in node["inputs"]:
                node["inputs"] |= changes
        return workflow, shrink(prompt, **SIZE)


def main() -> None:
    with open_studio() as studio:
        _thumbnails(studio)
        _readme(studio)


@contextlib.contextmanager
def open_studio(pack_name: str = "Halfsafe-Pack", extra_args: Iterable[str] = ()) -> Iterator[Studio]:
    """A ComfyUI with this pack and the shapes model, as it is and so that it overflows in fp16."""
    with tempfile.TemporaryDirectory() as folder:
        base = make_base_directory(Path(folder), ROOT, pack_name)
        models = base / "models"
        (models / "diffusion_models" / shapes.MODEL.name).symlink_to(shapes.MODEL)
        (models / "vae" / shapes.VAE.name).symlink_to(shapes.VAE)
        shapes.write_overflowing(shapes.MODEL, models / "diffusion_models" / OVERFLOWING)
        tiny_models.clip_l(models / "text_encoders" / "clip_l.safetensors")
        with Server(Path(os.environ["COMFYUI_DIR"]), base, extra_args) as server:
            yield Studio(server, server.object_info())


def _thumbnails(studio: Studio) -> None:
    for name, texts in THUMBNAILS.items():
        pictures = [picture for text in texts for picture in studio.draw(name, text)[: 2 if "against" in name else 1]]
        _save(ROOT / "workflows" / f"{name}.jpg", pictures, 1 if len(pictures) == 1 else 2, 384 // min(len(pictures), 2))
    story = [studio.draw("black-image-rescue", SHOWN[0], True, bypassed)[0] for bypassed in (GUARDS, ())]
    _save(ROOT / "workflows" / "black-image-rescue.jpg", story, 2, 256)


def _readme(studio: Studio) -> None:
    grid = [
        studio.draw("quick-fp8", text, storage=storage, compute=compute)[0]
        for storage, compute in (("as_file", "bf16"), ("fp8_e4m3fn", "bf16"))
        for text in SHOWN
    ]
    _save(IMAGES / "shapes.jpg", grid, len(SHOWN), shapes.SIZE)
    asked = "a blue star on a pink background"
    story = [
        studio.draw("black-image-rescue", asked, True, GUARDS)[0],
        studio.draw("black-image-rescue", asked, True)[0],
        studio.draw("old-gpu-without-bf16", asked, True)[0],
    ]
    _save(IMAGES / "rescue.jpg", story, 3, 320)


def _save(path: Path, pictures: list[bytes], columns: int, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet = shapes.side_by_side(pictures, columns)
    factor = size / shapes.SIZE
    enlarged = sheet.resize((round(sheet.width * factor), round(sheet.height * factor)), shapes.Image.Resampling.LANCZOS)
    enlarged.save(path, quality=88)
    print(f"{path.relative_to(ROOT)}: {enlarged.width} x {enlarged.height}, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
