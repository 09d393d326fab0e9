"""Take the README's pictures of ComfyUI's page: the graph, the report, a toast and the sidebar after a real run that overflows, and two clicks of the sidebar.

    COMFYUI_DIR=<folder> HALFSAFE_FRONTEND=<folder> CHROMIUM=<program> .venv/bin/python scripts/assets/page_pictures.py

The variables are those of the browser tests; `scripts/test.py` says how they are found.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pictures import IMAGES, ROOT, Studio, open_studio, shapes

if TYPE_CHECKING:
    from browser.comfy_page import ComfyPage
    from playwright.sync_api import Browser

Image = shapes.Image
GUARDED = "Halfsafe with Krea 2 Turbo"
WORKFLOW = "Halfsafe 2 - Find the layer that turns black"
VIEW = {"width": 1840, "height": 1000}
SETTINGS = {"Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasMenu": False, "Comfy.RightSidePanel.IsOpen": False}
REPORT, REPORT_SIZE, MARGIN = "HalfsafeReport", (588, 780), 12
TOGGLE_TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"
TOAST = "li[role=alert]:has-text('Halfsafe: ')"
KEEP_TOASTS = """() => { const { toast } = app.extensionManager; const kept = []; const add = toast.add;
    toast.success = (summary, { description: detail }) => kept.push({ severity: "success", summary, detail });
    window.showToast = () => add.call(toast, { ...kept[0], life: 60000 }); }"""
SHOW_GRAPH = """() => { const { ds } = app.canvas; const nodes = app.graph.nodes;
    const [left, top] = [Math.min(...nodes.map((n) => n.pos[0])), Math.min(...nodes.map((n) => n.pos[1]))];
    ds.scale = 0.85; ds.offset[0] = 118 - left; ds.offset[1] = 176 - top; app.canvas.setDirty(true, true); }"""


@dataclass(frozen=True)
class Box:
    """A part of the page in its own pixels."""

    x: float
    y: float
    width: float
    height: float


MORE_ROOM = (90, 430)
CLICKS = (("Guard this workflow", "Take the guard out"), ("Halve the memory", "Put ComfyUI's loaders back"))
GESTURE = Box(0, 38, 1300, 860)


def main() -> None:
    with (
        open_studio("halfsafe", ["--front-end-root", os.environ["HALFSAFE_FRONTEND"]]) as studio,
        _chromium() as browser,
    ):
        _take_graph(studio, browser)
        _take_gesture(studio, browser)
        _take_sidebar(studio, browser)
        for theme in ("dark", "light"):
            _take_report(studio, browser, theme)


@contextlib.contextmanager
def _chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"]
        yield playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=options)


def _open(studio: Studio, browser: Browser, workflow: dict, vue: bool, theme: str, sharpness: int) -> ComfyPage:
    import conftest  # noqa: F401  it makes the pack importable as `halfsafe`; `pictures` has put tests/ on the path
    from browser.comfy_page import ComfyPage

    page = ComfyPage(browser.new_context(viewport=VIEW, device_scale_factor=sharpness), studio.server, vue, theme)
    page.open(**SETTINGS).load(workflow)
    return page


def _take_graph(studio: Studio, browser: Browser) -> None:
    page = _open(studio, browser, studio.workflow(WORKFLOW), False, "dark", 1)
    page.evaluate("() => { app.extensionManager.toast.add = () => {}; }")
    page.run()
    page.page.wait_for_selector(".hs-guard .hs-event", state="attached")
    page.page.wait_for_timeout(6000)
    page.evaluate(SHOW_GRAPH)
    _save(page, Box(60, 44, 950, 660), "graph")


def _take_gesture(studio: Studio, browser: Browser) -> None:
    """Two clicks of the sidebar on a workflow of ComfyUI's own nodes, as a moving picture."""
    page = _open(studio, browser, _without_the_node(studio.workflow(GUARDED)), False, "dark", 1)
    page.evaluate(TOGGLE_TAB)
    buttons = page.page.locator(".hs-actions button")
    buttons.first.wait_for()
    page.page.wait_for_timeout(2500)
    page.evaluate(
        "() => { const { ds } = app.canvas; ds.scale = 0.6; ds.offset[0] = 720; ds.offset[1] = 170; app.canvas.setDirty(true, true); }"
    )
    frames = [_frame(page)]
    for name, after in CLICKS:
        button = buttons.filter(has_text=name)
        button.hover()
        frames.append(_frame(page))
        button.click()
        buttons.filter(has_text=after).wait_for()
        frames.append(_frame(page))
    path = IMAGES / "guard.webp"
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=[1600, 1200, 3200, 1200, 3200],
        loop=0,
        quality=80,
        method=6,
    )
    print(f"{path.relative_to(ROOT)}: {frames[0].width} x {frames[0].height}, {path.stat().st_size} bytes", flush=True)


def _take_sidebar(studio: Studio, browser: Browser) -> None:
    """The answer of a run that was halved and guarded by the sidebar's own buttons."""
    page = _open(studio, browser, _without_the_node(studio.workflow(GUARDED)), False, "dark", 2)
    page.evaluate("() => { app.extensionManager.toast.add = () => {}; }")
    page.evaluate(TOGGLE_TAB)
    for name, after in CLICKS:
        page.page.locator(".hs-actions button", has_text=name).click()
        page.page.locator(".hs-actions button", has_text=after).wait_for()
        page.page.wait_for_timeout(2500)
    page.run()
    page.page.locator(".hs-answer .hs-number").wait_for()
    page.page.wait_for_timeout(2500)
    end = page.page.locator(".hs-fold").last.bounding_box()
    _save(page, Box(0, 38, end["x"] + end["width"] + MARGIN, end["y"] + end["height"] + MARGIN - 38), "sidebar")


def _without_the_node(workflow: dict) -> dict:
    """The workflow without its Halfsafe node, whose place stays free: what was connected to it goes on to where it led."""
    (node,) = [node for node in workflow["nodes"] if node["type"] == "HalfsafeAutoPrecision"]
    origins = {link[0]: link[1:3] for link in workflow["links"] if link[3] == node["id"]}
    before = [origins[slot["link"]] for slot in node["inputs"] if slot["link"]]
    links = [
        [link[0], *before[link[2]], *link[3:]] if link[1] == node["id"] else link
        for link in workflow["links"]
        if link[3] != node["id"]
    ]
    others = [one for one in workflow["nodes"] if one is not node and one["type"] != "MarkdownNote"]
    nodes = [{**one, "outputs": [{**slot, "links": []} for slot in one["outputs"]]} for one in others]
    left = node["pos"][0]
    for one in nodes:
        x, y = one["pos"]
        one["pos"] = [x + MORE_ROOM[0] * (x > left), y + MORE_ROOM[1] * (x == left)]
    by_id = {one["id"]: one for one in nodes}
    for number, origin, slot, *_ in links:
        by_id[origin]["outputs"][slot]["links"].append(number)
    return {**workflow, "nodes": nodes, "links": links}


def _frame(page: ComfyPage) -> Image.Image:
    page.page.wait_for_timeout(900)
    taken = Image.open(io.BytesIO(page.page.screenshot(clip=vars(GESTURE)))).convert("RGB")
    return taken.resize((960, round(960 * taken.height / taken.width)), Image.Resampling.LANCZOS)


def _take_report(studio: Studio, browser: Browser, theme: str) -> None:
    page = _open(studio, browser, studio.workflow(WORKFLOW, storage="fp8_e4m3fn"), True, theme, 2)
    page.evaluate("(type) => { app.graph.nodes.find((n) => n.type === type).pos = [6000, 0]; }", REPORT)
    page.zoom_to(REPORT, *REPORT_SIZE)
    page.evaluate(KEEP_TOASTS)
    page.run()
    page.page.wait_for_selector(".hs-table tbody tr", timeout=120_000)
    page.page.fill(".hs-filter", "double_blocks")
    _save(page, _around(page, ".lg-node:has(.hs-panel)"), f"report-{theme}")
    if theme == "dark":
        page.evaluate("() => window.showToast()")
        page.page.wait_for_selector(TOAST, timeout=30_000)
        page.page.wait_for_timeout(1500)
        _save(page, _around(page, TOAST), "toast")


def _around(page: ComfyPage, selector: str) -> Box:
    box = page.page.locator(selector).first.bounding_box()
    return Box(box["x"] - MARGIN, box["y"] - MARGIN, box["width"] + 2 * MARGIN, box["height"] + 2 * MARGIN)


def _save(page: ComfyPage, box: Box, name: str) -> None:
    page.page.mouse.move(VIEW["width"] - 20, VIEW["height"] - 20)
    page.page.wait_for_timeout(500)
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "taken.png"
        page.page.screenshot(path=taken, clip=vars(box))
        picture = Image.open(taken).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    path = IMAGES / f"{name}.png"
    picture.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {picture.width} x {picture.height}, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
