"""Every shared workflow is queued in a real ComfyUI and finishes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from comfyui_server import Server
from workflow import WorkflowError, shrink, small_file, substitute_files, to_prompt

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


def test_seed_control_value_is_not_taken_for_an_input() -> None:
    info = {
        "Sampler": {
            "input": {
                "required": {
                    "seed": ["INT", {"default": 0, "control_after_generate": True}],
                    "steps": ["INT", {"default": 20}],
                    "name": [["euler", "heun"]],
                    "model": ["MODEL"],
                },
                "optional": {"late": ["FLOAT", {"default": 0.5}]},
            }
        }
    }
    node = {"id": 4, "type": "Sampler", "widgets_values": [7, "randomize", 12, "heun"], "inputs": []}
    prompt = to_prompt({"nodes": [node], "links": []}, info)
    assert prompt["4"]["inputs"] == {"seed": 7, "steps": 12, "name": "heun", "late": 0.5}


def test_links_pass_through_reroutes_and_bypassed_nodes() -> None:
    info = {name: {"input": {"required": {"model": ["MODEL"]}}} for name in ("Load", "Patch", "Use")}
    info["Load"]["input"]["required"] = {}
    slot = {"name": "model", "type": "MODEL"}
    nodes = [
        {"id": 1, "type": "Load"},
        {"id": 2, "type": "Patch", "mode": 4, "inputs": [{**slot, "link": 10}]},
        {"id": 3, "type": "Reroute", "inputs": [{"name": "", "type": "*", "link": 11}]},
        {"id": 4, "type": "Use", "inputs": [{**slot, "link": 12}]},
    ]
    links = [[10, 1, 0, 2, 0, "MODEL"], [11, 2, 0, 3, 0, "MODEL"], [12, 3, 0, 4, 0, "MODEL"]]
    assert to_prompt({"nodes": nodes, "links": links}, info)["4"]["inputs"] == {"model": ["1", 0]}


def test_unknown_node_and_file_are_named() -> None:
    with pytest.raises(WorkflowError, match="Absent"):
        to_prompt({"nodes": [{"id": 1, "type": "Absent"}], "links": []}, {})
    info = {"Load": {"input": {"required": {"odd_name": [["a.safetensors"]]}}}}
    prompt = {"1": {"class_type": "Load", "inputs": {"odd_name": "b.safetensors"}}}
    with pytest.raises(WorkflowError, match=r"b\.safetensors"):
        substitute_files(prompt, info, small_file)
