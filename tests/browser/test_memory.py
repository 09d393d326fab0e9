"""*Halve the memory*: ComfyUI's loaders become the pack's in their places, on ComfyUI's own templates and on awkward graphs, and back."""

from __future__ import annotations

import json
from pathlib import Path

import comfyui_workflow_templates_json
import pytest
from browser.comfy_page import ComfyPage

TEMPLATES = Path(comfyui_workflow_templates_json.__file__).parent / "templates"
OURS = {
    "UNETLoader": "HalfsafeLoadDiffusionModel", "CheckpointLoaderSimple": "HalfsafeLoadCheckpoint", "CLIPLoader": "HalfsafeLoadCLIP",
    "DualCLIPLoader": "HalfsafeLoadCLIP", "TripleCLIPLoader": "HalfsafeLoadCLIP", "QuadrupleCLIPLoader": "HalfsafeLoadCLIP",
    "ControlNetLoader": "HalfsafeLoadControlNet",
}  # fmt: skip
HALVE = """async (only) => { const [{ halveMemory }, { api }] = await Promise.all([import("/extensions/Halfsafe-Pack/memory.mjs"), import("/scripts/api.js")]);
    return halveMemory(app, api, only === undefined ? null : app.graph.getNodeById(only)); }"""
PUT_BACK = """async () => { const { putLoadersBack } = await import("/extensions/Halfsafe-Pack/memory.mjs"); return putLoadersBack(app); }"""
PROMPT = "async () => (await app.graphToPrompt()).output"
UNDO = "async () => { await app.extensionManager.workflow.activeWorkflow.changeTracker.undo(); }"


def test_explore(comfy: ComfyPage) -> None:
    import time
    names = sorted(path.stem for path in TEMPLATES.glob("*.json"))
    done = 0
    for name in names:
        text = (TEMPLATES / f"{name}.json").read_text(encoding="utf-8")
        if not any(f'"{t}"' in text for t in OURS):
            continue
        workflow = json.loads(text)
        if "nodes" not in workflow: continue
        t0 = time.time()
        comfy.evaluate("async (workflow) => { await app.loadGraphData(workflow); }", workflow)
        t1 = time.time()
        before = comfy.evaluate(PROMPT)
        t2 = time.time()
        said = comfy.evaluate(HALVE)
        t3 = time.time()
        after = comfy.evaluate(PROMPT)
        comfy.evaluate(PUT_BACK if done % 2 else UNDO)
        back = comfy.evaluate(PROMPT)
        t4 = time.time()
        print(f"{name[:40]:40} {t1-t0:.2f} {t2-t1:.2f} {t3-t2:.2f} {t4-t3:.2f} back={back == before}", said[:150])
        for k in before:
            if before[k]["class_type"] in OURS and done < 3: print(before[k], after.get(k))
        done += 1
        if done > 12: break
