"""Every shared workflow is queued in a real ComfyUI and finishes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from comfyui_server import Server
from workflow import shrink, small_file, substitute_files, to_prompt

WORKFLOWS = sorted((Path(__file__).absolute().parents[2] / "workflows").glob("*.json"))


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_are_workflows() -> None:
    assert WORKFLOWS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_finishes_with_a_picture(path: Path, server: Server) -> None:
    info = server.object_info()
    prompt = shrink(substitute_files(to_prompt(load(path), info), info, small_file))
    outputs = server.prompt(prompt, timeout=300)
    saved = [image for result in outputs.values() for image in result.get("images", []) if image["type"] == "output"]
    assert saved, f"{path.name} saved no picture"
    picture = server.view(saved[0])
    width, height = struct.unpack(">II", picture[16:24])
    assert min(width, height) >= 64


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_keeps_its_links_consistent(path: Path) -> None:
    workflow = load(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for link_id, origin, origin_slot, target, target_slot, kind in workflow["links"]:
        assert link_id in nodes[origin]["outputs"][origin_slot]["links"]
        assert nodes[target]["inputs"][target_slot]["link"] == link_id
        assert kind in (nodes[origin]["outputs"][origin_slot]["type"], "*")
    assert workflow["last_node_id"] == max(nodes)
    assert workflow["last_link_id"] == max(link[0] for link in workflow["links"])
