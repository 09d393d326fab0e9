"""What is drawn can be read: in both themes and languages, on narrow and wide pages; the template browser finds the workflows and offers their files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage
from browser.test_report import CONTRAST
from browser.test_results import SEEN, SHOWN
from halfsafe.precision.base.message import Message, messages_in

WORKFLOWS = sorted((Path(__file__).absolute().parents[2] / "workflows").glob("*.json"))
TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"
SIZES = {1366: 768, 1920: 1080, 2560: 1440}
CLIPPED = """(selector) => [...document.querySelectorAll(`${selector} *`)].filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map((e) => e.outerHTML.slice(0, 90))"""
EVENT = {
    "call": 1, "step": 3, "sigma": 0.7031, "layer": "transformer_blocks.17.attn.to_add_out", "op": "", "kind": "overflow", "batch_rows": [0],
    "from": "fp16", "to": "fp16_wide", "recovered": True, "evidence": "", "advice": "",
}  # fmt: skip
OPEN = """async (workflow) => { await app.loadGraphData(workflow, true, true, null, { openSource: "template" }); }"""
OPENED = "Halfsafe 3 - Half the memory"
SIZE = """() => { const { nodes } = app.graph, drawn = ({ id }) => document.querySelector(`.lg-node[data-node-id="${id}"]`)?.offsetHeight ?? 0;
    return [Math.max(...nodes.map((n) => n.pos[0] + n.size[0])) - Math.min(...nodes.map((n) => n.pos[0])),
        Math.max(...nodes.map((n) => n.pos[1] + Math.max(n.size[1], drawn(n)))) - Math.min(...nodes.map((n) => n.pos[1]))]; }"""
ABSENT_FILE = r"value_not_in_list: \w+: '[\w.-]+\.safetensors' not in .*"
CARDS = '[data-testid^="template-workflow-Halfsafe"]'


@pytest.mark.parametrize(
    ("theme", "language", "width"), [("light", "zh", 1366), ("dark", "zh", 1920), ("light", "en", 2560)]
)
def test_the_sidebar_and_a_message_can_be_read(
    comfy: ComfyPage, theme: str, language: str, width: int, pictures: Path, cell: str
) -> None:
    comfy.page.set_viewport_size({"width": width, "height": SIZES[width]})
    comfy.set("Comfy.ColorPalette", theme)
    comfy.speak(language)
    comfy.add("HalfsafeNaNGuard", "HalfsafeLayerRules")
    comfy.evaluate(
        "() => { const note = app.graph.nodes[1]; note.widgets.find((w) => w.name === 'rules').value = 'a storage=fp4'; note.onConfigure({}); }"
    )
    comfy.evaluate(TAB)
    comfy.page.wait_for_function("() => document.querySelector('.hs-sidebar .hs-device')?.textContent.includes('CPU')")
    comfy.send_guard(
        node_id=comfy.evaluate("() => String(app.graph.nodes[0].id)"),
        prompt_id=f"{theme}{language}{width}",
        message="Step 3: overflow.",
        event=EVENT,
    )
    comfy.page.wait_for_selector(".hs-sidebar .hs-card")
    comfy.evaluate("() => { for (const fold of document.querySelectorAll('.hs-sidebar details')) fold.open = true; }")
    comfy.page.wait_for_selector(".hs-mistake", state="attached")
    comfy.settle()
    comfy.screenshot(pictures, f"looks-{theme}-{language}-{width}-{cell}")
    assert comfy.evaluate(CLIPPED, ".hs-sidebar") == [] and comfy.evaluate(CLIPPED, ".hs-note") == []
    for selector in (".hs-sidebar *", ".hs-note *"):
        worst = comfy.evaluate(CONTRAST.replace(".hs-panel *", selector))
        assert worst["ratio"] >= 4.5, worst
    comfy.evaluate(TAB)  # closed: beside the open sidebar no message is shown
    comfy.send_guard(
        node_id=comfy.evaluate("() => String(app.graph.nodes[0].id)"),
        prompt_id=f"{theme}{language}{width}closed",
        message="Step 3: overflow.",
        event=EVENT,
    )
    message = comfy.page.locator("li[role=alert], .p-toast-message", has_text="Halfsafe: ").last.bounding_box()
    assert message["x"] >= 0 and message["x"] + message["width"] <= width


REFUSED = Message(
    "The attention of this ComfyUI does not ask Halfsafe {0}, so settings of attention have no effect. Update Halfsafe.",
    "1.3.0",
)
"""A sentence that the server adds to the device's facts, as the self-test makes it (``nodes/host/comfyui/self_test.py``)."""


def test_the_sidebar_begins_with_what_the_self_test_found(comfy: ComfyPage, pictures: Path, cell: str) -> None:
    def with_refusal(route) -> None:
        answer = route.fetch()
        route.fulfill(
            response=answer,
            json={
                **answer.json(),
                "refused": [REFUSED],
                "messages": {**answer.json()["messages"], **messages_in(REFUSED)},
            },
        )

    comfy.page.route("**/halfsafe/device", with_refusal)
    try:
        comfy.send("reconnected")
        comfy.evaluate(TAB)
        for language, begins in (("en", REFUSED), ("zh", "此 ComfyUI 的注意力不询问 Halfsafe")):
            comfy.speak(language)
            comfy.page.wait_for_function(
                "(begins) => document.querySelector('.hs-sidebar .hs-device')?.textContent.startsWith(begins)",
                arg=begins,
            )
            assert "1.3.0" in comfy.page.inner_text(".hs-sidebar .hs-device")
            comfy.screenshot(pictures, f"refused-{language}-{cell}")
    finally:
        comfy.page.unroute("**/halfsafe/device")
        comfy.send("reconnected")


def test_the_sidebar_says_that_comfyui_does_not_answer_and_asks_again(comfy: ComfyPage) -> None:
    """A server that is away, and then busy: what is known last is said, and what is asked for."""
    sentence = "(text) => document.querySelector('.hs-sidebar .hs-device')?.textContent.startsWith(text)"
    waiting = []
    comfy.page.route("**/halfsafe/device", lambda route: route.abort())
    try:
        comfy.send("reconnected")
        comfy.evaluate(TAB)
        comfy.page.wait_for_function(sentence, arg="ComfyUI does not answer.")
        comfy.page.route("**/halfsafe/device", lambda route: waiting.append(route))
        comfy.send("reconnected")
        comfy.page.wait_for_function(sentence, arg="Detecting the device ...")
        assert comfy.page.locator(".hs-actions .hs-button:enabled").count() == 4, "what is offered needs no answer"
        waiting[0].continue_()
        comfy.page.wait_for_function(sentence, arg="CPU")
    finally:
        comfy.page.unroute_all()
    comfy.problems.clear()  # the request that failed


OPTIONS = {False: ".litecontextmenu .litemenu-entry", True: "[role=option]"}


def test_a_storage_that_this_comfyui_does_not_run_says_which_one_does(
    comfy: ComfyPage, pictures: Path, cell: str
) -> None:
    comfy.add("HalfsafeLoadDiffusionModel")
    comfy.page.wait_for_function("() => app.graph.nodes[0].widgets.some(({ options }) => options.getOptionLabel)")
    comfy.zoom_to("HalfsafeLoadDiffusionModel", 420)
    if comfy.vue:
        comfy.page.get_by_role("combobox", name="storage").first.click()
    else:
        x, y = comfy.evaluate(
            "() => { const [node] = app.graph.nodes, { y } = node.widgets.find(({ name }) => name === 'storage'), { left, top } = app.canvas.canvas.getBoundingClientRect(); return [left + 120 + 210, top + 120 + y + 10]; }"
        )
        comfy.page.mouse.move(x, y)
        comfy.settle()
        comfy.page.mouse.click(x, y)
    comfy.page.locator(OPTIONS[comfy.vue], has_text="w4a8").wait_for()
    offered = comfy.page.locator(OPTIONS[comfy.vue]).all_inner_texts()
    assert (
        offered[-4:] == ["w6a8 (from ComfyUI 0.38.0 on)", "w4a8 (from ComfyUI 0.31.0 on)", "nvfp4", "mxfp8"]
        and "int8" in offered
    )
    comfy.screenshot(pictures, f"later-storages-{cell}")
    comfy.page.locator(OPTIONS[comfy.vue], has_text="w4a8").click()
    assert (
        comfy.found("() => app.graph.nodes[0].widgets.find(({ name }) => name === 'storage').value", "w4a8") == "w4a8"
    ), "the option is what it was"


def opens_whole(comfy: ComfyPage, path: Path, least: float) -> None:
    comfy.evaluate(OPEN, json.loads(path.read_text(encoding="utf-8")))
    assert comfy.evaluate(SEEN) == comfy.evaluate(SHOWN) and comfy.evaluate("() => app.canvas.ds.scale") > least, (
        path.stem
    )


def test_a_template_opens_whole_and_unzoomed_in_a_small_page(comfy: ComfyPage) -> None:
    """Beside the sidebar those that no other one is larger than: the view hangs on a graph's size alone."""
    comfy.page.set_viewport_size({"width": 1366, "height": 768})
    assert len(WORKFLOWS) == 15
    prompts, sizes = [], {}
    for path in WORKFLOWS:
        opens_whole(comfy, path, 0.99)
        prompts.append(comfy.evaluate("async () => (await app.graphToPrompt()).output"))
        sizes[path] = comfy.evaluate(SIZE)
    largest = [
        path
        for path, (width, height) in sizes.items()
        if not any(w >= width and h >= height for w, h in {*map(tuple, sizes.values())} - {(width, height)})
    ]
    comfy.evaluate("() => { app.extensionManager.sidebarTab.activeSidebarTabId = 'halfsafe'; }")
    comfy.settle()
    for path in largest:
        opens_whole(comfy, path, 0.93)
    assert "halfsafe" not in comfy.saved()["extra"], "what is saved has a view of its own"
    refused = [
        error
        for errors in comfy.server.post("/prompt_checks", prompts)["errors"]
        for told in errors.values()
        for error in told
    ]
    assert [error for error in refused if not re.fullmatch(ABSENT_FILE, error)] == []


def test_the_search_finds_every_workflow_and_one_opens_readable_and_offers_its_files(
    comfy: ComfyPage, pictures: Path, cell: str
) -> None:
    comfy.page.set_viewport_size({"width": 1366, "height": 768})
    comfy.set("Comfy.Workflow.ShowMissingModelsWarning", True)
    comfy.evaluate("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates'); }")
    comfy.page.wait_for_selector('[data-testid="template-workflows-content"]')
    comfy.page.get_by_placeholder("Search").last.fill("halfsafe")
    comfy.page.wait_for_function(
        "([cards, count]) => document.querySelectorAll(cards).length === count", arg=[CARDS, len(WORKFLOWS)]
    )
    found = comfy.evaluate("(cards) => [...document.querySelectorAll(cards)].map((card) => card.dataset.testid)", CARDS)
    assert sorted(name.removeprefix("template-workflow-") for name in found) == [path.stem for path in WORKFLOWS]
    comfy.page.wait_for_function(
        "(cards) => [...document.querySelectorAll(`${cards} img`)].some((image) => image.naturalWidth === 512)",
        arg=CARDS,
    )
    comfy.screenshot(pictures, f"templates-{cell}")
    comfy.page.get_by_test_id(f"template-workflow-{OPENED}").click()
    comfy.page.wait_for_function("() => app.graph.nodes.some((node) => node.type === 'HalfsafeReport')")
    details, download = (
        comfy.page.get_by_text("View details").first,
        comfy.page.locator("button", has_text="Download all").first,
    )
    for _ in range(20):  # a busy page may not have yet what the details are of
        download.or_(details).first.wait_for()
        if download.is_visible():
            break
        details.click()
        comfy.page.wait_for_timeout(1000)
    assert download.is_visible()
    comfy.screenshot(pictures, f"template-opened-{cell}")
