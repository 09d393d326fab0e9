"""Every shared workflow opens as ComfyUI's template browser needs it; those of Wan 2.1 draw what they are asked for.

`test_family_workflows.py` runs those of other models.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from setup.comfyui_server import MODEL_FOLDERS, Server
from setup.workflow import ask_for, bypass, shrink, small_file, substitute_files, to_prompt
from support import shapes

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).absolute().parents[3]
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
NUMBERED = [path for path in WORKFLOWS if re.match(r"Halfsafe \d - ", path.stem)]
LOADERS = ("model_name", "unet_name")
WIDEST = 1760  # graph units: ComfyUI fits them into three quarters of a page, and draws text from a scale of 0.571 on: 1,366 pixels do
ASKED = shapes.Shape("blue", "star", "pink")
GUARDS = ("HalfsafeNaNGuard", "HalfsafeGuardVAE")
OVERFLOWING = "shapes_overflowing.safetensors"


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def named(stem: str) -> dict:
    return load(WORKFLOWS[0].with_name(f"{stem}.json"))


@pytest.fixture(scope="module")
def studio(server: Server, small_models: Path) -> Server:
    """The server with the tiny trained model, and its twin that overflows in fp16."""
    shutil.copy(shapes.MODEL, small_models / "diffusion_models")
    shutil.copy(shapes.VAE, small_models / "vae")
    shapes.write_overflowing(shapes.MODEL, small_models / "diffusion_models" / OVERFLOWING)
    return server


def draw(server: Server, workflow: dict, overflowing: bool = False) -> list[bytes]:
    """The pictures a workflow saves when asked for the shape."""
    info = server.object_info()

    def choose(name: str, wanted: str) -> str | None:
        return OVERFLOWING if overflowing and name in LOADERS else small_file(name, wanted)

    prompt = ask_for(substitute_files(to_prompt(workflow, info), info, choose), ASKED.prompt())
    outputs = server.prompt(shrink(prompt, width=shapes.SIZE, height=shapes.SIZE, steps=12), timeout=300)
    saved = [image for result in outputs.values() for image in result.get("images", []) if image["type"] == "output"]
    return [server.view(image) for image in saved]


def test_titles_are_numbered_and_sort_by_what_to_open_first() -> None:
    stems = [path.stem for path in WORKFLOWS]
    assert [path.stem[9] for path in NUMBERED] == list("123456789")
    assert all(re.match(r"Halfsafe (\d - |with )\w", stem) for stem in stems)
    assert stems == sorted(stems, key=str.lower) and stems[: len(NUMBERED)] == [path.stem for path in NUMBERED]


def test_workflows_are_those_of_their_script(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "assets"), *sys.path])
    made = importlib.import_module("workflows").made(server.object_info())
    assert json.loads(json.dumps(made)) == {path.stem: load(path) for path in WORKFLOWS}, "run scripts/assets/workflows.py"


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_workflow_draws_what_it_is_asked_for(path: Path, studio: Server) -> None:
    pictures = draw(studio, load(path))
    assert pictures, f"{path.name} saved no picture"
    assert [shapes.read_picture(picture) for picture in pictures] == [ASKED] * len(pictures)


def test_overflowing_model_is_black_in_fp16_without_guards(studio: Server) -> None:
    (picture,) = draw(studio, bypass(named("Halfsafe 2 - Find the layer that turns black"), GUARDS), overflowing=True)
    assert shapes.read_picture(picture) is None
    assert not shapes.pixels_of(picture).any()


@pytest.mark.parametrize("stem", ["Halfsafe 4 - Old GPU without bf16", "Halfsafe 1 - Fix black images"])
def test_overflowing_model_is_rescued(stem: str, studio: Server) -> None:
    (picture,) = draw(studio, named(stem), overflowing=True)
    assert shapes.read_picture(picture) == ASKED


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_the_slots_of_this_comfyui(path: Path, server: Server) -> None:
    info = server.object_info()
    for node in load(path)["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        definition = info[node["type"]]
        declared = definition["input"].get("required", {}) | definition["input"].get("optional", {})
        for slot in node["inputs"]:
            assert slot["name"] in declared, f"{node['type']} has no input {slot['name']}"
        slots = [(slot["type"], slot["name"]) for slot in node["outputs"]]
        assert slots == list(zip(definition["output"], definition["output_name"], strict=True))[: len(slots)], node["type"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_file_that_a_workflow_names_can_be_downloaded_from_the_page(path: Path) -> None:
    for node in load(path)["nodes"]:
        named = {value for value in node["widgets_values"] if isinstance(value, str) and value.endswith(".safetensors")}
        offered = {model["name"]: model for model in node["properties"].get("models", [])}
        assert set(offered) == named, node["type"]
        for name, model in offered.items():
            assert re.fullmatch(rf"https://huggingface\.co/[\w./-]+/resolve/main/[\w./-]*{re.escape(name)}", model["url"])
            assert model["directory"] in MODEL_FOLDERS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nodes_say_which_pack_to_install(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packs = {(n["type"].startswith("Halfsafe"), n["properties"].get("cnr_id")) for n in load(path)["nodes"] if n["type"] != "MarkdownNote"}
    assert packs == {(True, project["name"]), (False, "comfy-core")}
    assert {n["properties"]["ver"] for n in load(path)["nodes"] if n["type"].startswith("Halfsafe")} == {project["version"]}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_readable_when_opened(path: Path) -> None:
    nodes = load(path)["nodes"]
    left, right = min(node["pos"][0] for node in nodes), max(node["pos"][0] + node["size"][0] for node in nodes)
    assert right - left <= WIDEST
    (note,) = [node for node in nodes if node["type"] == "MarkdownNote"]
    assert note["title"] == "Read me" and note["pos"][0] == left


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_nodes_do_not_overlap(path: Path) -> None:
    boxes = [(*node["pos"], *node["size"], node["type"]) for node in load(path)["nodes"]]
    for index, (ax, ay, aw, ah, a) in enumerate(boxes):
        for bx, by, bw, bh, b in boxes[index + 1 :]:
            apart = ax + aw <= bx or bx + bw <= ax or ay + ah <= by - 30 or by + bh <= ay - 30
            assert apart, f"{a} and {b} overlap"
