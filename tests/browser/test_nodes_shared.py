"""A workflow with the pack's nodes where the pack is absent: the page knows whose they are. And the block of the node library."""

from __future__ import annotations

import uuid
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
BLOCK = "Halfsafe int8 loader"
TITLES = """() => Object.fromEntries(app.graph.nodes.filter(({ type }) => type.startsWith("Halfsafe")).map(({ type, title }) => [type, title]))"""
FACE = """() => app.graph.nodes.map(({ title, widgets }) => [title, ...(widgets ?? []).map(({ name, value }) => [name, value])])"""
CHOOSE = """([file, storage]) => { const [node] = app.graph.nodes;
    for (const [name, value] of Object.entries({ model_name: file, storage })) node.widgets.find((one) => one.name === name).value = value; }"""
LOADED = """async () => Object.values((await app.graphToPrompt()).output).filter(({ class_type }) => class_type === "HalfsafeLoadDiffusionModel")
    .map(({ inputs }) => [inputs.model_name, inputs.storage])"""


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


BARE = """{ const asked = window.fetch, without = { "/object_info": (nodes) => Object.fromEntries(Object.entries(nodes).filter(([name]) => !name.startsWith("Halfsafe"))),
        "/extensions": (files) => files.filter((file) => !file.startsWith("/extensions/Halfsafe-Pack/")) };
    window.fetch = async (...given) => { const answer = await asked(...given), keep = without[new URL(answer.url).pathname.replace("/api/", "/")];
        return keep && answer.ok ? new Response(JSON.stringify(keep(await answer.json())), { headers: answer.headers }) : answer; }; }"""
"""A page that is told of no node and no file of the pack, as by a ComfyUI without it."""


@pytest.fixture
def without_the_pack(browser, server: Server, vue: bool):
    context = browser.new_context(viewport=VIEW)
    bare = ComfyPage(context, server, vue)
    bare.page.add_init_script(BARE)
    yield bare.open()
    context.close()


@pytest.mark.once  # what the page finds in the file
def test_where_the_pack_is_absent_the_page_offers_it(comfy: ComfyPage, without_the_pack: ComfyPage) -> None:
    workflow = shared(comfy)
    has_pack = "() => Object.keys(LiteGraph.registered_node_types).some((type) => type.startsWith('Halfsafe')) || app.extensions.some(({ name }) => /halfsafe/i.test(name))"
    assert (comfy.evaluate(has_pack), without_the_pack.evaluate(has_pack)) == (True, False)
    ours = sorted([node["type"], "halfsafe"] for node in workflow["nodes"] if node["type"].startswith("Halfsafe"))
    without_the_pack.evaluate("async (workflow) => { await app.loadGraphData(workflow); }", workflow)
    assert without_the_pack.found(MISSING, ours) == ours
    titles = without_the_pack.evaluate(TITLES)
    assert titles["HalfsafeAutoPrecision"] == "Halfsafe", "not the name of its class"


def drag_from_library(comfy: ComfyPage, name: str) -> None:
    """Drag a block from the page's node library onto the empty canvas: the page gives the nodes inside ids that are free."""
    comfy.load({"id": str(uuid.uuid4()), "nodes": [], "links": [], "version": 0.4})
    comfy.evaluate("() => { app.extensionManager.sidebarTab.activeSidebarTabId = 'node-library'; }")
    comfy.page.locator("[class*=sidebar] input").first.fill(name)
    entry = comfy.page.get_by_text(name).first
    entry.hover()
    comfy.page.mouse.down()
    for x in (500, 700, 900):
        comfy.page.mouse.move(x, 400)
    comfy.page.mouse.up()
    comfy.page.wait_for_function("() => app.graph.nodes.length")


@pytest.mark.drawn
def test_the_block_has_its_file_and_storage_on_its_face(comfy: ComfyPage) -> None:
    """The first file of the list; what is chosen on the face runs, and is kept in a file."""
    comfy.evaluate("async () => { await app.refreshComboInNodes(); }")  # files came since the page was opened
    drag_from_library(comfy, BLOCK)
    listed = comfy.evaluate("async () => (await fetch('/object_info/HalfsafeLoadDiffusionModel')).json()")
    first, *_, last = listed["HalfsafeLoadDiffusionModel"]["input"]["required"]["model_name"][1]["options"]
    for file, storage in ((first, "int8"), (last, "fp8_e4m3fn")):
        face = [[BLOCK, ["model_name", file], ["storage", storage]]]
        assert comfy.found(FACE, face) == face, "on the face"
        assert comfy.evaluate(LOADED) == [[file, storage]], "in the run"
        comfy.load(comfy.saved())
        assert comfy.evaluate(FACE) == face, "after saving and opening"
        comfy.evaluate(CHOOSE, [last, "fp8_e4m3fn"])
