"""The template browser finds the workflows, and a workflow that is opened there is readable and offers its files."""

from __future__ import annotations

from pathlib import Path

import pytest

TITLES = sorted(path.stem for path in (Path(__file__).absolute().parents[2] / "workflows").glob("*.json"))
OPENED = "Halfsafe 3 - Half the memory"
CARDS = '[data-testid^="template-workflow-Halfsafe"]'
pytestmark = pytest.mark.paired  # the browser of templates is the page's own; the renderer draws what is opened


def test_the_search_finds_every_workflow_and_one_opens_readable_and_offers_its_files(comfy, pictures, cell):
    comfy.page.set_viewport_size({"width": 1366, "height": 768})
    comfy.set("Comfy.Workflow.ShowMissingModelsWarning", True)
    comfy.evaluate("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates'); }")
    comfy.page.wait_for_selector('[data-testid="template-workflows-content"]')
    comfy.page.get_by_placeholder("Search").last.fill("halfsafe")
    comfy.page.wait_for_function("([cards, count]) => document.querySelectorAll(cards).length === count", arg=[CARDS, len(TITLES)])
    found = comfy.evaluate("(cards) => [...document.querySelectorAll(cards)].map((card) => card.dataset.testid)", CARDS)
    assert sorted(name.removeprefix("template-workflow-") for name in found) == TITLES
    loaded = "(cards) => [...document.querySelectorAll(`${cards} img`)].some((image) => image.naturalWidth === 512)"
    comfy.page.wait_for_function(loaded, arg=CARDS)
    comfy.screenshot(pictures, f"templates-{cell}")
    comfy.page.get_by_test_id(f"template-workflow-{OPENED}").click()
    comfy.page.wait_for_function("() => app.graph.nodes.some((node) => node.type === 'HalfsafeReport')")
    details = comfy.page.get_by_text("View details")
    shown = comfy.page.locator("button", has_text="Download all").or_(details).first
    shown.wait_for()
    if details.count():
        details.first.click()
    comfy.page.locator("button", has_text="Download all").first.wait_for()
    comfy.screenshot(pictures, f"template-opened-{cell}")
