"""A workflow with the pack's nodes where the pack is absent: the page knows whose they are. And the block of the node library."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from browser.comfy_page import VIEW, ComfyPage
from browser.test_measure import SMALL, draw
from setup.comfyui_server import Server

PROJECT = Path(__file__).absolute().parents[2] / "pyproject.toml"
BUTTONS = """async () => { const { api } = await import("/scripts/api.js"), from = (file) => import(`/extensions/Halfsafe-Pack/${file}.mjs`);
    await (await from("guard")).guardWorkflow(app); await (await from("memory")).halveMemory(app, api); await (await from("measure")).measureWorkflow(app); }"""
MISSING = """() => [...document.querySelector("#vue-app").__vue_app__.config.globalProperties.$pinia._s.get("missingNodesError").missingNodesError.nodeTypes]
    .map(({ type, cnrId }) => [type, cnrId]).sort()"""
TITLES = """() => Object.fromEntries(app.graph.nodes.filter(({ type }) => type.startsWith("Halfsafe")).map(({ type, title }) => [type, title]))"""
PUT_BLOCK = """async () => { const store = document.querySelector("#vue-app").__vue_app__.config.globalProperties.$pinia._s;
    const { name } = [...store.get("nodeDef").visibleNodeDefs].find((one) => one.display_name === "Halfsafe int8 loader"), block = store.get("subgraph").getBlueprint(name);
    app.graph.clear(); app.canvas._deserializeItems({ nodes: block.nodes, subgraphs: block.definitions.subgraphs, links: [], groups: [], reroutes: [] }, { position: [100, 100] });
    for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
    return [app.graph.nodes[0].title, Object.values((await app.graphToPrompt()).output)]; }"""


def shared(comfy: ComfyPage) -> dict:
    """A workflow with what each button puts in, as the page saves it."""
    draw(comfy, SMALL)
    comfy.evaluate(BUTTONS)
    return comfy.saved()


def test_nodes_of_the_buttons_have_the_packs_id_and_a_title(comfy: ComfyPage) -> None:
    project = PROJECT.read_text(encoding="utf-8")
    name, version = (project.split(f'\n{key} = "')[1].split('"')[0] for key in ("name", "version"))
    ours = {node["type"]: node for node in shared(comfy)["nodes"] if node["type"].startswith("Halfsafe")}
    assert ours.keys() >= {
        "HalfsafeAutoPrecision",
        "HalfsafeLoadDiffusionModel",
        "HalfsafeLoadCLIP",
        "HalfsafeMeasurePrecisions",
    }
    assert {(node["properties"]["cnr_id"], node["properties"]["ver"]) for node in ours.values()} == {(name, version)}
    assert all(node["title"] for node in ours.values()), "the page leaves out a title that is the type's own"


AS_IF_OPENED_IN_CHINESE = """(type) => { const { title } = LiteGraph.registered_node_types[type], chinese = "\u5b9e\u6d4b\u5404\u79cd\u7cbe\u5ea6\uff08Halfsafe\uff09";
    const opened = (title) => { const node = LiteGraph.createNode(type); node.configure({ ...node.serialize(), title }); return node; };
    try { LiteGraph.registered_node_types[type].title = chinese;
        return [opened(title).title, opened("Mine").title, opened(title).serialize().title].map((given) => given.replace(chinese, "in Chinese")); }
    finally { LiteGraph.registered_node_types[type].title = title; } }"""
"""The page calls a type by the language that it was opened in."""


def test_a_title_is_saved_in_english_and_read_in_the_language_of_the_page(comfy: ComfyPage) -> None:
    """English may be read where no language of the pack's is."""
    found = comfy.evaluate(AS_IF_OPENED_IN_CHINESE, "HalfsafeMeasurePrecisions")
    assert found == ["in Chinese", "Mine", "Measure Precisions (Halfsafe)"]


@pytest.fixture(scope="module")
def without_the_pack(browser, small_models: Path, server: Server, vue: bool, tmp_path_factory: pytest.TempPathFactory):
    """A page of the same version on a ComfyUI without any pack."""
    base = tmp_path_factory.mktemp("bare")
    for name in ("custom_nodes", "input", "output", "temp", "user"):
        (base / name).mkdir()
    with Server(os.environ["COMFYUI_DIR"], base, server.extra_args) as bare:
        context = browser.new_context(viewport=VIEW)
        yield ComfyPage(context, bare, vue).open()
        context.close()


@pytest.mark.once  # what the page finds in the file
def test_where_the_pack_is_absent_the_page_offers_it(comfy: ComfyPage, without_the_pack: ComfyPage) -> None:
    workflow = shared(comfy)
    ours = sorted([node["type"], "halfsafe"] for node in workflow["nodes"] if node["type"].startswith("Halfsafe"))
    without_the_pack.evaluate("async (workflow) => { await app.loadGraphData(workflow); }", workflow)
    assert without_the_pack.found(MISSING, ours) == ours
    titles = without_the_pack.evaluate(TITLES)
    assert titles["HalfsafeAutoPrecision"] == "Halfsafe", "not the name of its class"


def test_the_block_takes_the_first_file_of_the_list(comfy: ComfyPage) -> None:
    comfy.open()  # the pinned page gives a new node the values of one that had its id
    title, steps = comfy.evaluate(PUT_BLOCK)
    listed = comfy.evaluate("async () => (await fetch('/object_info/HalfsafeLoadDiffusionModel')).json()")
    first = listed["HalfsafeLoadDiffusionModel"]["input"]["required"]["model_name"][1]["options"][0]
    (loader,) = [step["inputs"] for step in steps if step["class_type"] == "HalfsafeLoadDiffusionModel"]
    assert title == "Halfsafe int8 loader" and (loader["model_name"], loader["storage"]) == (first, "int8"), json.dumps(
        steps
    )
