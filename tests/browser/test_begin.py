"""Every test begins with the same page, whatever the one before left."""

from __future__ import annotations

import pytest
from browser.comfy_page import VIEW, ComfyPage

STATE = """() => { const { setting, sidebarTab } = app.extensionManager;
    return [setting.get("Comfy.Locale"), setting.get("Comfy.ColorPalette"), setting.get("halfsafe.badges"), setting.get("Comfy.RightSidePanel.IsOpen"),
        sidebarTab.activeSidebarTabId, app.canvas.selectedItems.size, document.querySelectorAll("[role=dialog], .hs-sidebar").length]; }"""
BEGINS = ["en", "dark", True, False, None, 0, 0]
CHANGES = {"Comfy.ColorPalette": "light", "halfsafe.badges": False, "Comfy.RightSidePanel.IsOpen": True}


@pytest.mark.paired  # the page's own state; what a renderer draws is not part of it
def test_what_a_test_leaves_is_put_back(comfy: ComfyPage) -> None:
    comfy.add("HalfsafeNaNGuard")
    comfy.speak("zh")
    for name, value in CHANGES.items():
        comfy.set(name, value)
    comfy.record_toasts()
    comfy.evaluate("() => { app.canvas.selectNode(app.graph.nodes[0]); app.extensionManager.sidebarTab.activeSidebarTabId = 'halfsafe'; }")
    comfy.page.wait_for_selector(".hs-sidebar")
    comfy.page.set_viewport_size({"width": 800, "height": 600})
    assert comfy.evaluate(STATE) == ["zh", "light", False, True, "halfsafe", 1, 1]
    comfy.begin()
    assert comfy.found(STATE, BEGINS) == BEGINS and comfy.page.viewport_size == VIEW
    comfy.send_guard(prompt_id="told", kind="verdict", verdict="bad_weights", message="A weight holds NaN.")
    comfy.page.get_by_text("Halfsafe: Bad weights").first.wait_for()
    comfy.begin()
    comfy.page.get_by_text("Halfsafe: Bad weights").first.wait_for(state="detached")
    comfy.evaluate("() => { app.extensionManager.command.execute('Comfy.ShowSettingsDialog'); }")
    comfy.page.locator("[role=dialog]").first.wait_for()
    comfy.begin()
    assert comfy.evaluate(STATE) == BEGINS
