"""The template browser finds the workflows, and a workflow that is opened there is readable and offers its files."""

from __future__ import annotations

from pathlib import Path

import pytest

TITLES = sorted(path.stem for path in (Path(__file__).absolute().parents[2] / "workflows").glob("*.json"))
FIRST = "Halfsafe 1 - Fix black images"
CARDS = '[data-testid^="template-workflow-Halfsafe"]'
LONGEST = 180_000  # the browser of templates lists ComfyUI's hundreds first


@pytest.fixture
def browsing(comfy):
    """The browser of templates, searched for this pack."""
    comfy.set("Comfy.Workflow.ShowMissingModelsWarning", True)
    comfy.evaluate("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates'); }")
    comfy.page.wait_for_selector('[data-testid="template-workflows-content"]', timeout=LONGEST)
    comfy.page.get_by_placeholder("Search").last.fill("halfsafe")
    comfy.page.wait_for_function("([cards, count]) => document.querySelectorAll(cards).length === count", arg=[CARDS, len(TITLES)], timeout=LONGEST)
    yield comfy
    comfy.page.keyboard.press("Escape")
    comfy.set("Comfy.Workflow.ShowMissingModelsWarning", False)
    comfy.load({"nodes": [], "links": [], "version": 0.4})


def test_the_search_finds_every_workflow_with_its_thumbnail(browsing, pictures, cell):
    found = browsing.evaluate("(cards) => [...document.querySelectorAll(cards)].map((card) => card.dataset.testid)", CARDS)
    assert sorted(name.removeprefix("template-workflow-") for name in found) == TITLES
    loaded = "(cards) => [...document.querySelectorAll(`${cards} img`)].some((image) => image.naturalWidth === 512)"
    browsing.page.wait_for_function(loaded, arg=CARDS, timeout=LONGEST)
    browsing.screenshot(pictures, f"templates-{cell}")


def test_the_first_opens_readable_and_its_files_can_be_downloaded(browsing, pictures, cell):
    browsing.page.get_by_test_id(f"template-workflow-{FIRST}").click()
    browsing.page.wait_for_function("() => app.graph.nodes.some((node) => node.type === 'HalfsafeAutoPrecision')", timeout=LONGEST)
    details = browsing.page.get_by_text("View details")
    shown = browsing.page.locator("button", has_text="Download all").or_(details).first
    shown.wait_for(timeout=LONGEST)
    if details.count():
        details.first.click()
    browsing.page.locator("button", has_text="Download all").first.wait_for(timeout=LONGEST)
    assert browsing.evaluate("() => [app.canvas.ds.scale > 0.55, app.canvas.low_quality]") == [True, False], "text is not drawn"
    browsing.screenshot(pictures, f"template-opened-{cell}")
