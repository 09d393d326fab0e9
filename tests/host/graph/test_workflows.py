"""Every shared workflow opens as ComfyUI's template browser needs it; the numbered ones and *Show me* draw what they should.

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
from setup.workflow import node as api_node
from support import shapes

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).absolute().parents[3]
SHOW_ME = ROOT / "web" / "show_me.json"
BUILT_IN = {path.name for path in (ROOT / "builtin_model").glob("*/*.safetensors")}
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
NUMBERED = [path for path in WORKFLOWS if re.match(r"Halfsafe \d - ", path.stem)]
OF_THE_PACK = [path for path in NUMBERED if path.stem[9] in "124"]
OF_WAN = [path for path in NUMBERED if path.stem[9] in "358"]
WIDEST, HIGHEST = (
    1020,
    640,
)  # graph units: a page of 1,366 x 768 pixels shows them at scale 1 between its bars and its map, in the view that the pack sets
MAP = (973, 391)  # from where on the page's map covers what is at the bottom right then
SEEN = ("SaveImage", "SaveVideo", "PreviewImage", "HalfsafeReport", "HalfsafeCompareImages")
ASKED = shapes.Shape("blue", "star", "pink")
HEART = shapes.Shape("red", "heart")
GUARDS = ("HalfsafeNaNGuard", "HalfsafeGuardVAE")


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def height(node: dict) -> int:
    """Of what is drawn below a node's title."""
    return 0 if node["flags"].get("collapsed") else node["size"][1]


def named(stem: str) -> dict:
    return load(WORKFLOWS[0].with_name(f"{stem}.json"))


@pytest.fixture(scope="module")
def studio(server: Server, small_models: Path) -> Server:
    """The server with the tiny trained model."""
    shutil.copy(shapes.MODEL, small_models / "diffusion_models")
    shutil.copy(shapes.VAE, small_models / "vae")
    return server


def pictures_of(server: Server, prompt: dict) -> list[bytes]:
    """The pictures that a prompt saves, in the order of their nodes."""
    outputs = server.prompt(prompt, timeout=300)
    saved = [
        image
        for node_id in sorted(outputs, key=int)
        for image in outputs[node_id].get("images", [])
        if image["type"] == "output"
    ]
    return [server.view(image) for image in saved]


def draw(server: Server, workflow: dict) -> list[bytes]:
    """The pictures a workflow saves when asked for the shape; a measurement has two candidates."""
    info = server.object_info()
    prompt = ask_for(substitute_files(to_prompt(workflow, info), info, small_file), ASKED.prompt())
    for one in prompt.values():
        if "candidates" in one["inputs"]:
            one["inputs"]["candidates"] = "\n".join(one["inputs"]["candidates"].splitlines()[:2])
    return pictures_of(server, shrink(prompt, width=shapes.SIZE, height=shapes.SIZE, steps=12))


def seen(picture: bytes) -> shapes.Shape | None:
    """What a picture shows; None is black to the last pixel."""
    shape = shapes.read_picture(picture)
    assert shape or not shapes.pixels_of(picture).any()
    return shape


def test_titles_are_numbered_and_sort_by_what_to_open_first() -> None:
    stems = [path.stem for path in WORKFLOWS]
    assert [path.stem[9] for path in NUMBERED] == list("123456789")
    assert all(re.match(r"Halfsafe (\d - |with )\w", stem) for stem in stems)
    assert stems == sorted(stems, key=str.lower) and stems[: len(NUMBERED)] == [path.stem for path in NUMBERED]


def test_workflows_are_those_of_their_script(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "assets"), *sys.path])
    show_me = importlib.import_module("show_me")
    monkeypatch.setattr(show_me, "TARGET", tmp_path / "show_me.json")
    show_me.main()
    assert load(show_me.TARGET) == load(SHOW_ME), "run scripts/assets/show_me.py"
    script = importlib.import_module("workflows")
    assert json.loads(json.dumps(script.block(server.object_info()))) == load(
        ROOT / "subgraphs" / f"{script.BLOCK}.json"
    ), "run scripts/assets/workflows.py"
    assert json.loads(json.dumps(script.made(server.object_info()))) == {path.stem: load(path) for path in WORKFLOWS}, (
        "run scripts/assets/workflows.py"
    )


@pytest.mark.parametrize("path", OF_WAN, ids=lambda path: path.stem)
def test_workflow_draws_what_it_is_asked_for(path: Path, studio: Server) -> None:
    pictures = draw(studio, load(path))
    assert pictures, f"{path.name} saved no picture"
    assert [shapes.read_picture(picture) for picture in pictures] == [ASKED] * len(pictures)


@pytest.mark.parametrize("path", OF_THE_PACK, ids=lambda path: path.stem)
def test_workflow_of_the_built_in_model_runs_as_it_is_and_downloads_nothing(path: Path, server: Server) -> None:
    pictures = [seen(picture) for picture in pictures_of(server, to_prompt(load(path), server.object_info()))]
    assert pictures == ([None, HEART] if path.stem[9] == "1" else [HEART])


def test_without_guards_or_in_fp16_the_built_in_model_is_black(server: Server) -> None:
    """Workflow 2 with its guards bypassed, workflow 4 with its loader set to fp16."""
    info = server.object_info()
    unguarded = to_prompt(bypass(named("Halfsafe 2 - Find the layer that turns black"), GUARDS), info)
    in_fp16 = to_prompt(named("Halfsafe 4 - Old GPU without bf16"), info)
    next(step["inputs"] for step in in_fp16.values() if step["class_type"] == "HalfsafeLoadDiffusionModel")[
        "compute"
    ] = "fp16"
    for prompt in (unguarded, in_fp16):
        assert [seen(picture) for picture in pictures_of(server, prompt)] == [None]


def unpacked(graph: dict) -> dict:
    """A graph with one subgraph, as a workflow without."""
    (inner,) = graph["definitions"]["subgraphs"]
    (node,) = [one for one in graph["nodes"] if one["type"] == inner["id"]]
    within = [
        [one["id"], one["origin_id"], one["origin_slot"], one["target_id"], one["target_slot"], one["type"]]
        for one in inner["links"]
    ]
    given = {slot: link[1:3] for link in graph["links"] for slot in [link[4]] if link[3] == node["id"]}
    drawn = {link[4]: link[1:3] for link in within if link[3] == inner["outputNode"]["id"]}
    joined = [
        [100 + link[0], *(given[link[2]] if link[1] == inner["inputNode"]["id"] else link[1:3]), *link[3:]]
        for link in within
    ]
    outer = [[link[0], *(drawn[link[2]] if link[1] == node["id"] else link[1:3]), *link[3:]] for link in graph["links"]]
    parts = [
        {**one, "inputs": [{**slot, "link": slot["link"] and 100 + slot["link"]} for slot in one["inputs"]]}
        for one in inner["nodes"]
    ]
    return {**graph, "nodes": [one for one in graph["nodes"] if one is not node] + parts, "links": outer + joined}


def test_show_me_draws_a_black_picture_and_one_that_the_guard_repaired(server: Server) -> None:
    graph = load(SHOW_ME)
    prompt = to_prompt(unpacked(graph), server.object_info())
    guard = next(number for number, one in prompt.items() if one["class_type"] == "HalfsafeAutoPrecision")
    latent = next(
        number
        for number, one in prompt.items()
        if one["class_type"] == "KSampler" and one["inputs"]["model"][0] == guard
    )
    prompt["98"] = api_node("HalfsafeReport", model=[guard, 0], after=[latent, 0])
    prompt["99"] = api_node("PreviewAny", source=["98", 1])
    outputs = server.prompt(prompt, timeout=300)
    shown = {
        one["title"]: outputs[str(one["id"])]["images"][0] for one in graph["nodes"] if one["type"] == "PreviewImage"
    }
    assert {title: seen(server.view(image)) for title, image in shown.items()} == {
        "As it is": None,
        "Through Halfsafe": HEART,
    }
    report = json.loads(outputs["99"]["text"][0])
    assert (
        report["guard"]["verdict"] == "clean"
        and "not in the fp16 that the model was set to" in report["decisions"]["instead"]
    )


def test_show_me_has_two_large_pictures_first_and_says_which_pack_to_install() -> None:
    graph = load(SHOW_ME)
    pictures = [one for one in graph["nodes"] if one["type"] == "PreviewImage"]
    assert [one["pos"][1] for one in pictures] == [0, 0] and all(min(one["size"]) >= 300 for one in pictures)
    left = min(one["pos"][0] for one in pictures)
    assert all(
        one["pos"][0] + one["size"][0] < left or one["pos"][1] > 340 for one in graph["nodes"] if one not in pictures
    )
    (inner,) = graph["definitions"]["subgraphs"]
    assert all(one["properties"].get("cnr_id") for one in graph["nodes"] + inner["nodes"] if one["type"] != inner["id"])


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
        assert slots == list(zip(definition["output"], definition["output_name"], strict=True))[: len(slots)], node[
            "type"
        ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_file_that_a_workflow_names_can_be_downloaded_from_the_page(path: Path) -> None:
    for node in load(path)["nodes"]:
        named = {
            value for value in node["widgets_values"] if isinstance(value, str) and value.endswith(".safetensors")
        } - BUILT_IN
        offered = {model["name"]: model for model in node["properties"].get("models", [])}
        assert set(offered) == named, node["type"]
        for name, model in offered.items():
            assert re.fullmatch(
                rf"https://huggingface\.co/[\w./-]+/resolve/main/[\w./-]*{re.escape(name)}", model["url"]
            )
            assert model["directory"] in MODEL_FOLDERS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nodes_say_which_pack_to_install(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packs = {
        (n["type"].startswith("Halfsafe"), n["properties"].get("cnr_id"))
        for n in load(path)["nodes"]
        if n["type"] != "MarkdownNote"
    }
    assert packs == {(True, project["name"]), (False, "comfy-core")}
    assert {n["properties"]["ver"] for n in load(path)["nodes"] if n["type"].startswith("Halfsafe")} == {
        project["version"]
    }


def test_a_workflow_that_needs_a_newer_comfyui_says_so() -> None:
    needed = {}
    for path in WORKFLOWS:
        note, *nodes = load(path)["nodes"]
        versions = {node["properties"]["ver"] for node in nodes if node["properties"]["cnr_id"] == "comfy-core"} - {
            "0.29.0"
        }
        assert [f"ComfyUI {version} or newer" for version in versions if version not in note["widgets_values"][0]] == []
        needed |= {node["type"]: node["properties"]["ver"] for node in nodes if node["properties"]["ver"] in versions}
    assert needed == {"TextEncodeQwenImage21": "0.37.2", "QwenImage21Cache": "0.37.2"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_readable_when_opened(path: Path) -> None:
    nodes = load(path)["nodes"]
    left, right = min(node["pos"][0] for node in nodes), max(node["pos"][0] + node["size"][0] for node in nodes)
    assert right - left <= WIDEST and max(node["pos"][1] + height(node) for node in nodes) + 30 <= HIGHEST
    for node in nodes:
        if node["type"] in SEEN:
            assert node["size"][0] >= 250 and node["size"][1] >= 220, node["type"]
            assert node["pos"][0] + node["size"][0] <= MAP[0] or node["pos"][1] + height(node) <= MAP[1], node["type"]
    (note,) = [node for node in nodes if node["type"] == "MarkdownNote"]
    assert note["title"] == "Read me" and note["pos"][0] == left


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_nodes_do_not_overlap(path: Path) -> None:
    boxes = [(*node["pos"], node["size"][0], height(node), node["type"]) for node in load(path)["nodes"]]
    for index, (ax, ay, aw, ah, a) in enumerate(boxes):
        for bx, by, bw, bh, b in boxes[index + 1 :]:
            apart = ax + aw <= bx or bx + bw <= ax or ay + ah <= by - 30 or by + bh <= ay - 30
            assert apart, f"{a} and {b} overlap"
