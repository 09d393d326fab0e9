"""Every node of the pack in the page: it mounts, is saved and loaded without loss, and links by type; and what a test leaves is put back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser.comfy_page import VIEW, ComfyPage, without_positions

PANEL = "halfsafe_report"
STATE = """() => { const { setting, sidebarTab } = app.extensionManager;
    return [setting.get("Comfy.Locale"), setting.get("Comfy.ColorPalette"), setting.get("halfsafe.badges"), setting.get("Comfy.RightSidePanel.IsOpen"),
        sidebarTab.activeSidebarTabId, app.canvas.selectedItems.size, document.querySelectorAll("[role=dialog], .hs-sidebar").length]; }"""
BEGINS = ["en", "dark", True, False, None, 0, 0]
CHANGES = {"Comfy.ColorPalette": "light", "halfsafe.badges": False, "Comfy.RightSidePanel.IsOpen": True}
ROOT = Path(__file__).absolute().parents[2]


@pytest.fixture(scope="module")
def definitions(info: dict) -> dict[str, dict]:
    """The pack's node definitions, by id."""
    found = {name: node for name, node in info.items() if name.startswith("Halfsafe")}
    assert len(found) >= 11
    return found


@pytest.mark.drawn
def test_a_graph_of_every_node_is_saved_and_loaded_without_loss(comfy: ComfyPage, definitions: dict[str, dict]) -> None:
    ids = dict(zip(definitions, comfy.add(*definitions), strict=True))
    comfy.evaluate("""() => { for (const node of app.graph.nodes) for (const widget of node.widgets ?? []) {
        const options = widget.options?.values;
        if (Array.isArray(options) && options.length) widget.value = options.at(-1);
        else if (typeof widget.value === "string" && !widget.element?.classList.contains("halfsafe")) widget.value = "norm* storage=fp32";
        else if (typeof widget.value === "number") widget.value = widget.value + (widget.options?.step2 || 1);
    } }""")
    comfy.evaluate("""([load, rules, report]) => { const node = (id) => app.graph.getNodeById(id);
        node(rules).connect(0, node(load), "rules"); node(load).connect(0, node(report), "model"); }""",
        [ids["HalfsafeLoadDiffusionModel"], ids["HalfsafeLayerRules"], ids["HalfsafeReport"]],
    )  # fmt: skip
    before = comfy.saved()
    assert len(before["links"]) == 2
    comfy.load(before)
    after = without_positions(comfy.saved())
    for old, new in zip(without_positions(before)["nodes"], after["nodes"], strict=True):
        assert new == old
    assert after == without_positions(before)


@pytest.mark.drawn
def test_the_report_panel_is_not_saved(comfy: ComfyPage) -> None:
    comfy.add("HalfsafeReport")
    assert comfy.evaluate("() => app.graph.nodes[0].widgets.map((w) => w.name)") == [PANEL]
    (node,) = comfy.saved()["nodes"]
    assert not node.get("widgets_values")
    others = {key: value for key, value in node.items() if key not in ("type", "properties", "title")}
    assert "halfsafe" not in str(others).lower()
    prompt = comfy.evaluate("async () => (await app.graphToPrompt()).output")
    assert all(PANEL not in entry["inputs"] for entry in prompt.values())


def words_in(language: str) -> dict[str, dict[str, str]]:
    return json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))


def test_panel_badge_and_sidebar_follow_the_pages_language_without_a_reload(comfy: ComfyPage) -> None:
    words = words_in("zh")["halfsafe"]
    hint = "Run the workflow to see the storage and compute dtype of each layer, with the reason."
    comfy.add("HalfsafeReport", "HalfsafeAccumulation")
    comfy.load(comfy.saved())
    node = comfy.evaluate("() => String(app.graph.nodes.find((n) => n.type === 'HalfsafeAccumulation').id)")
    comfy.show({node: {"halfsafe_badge": [["fp16 sums", "tf32"]]}})
    for language, speak in (("zh", words.__getitem__), ("en", str)):
        comfy.speak(language)
        shown = (
            "(hint) => [...document.querySelectorAll('.hs-hint')].some((e) => e.isConnected && e.textContent === hint)"
        )
        comfy.page.wait_for_function(shown, arg=speak(hint))
        assert comfy.page.locator(".hs-filter").first.get_attribute("placeholder") == speak("Filter layers")
        assert comfy.badges()["HalfsafeAccumulation"] == f"{speak('fp16 sums')} \u00b7 tf32"
        tab = comfy.evaluate("() => app.extensionManager.getSidebarTabs().find((tab) => tab.id === 'halfsafe').tooltip")
        assert tab == speak("Halfsafe: guards and precision reports")


@pytest.mark.drawn
def test_badges_stay_within_a_narrow_node(comfy: ComfyPage) -> None:
    (node,) = comfy.add("HalfsafeNaNGuard")
    comfy.show({str(node): {"halfsafe_badge": [["fp8_e4m3fn", "bf16", "guarded"]]}})
    comfy.settle()
    edges = "() => [...document.querySelectorAll('.lg-node')].map((e) => { const end = e.getBoundingClientRect().right; return [...e.querySelectorAll('[style*=\"rgb(29, 92, 82)\"]')].map((badge) => badge.getBoundingClientRect().right < end); }).flat()"
    assert comfy.evaluate(edges) == [True] * comfy.vue, "a canvas has no elements: it draws badges above the node"


def test_what_a_test_leaves_is_put_back(comfy: ComfyPage) -> None:
    comfy.add("HalfsafeNaNGuard")
    comfy.speak("zh")
    for name, value in CHANGES.items():
        comfy.set(name, value)
    comfy.record_toasts()
    comfy.evaluate(
        "() => { app.canvas.selectNode(app.graph.nodes[0]); app.extensionManager.sidebarTab.activeSidebarTabId = 'halfsafe'; }"
    )
    comfy.page.wait_for_selector(".hs-sidebar")
    comfy.page.set_viewport_size({"width": 800, "height": 600})
    assert comfy.evaluate(STATE) == ["zh", "light", False, True, "halfsafe", 1, 1]
    comfy.begin()
    assert comfy.found(STATE, BEGINS) == BEGINS and comfy.page.viewport_size == VIEW
    comfy.send_guard(prompt_id="told", kind="verdict", verdict="bad_weights", message="A weight holds NaN.")
    comfy.page.get_by_text("Halfsafe: A weight is NaN").first.wait_for()
    comfy.begin()
    comfy.page.get_by_text("Halfsafe: A weight is NaN").first.wait_for(state="detached")
    comfy.evaluate("() => { app.extensionManager.command.execute('Comfy.ShowSettingsDialog'); }")
    comfy.page.locator("[role=dialog]").first.wait_for()
    comfy.begin()
    assert comfy.evaluate(STATE) == BEGINS
