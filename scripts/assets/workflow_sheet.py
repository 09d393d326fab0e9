"""Lay out a workflow file: nodes in columns, links from the inputs' sources, and where ComfyUI finds models and packs."""

from __future__ import annotations

import importlib
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).absolute().parents[2]
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACK = {"cnr_id": PROJECT["name"], "ver": PROJECT["version"]}
CORE = {"cnr_id": "comfy-core", "ver": "0.29.0"}
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}
BORDER_IN, BORDER_OUT = -10, -20
"""The ids by which links name a block's own inputs and outputs."""
GROWING = "COMFY_AUTOGROW_V3"  # the page adds its slots
TITLE, GAP, BADGE, FOLDED = 30, 12, 12, 1
"""Heights in pixels at scale 1: a badge is drawn above the title of the pack's own nodes."""
COLUMNS = ((0, 225), (233, 225), (466, 296), (770, 250))
"""Left and width of each: 1,020 are what 1366 x 768 pixels show in full size beside the page's map, 225 the least that Nodes 2.0 draws."""
WIDE_SECOND = ((0, 230), (238, 266), (512, 250), (770, 250))
TWO_NODES = ((0, 225), (233, 261), (502, 260), (770, 250))
"""For the result of the one node in the second column, or of two."""


class Output(NamedTuple):
    """One output of a node, as what an input is connected to."""

    node: int
    slot: int = 0


@dataclass
class Sheet:
    """A workflow under way. `files`: name -> (folder in `models/`, address) of every model that it may name; `newer`: node type -> the ComfyUI it needs."""

    title: str
    info: dict
    files: dict[str, tuple[str, str]]
    newer: dict[str, str]
    columns: tuple[tuple[int, int], ...] = COLUMNS
    nodes: list[dict] = field(default_factory=list)
    links: list[list] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)

    def note(self, text: str, height: int) -> None:
        """What to know before pressing Run, in the first column."""
        self._place("MarkdownNote", 0, height, [text], "Read me", {}, [], [])

    def leave(self, column: int, height: int) -> None:
        """Keep the top of a column free for a picture, which is added when what draws it is."""
        self.ends[column] = height

    def add(
        self,
        kind: str,
        column: int,
        height: int,
        *values: object,
        title: str = "",
        top: int | None = None,
        folded: bool = False,
        **sources: Output,
    ) -> int:
        """Put a node below the others of its column, or at its ``top``. Returns its id.

        Args:
            values: its widgets'.
            folded: only its title is drawn.
            sources: its inputs'.
        """
        definition = self.info[kind]
        declared = definition["input"].get("required", {}) | definition["input"].get("optional", {})
        slots = {name: kinds[0] for name, kinds in declared.items() if not _is_widget(kinds) and kinds[0] != GROWING}
        unknown = sources.keys() - slots.keys()
        if unknown:
            raise KeyError(f"{kind} has no input {', '.join(unknown)}")
        named = [value for value in values if value in self.files]
        properties = PACK if kind.startswith("Halfsafe") else CORE | {"ver": self.newer.get(kind, CORE["ver"])}
        if named:
            entries = [{"name": name, "url": self.files[name][1], "directory": self.files[name][0]} for name in named]
            properties = {**properties, "models": entries}
        outputs = list(zip(definition["output_name"], definition["output"], strict=True))
        inputs = [{"name": name, "type": slot, "link": None} for name, slot in slots.items()]
        number = self._place(kind, column, height, list(values), title, properties, inputs, outputs, top, folded)
        for name, source in sources.items():
            self._link(source, number, name)
        return number

    def workflow(self) -> dict:
        """The file's contents."""
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{PROJECT['urls']['Repository']}/{self.title}")),
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(self.links),
            "nodes": self.nodes,
            "links": self.links,
            "groups": [],
            "config": {},
            "extra": {"ds": {"scale": 0.8, "offset": [80, 120]}, "halfsafe": "whole"},
            "version": 0.4,
        }

    def block(self, taken: list[tuple[str, Output]], given: tuple[Output, ...], shown: list[tuple[int, str]]) -> dict:
        """Return the nodes as one subgraph, in a file of ComfyUI's `subgraphs/`.

        Args:
            taken: its inputs, by name: the node and the number of the node's input that each is linked to.
            given: its outputs.
            shown: the widgets that are on it, each by its node and name. Each is an input that is linked to the widget's:
                the page may give the nodes inside other ids, and then finds none that is named in `proxyWidgets`.
        """
        name = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{PROJECT['urls']['Repository']}/subgraphs/{self.title}"))
        links = [
            dict(zip(("id", "origin_id", "origin_slot", "target_id", "target_slot", "type"), link, strict=True))
            for link in self.links
        ]
        ins, outs = [], []
        for node, widget in shown:
            entries = self.nodes[node - 1]["inputs"]
            entries.append({"name": widget, "type": "COMBO", "widget": {"name": widget}, "link": None})
            taken = [*taken, (widget, Output(node, len(entries) - 1))]
        for slot, (label, end) in enumerate(taken):
            entry = self.nodes[end.node - 1]["inputs"][end.slot]
            entry["link"] = self._border(links, (BORDER_IN, slot), end, entry["type"])
            ins.append(self._port(name, "in", slot, label, entry))
        for slot, source in enumerate(given):
            entry = self.nodes[source.node - 1]["outputs"][source.slot]
            entry["links"].append(self._border(links, source, (BORDER_OUT, slot), entry["type"]))
            outs.append(
                self._port(name, "out", slot, entry["name"], {"link": entry["links"][-1], "type": entry["type"]})
            )
        right = max(node["pos"][0] + node["size"][0] for node in self.nodes)
        inner = {
            "id": name, "version": 1, "revision": 0, "config": {}, "name": self.title, "groups": [], "widgets": [],
            "state": {"lastGroupId": 0, "lastNodeId": len(self.nodes), "lastLinkId": len(links), "lastRerouteId": 0},
            "inputNode": {"id": BORDER_IN, "bounding": [-180, 0, 120, 80]}, "outputNode": {"id": BORDER_OUT, "bounding": [right + 60, 0, 120, 100]},
            "inputs": ins, "outputs": outs, "nodes": self.nodes, "links": links, "extra": {},
        }  # fmt: skip
        outer = {
            "id": 1, "type": name, "pos": [0, 0], "size": [300, 160], "flags": {}, "order": 0, "mode": 0, "title": self.title,
            "inputs": [{"name": port["name"], "type": port["type"], "link": None, **({"widget": {"name": port["name"]}} if port["type"] == "COMBO" else {})} for port in ins],
            "outputs": [{"name": port["name"], "type": port["type"], "links": []} for port in outs],
            "properties": PACK, "widgets_values": [],
        }  # fmt: skip
        return {
            "revision": 0,
            "last_node_id": 1,
            "last_link_id": 0,
            "nodes": [outer],
            "links": [],
            "version": 0.4,
            "definitions": {"subgraphs": [inner]},
            "extra": {},
        }

    def _border(self, links: list[dict], origin: tuple[int, int], target: tuple[int, int], kind: str) -> int:
        """Link a node with the border of the block."""
        links.append(
            {
                "id": len(links) + 1,
                "origin_id": origin[0],
                "origin_slot": origin[1],
                "target_id": target[0],
                "target_slot": target[1],
                "type": kind,
            }
        )
        return len(links)

    def _port(self, block: str, side: str, slot: int, name: str, entry: dict) -> dict:
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{block}/{side}/{name}")),
            "name": name,
            "type": entry["type"],
            "linkIds": [entry["link"]],
            "pos": [0, 20 * slot],
        }

    def _place(self, kind, column, height, values, title, properties, inputs, outputs, top=None, folded=False) -> int:
        number = len(self.nodes) + 1
        left, width = self.columns[column]
        if top is None:
            badge = BADGE if kind.startswith("Halfsafe") else 0
            top = self.ends[column] + GAP + badge + TITLE if column in self.ends else 0
            self.ends[column] = top + (0 if folded else height)
        self.nodes.append({
            "id": number, "type": kind, "pos": [left, top], "size": [width, FOLDED if folded else height], "flags": {"collapsed": True} if folded else {}, "order": number - 1, "mode": 0,
            "inputs": inputs,
            "outputs": [{"name": name, "type": slot, "links": []} for name, slot in outputs],
            "properties": {**properties, "Node name for S&R": kind},
            "widgets_values": values,
            **({"title": title} if title else {}),
        })  # fmt: skip
        return number

    def _link(self, source: Output, target: int, name: str) -> None:
        number, end = len(self.links) + 1, self.nodes[target - 1]["inputs"]
        slot = next(index for index, entry in enumerate(end) if entry["name"] == name)
        origin = self.nodes[source.node - 1]["outputs"][source.slot]
        end[slot]["link"] = number
        origin["links"].append(number)
        self.links.append([number, source.node, source.slot, target, slot, origin["type"]])


def _is_widget(declared: list) -> bool:
    options = declared[1] if len(declared) > 1 else {}
    return (isinstance(declared[0], list) or declared[0] in WIDGETS) and not options.get("forceInput")
