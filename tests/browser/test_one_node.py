"""The one node between loaders and sampler: it guards, shows what ran, and puts what it found into the graph."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage, without_positions
from halfsafe.precision.base.message import Message, joined
from halfsafe.precision.report.result import IN_INT8, RESULT_KEY, Result

NODE = "HalfsafeAutoPrecision"
PUT_IN = """() => { const of = (type) => app.graph.nodes.find((n) => n.type === type), one = LiteGraph.createNode("HalfsafeAutoPrecision");
    const loader = of("HalfsafeLoadDiffusionModel"), values = { model_name: "wan_overflowing.safetensors", storage: "fp16", compute: "fp16" };
    for (const widget of loader.widgets) widget.value = values[widget.name] ?? widget.value;
    one.widgets.find((w) => w.name === "goal").value = "balanced"; one.pos = [440, 620]; app.graph.add(one);
    app.graph.remove(of("HalfsafeReport"));
    loader.connect(0, one, "model"); of("HalfsafeLoadVAE").connect(0, one, "vae"); of("HalfsafeLoadCLIP").connect(0, one, "clip");
    one.connect(0, of("KSampler"), "model"); one.connect(2, of("VAEDecode"), "vae");
    for (const text of app.graph.nodes.filter((n) => n.type === "CLIPTextEncode")) one.connect(1, text, "clip"); }"""
RULES = "() => app.graph.nodes.filter((n) => n.type === 'HalfsafeLayerRules').map((n) => n.widgets.find((w) => w.name === 'rules').value)"
VERDICT = ".hs-title .hs-verdict"


@pytest.fixture
def one(opened_page: ComfyPage) -> ComfyPage:
    """A page with the one node before the sampler of a model that overflows in fp16."""
    opened_page.load_small()
    opened_page.evaluate(PUT_IN)
    opened_page.load(opened_page.saved())
    return opened_page


@pytest.mark.once  # a run is the server's; test_report draws its report in each page
def test_it_shows_what_ran(one: ComfyPage, pictures: Path, cell: str) -> None:
    one.zoom_to(NODE, 520, 700)
    one.run()
    one.page.wait_for_selector(".hs-happened")
    one.screenshot(pictures, f"one-node-{cell}")
    text = one.page.inner_text(".hs-panel")
    assert (
        re.search(
            r"No NaN and no Inf in \d+ calls\. Computed in \w+, not in the fp16 that the model was set to\. Above 65504 fp16 overflows",
            text,
        )
        and "WAN21" in text
    )
    assert one.page.locator(VERDICT).first.inner_text() == "clean"
    badges = one.badges()
    assert "guarded" in badges[NODE] and badges["HalfsafeLoadDiffusionModel"] == "fp16", (
        "what the one node computes in is its own to say"
    )
    loader = one.evaluate("""() => { const of = (type) => app.graph.nodes.find((n) => n.type === type), loader = of("HalfsafeLoadDiffusionModel");
        loader.connect(0, of("KSampler"), "model"); return String(loader.id); }""")
    one.show({loader: {"halfsafe_badge": [["fp16", "fp16"]]}})
    assert one.badges()["HalfsafeLoadDiffusionModel"] == "fp16 \u00b7 fp16", "past the one node its own plan runs"


def test_rules_are_kept_in_the_graph_and_undone(one: ComfyPage, pictures: Path, cell: str) -> None:
    one.evaluate("""() => { const node = app.graph.nodes.find((n) => n.type === "HalfsafeAutoPrecision"), rules = LiteGraph.createNode("HalfsafeLayerRules");
        app.graph.add(rules); rules.widgets.find((w) => w.name === "rules").value = "* compute=fp16 stream=same"; rules.widgets.find((w) => w.name === "preset").value = "none";
        rules.connect(0, node, "rules"); }""")
    one.zoom_to(NODE, 520, 700)
    one.run()
    one.page.wait_for_selector(".hs-happened")
    assert one.page.locator(VERDICT).first.inner_text() == "recovered"
    one.screenshot(pictures, f"one-node-recovered-{cell}")
    assert "Black image prevented: blocks.0.ffn" in one.page.inner_text(".hs-panel")
    before = one.saved()
    one.evaluate("() => document.querySelector('.hs-keep').click()")
    (kept,) = one.evaluate(RULES)
    assert "* compute=fp32 stream=fp32" in kept
    one.evaluate("async () => { await app.extensionManager.command.execute('Comfy.Undo'); }")
    one.page.wait_for_function(
        "() => app.graph.nodes.some((n) => n.type === 'HalfsafeLayerRules' && n.widgets.find((w) => w.name === 'rules').value === '* compute=fp16 stream=same')"
    )
    assert len(one.saved()["nodes"]) == len(before["nodes"])


GAIN = "int8 ran at 1.84 times the speed of 16 bit (A10G 1.84)."
OFFERED = joined([Message(IN_INT8, before="8.10 GiB", after="4.10 GiB"), GAIN])
OFFER = Result(OFFERED, use={"storage": "int8"}, sizes=(round(8.1 * 2**30), round(4.1 * 2**30))).ui()[RESULT_KEY][0]
STORAGE = "() => app.graph.nodes.find((n) => n.type === 'HalfsafeAutoPrecision').widgets.find((w) => w.name === 'storage').value"
TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"
BESIDE_THE_TAB = """() => { const node = app.graph.nodes.find((n) => n.type === "HalfsafeAutoPrecision"), { ds } = app.canvas;
    ds.scale = 1; ds.offset[0] = 540 - node.pos[0]; ds.offset[1] = 120 - node.pos[1]; app.canvas.setDirty(true, true); }"""
BUTTONS = [".hs-panel .hs-button:text-is('Use this')", ".hs-sidebar article .hs-button:text-is('Use this')"]


def test_int8_that_is_offered_is_set_by_a_button_and_undone(one: ComfyPage, pictures: Path, cell: str) -> None:
    """A CPU gains nothing from int8, so the offer is sent; what the button sets is run."""
    node = one.evaluate("() => String(app.graph.nodes.find((n) => n.type === 'HalfsafeAutoPrecision').id)")
    one.send("execution_start", prompt_id="shown")
    one.show({node: {"halfsafe_result": [OFFER]}})
    one.send("execution_success", prompt_id="shown")
    one.evaluate(TAB)
    one.zoom_to(NODE, 520, 700)
    one.evaluate(BESIDE_THE_TAB)
    one.screenshot(pictures, f"one-node-offer-{cell}")
    before = one.saved()
    for button in BUTTONS:
        beside = one.page.locator(button).locator("xpath=..").inner_text(), one.page.text_content(".hs-run")
        assert all(
            "In int8 the weights take 4.10 GiB instead of 8.10 GiB. int8 ran at 1.84 times" in text
            for text in beside[1:]
        ), button
        assert ("In int8 the weights take" if "panel" in button else "int8 would take 4.1\u00a0GiB") in beside[0], (
            button
        )
        one.page.locator(button).click()
        assert one.found(STORAGE, "int8") == "int8"
        answer = one.page.locator("[role=status]", has_text="Halfsafe is set to storage int8: run the workflow.")
        answer.filter(has_text="Ctrl+Z undoes this.").wait_for()
        assert not any(one.page.locator(each).is_visible() for each in BUTTONS), "what is set is not offered"
        one.page.mouse.click(1300, 880)
        one.page.keyboard.press("Control+z")
        assert one.found(STORAGE, "as loaded") == "as loaded" and without_positions(one.saved()) == without_positions(
            before
        ), "one step"
        one.evaluate(BESIDE_THE_TAB)
        one.page.locator(button).wait_for()
    one.page.locator(BUTTONS[0]).click()
    one.evaluate(TAB)
    one.run()
    assert one.badges()[NODE].startswith("int8")
