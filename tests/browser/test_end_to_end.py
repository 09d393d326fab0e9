"""What a user does: drop a workflow on the page, press Run, see the picture and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage

WORKFLOWS = Path(__file__).absolute().parents[2] / "workflows"
DROP = """(text) => { const files = new DataTransfer(); files.items.add(new File([text], "dropped.json", { type: "application/json" }));
    const options = { dataTransfer: files, bubbles: true, cancelable: true, clientX: 700, clientY: 400 };
    document.querySelector("#graph-canvas").dispatchEvent(new DragEvent("drop", options)); }"""


@pytest.mark.paired  # what is dropped and what is drawn differ by page and by renderer, each for itself
def test_dropped_workflow_runs_to_a_picture_and_a_report(opened_page: ComfyPage, pictures: Path, cell: str) -> None:
    comfy = opened_page
    comfy.load(json.loads((WORKFLOWS / "Halfsafe 3 - Half the memory.json").read_text(encoding="utf-8")))
    comfy.make_small()
    text = json.dumps(comfy.saved())
    comfy.evaluate("() => app.graph.clear()")
    comfy.load_by(DROP, text)
    comfy.page.get_by_test_id("queue-button").click()
    comfy.page.wait_for_selector(".hs-table tbody tr", state="attached")
    code = "() => { const node = app.graph.nodes.find((n) => n.type === 'SaveImage'); return app.nodeOutputs[node.id]?.images?.[0]; }"
    comfy.page.wait_for_function(code)
    comfy.screenshot(pictures, f"end-to-end-{cell}")
    width = "async (file) => { const image = new Image(); image.src = `/view?${new URLSearchParams(file)}`; await image.decode(); return image.naturalWidth; }"
    assert comfy.evaluate(width, comfy.evaluate(code)) == 64
