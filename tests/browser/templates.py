"""ComfyUI's own workflow templates that load a local model and whose nodes this ComfyUI has: as few as hold each kind of link and loader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import comfyui_workflow_templates_json

FOLDER = Path(comfyui_workflow_templates_json.__file__).parent / "templates"
OF_THE_PAGE = {"Note", "MarkdownNote", "Reroute", "PrimitiveNode"}
GUARDED = {"MODEL", "CLIP", "VAE", "GUIDER"}
EXCHANGED = {
    "UNETLoader",
    "CheckpointLoaderSimple",
    "ControlNetLoader",
    "CLIPLoader",
    "DualCLIPLoader",
    "TripleCLIPLoader",
    "QuadrupleCLIPLoader",
}
"""ComfyUI's loaders in whose place one of ours can stand."""
SHORT = 20
"""A template takes this many nodes' time beside that of its nodes."""


def templates(info: dict) -> dict[str, dict]:
    """Name -> workflow."""
    loaders = {
        name
        for name, node in info.items()
        if "Loader" in name and {"MODEL", "CLIP", "VAE"} & {str(output) for output in node["output"]}
    }
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        workflow = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(workflow, dict) or "nodes" not in workflow:
            continue  # an index
        subgraphs = workflow.get("definitions", {}).get("subgraphs", [])
        types = (
            {node["type"] for graph in (workflow, *subgraphs) for node in graph["nodes"]}
            - {graph["id"] for graph in subgraphs}
            - OF_THE_PAGE
        )
        if types & loaders and types <= info.keys():
            found[path.stem] = workflow
    return found


def each_kind(found: dict[str, dict], kinds: Callable[[dict], Iterator[tuple]]) -> dict[str, dict]:
    """Return templates that together have every kind which any of them has, those with the most new ones for their size first."""
    has = {name: set(kinds(workflow)) for name, workflow in found.items()}
    cost = {name: SHORT + sum(len(graph["nodes"]) for graph in graphs_in(workflow)) for name, workflow in found.items()}
    missing = set().union(*has.values())
    chosen = {}
    while missing:
        name = max(found, key=lambda name: len(has[name] & missing) / cost[name])
        chosen[name] = found[name]
        missing -= has[name]
    return chosen


def graphs_in(workflow: dict) -> list[dict]:
    """The outermost graph and those of subgraphs."""
    return [workflow, *workflow.get("definitions", {}).get("subgraphs", [])]


def links_in(workflow: dict) -> Iterator[tuple]:
    """Yield (node type, node type, type) of each link of what is guarded; a subgraph's borders and uses are types of their own."""
    outer, *inner = graphs_in(workflow)
    subgraphs = {graph["id"] for graph in inner}
    for graph in (outer, *inner):
        types = {node["id"]: "a subgraph" if node["type"] in subgraphs else node["type"] for node in graph["nodes"]}
        for link in graph.get("links", []):
            origin, target, kind = (
                (link[1], link[3], link[5])
                if isinstance(link, list)
                else (link["origin_id"], link["target_id"], link["type"])
            )
            if kind in GUARDED:
                yield types.get(origin, "a border"), types.get(target, "a border"), kind


def loaders_in(workflow: dict) -> Iterator[tuple]:
    """Yield each loader's type, whether it is in a subgraph, has a linked input, is left out of runs or casts to fp8, and whether it is one of several."""
    for place, graph in enumerate(graphs_in(workflow)):
        seen = set()
        for node in graph["nodes"]:
            if node["type"] in EXCHANGED:
                linked = any(one.get("link") is not None for one in node.get("inputs", []))
                cast = any(str(value).startswith("fp8") for value in node.get("widgets_values") or [])
                one = (node["type"], place > 0, linked, node.get("mode", 0) != 0, cast)
                yield (*one, one in seen)
                seen.add(one)
