"""Write web/show_me.json, the five nodes that the sidebar's *Show me* opens: one picture black, and the same behind the one node, which repairs it.

.venv/bin/python scripts/assets/show_me.py
"""

from __future__ import annotations

import json
from pathlib import Path

from workflow_sheet import CORE, PACK

TARGET = Path(__file__).absolute().parents[2] / "web" / "show_me.json"
FILE = "halfsafe_example.safetensors"
DRAWING = "3f6f2f0e-6c1b-4a58-9d0c-5b1f6f0a7d21"
SAMPLER = [7, "fixed", 16, 1, "euler", "simple", 1]
LARGE = ["lanczos", 384, 384, "disabled"]
INTO, OUT = -10, -20


def node(
    number: int,
    kind: str,
    at: tuple[int, int],
    size: tuple[int, int],
    title: str = "",
    values: list | None = None,
    **sockets,
) -> dict:
    """A node; `sockets`: its linked inputs and its outputs, as (name, type) pairs."""
    inputs = [{"name": name, "type": type_, "link": None} for name, type_ in sockets.get("inputs", ())]
    outputs = [{"name": name, "type": type_, "links": []} for name, type_ in sockets.get("outputs", ())]
    pack = {} if kind == DRAWING else PACK if kind.startswith("Halfsafe") else CORE
    made = {
        "id": number,
        "type": kind,
        "pos": list(at),
        "size": list(size),
        "flags": {},
        "order": number,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        "properties": {**pack, "Node name for S&R": kind},
        "widgets_values": values or [],
    }
    return made | ({"title": title} if title else {})


def linked(nodes: list[dict], wires: list[tuple[int, int, int, int]], first: int) -> list[dict]:
    """Links by (from, output, to, input), which are entered in the nodes too."""
    known = {one["id"]: one for one in nodes}
    links = []
    for number, (origin, output, target, slot) in enumerate(wires, first):
        kind = known[origin]["outputs"][output]["type"] if origin in known else known[target]["inputs"][slot]["type"]
        if origin in known:
            known[origin]["outputs"][output]["links"].append(number)
        if target in known:
            known[target]["inputs"][slot]["link"] = number
        links.append(
            {
                "id": number,
                "origin_id": origin,
                "origin_slot": output,
                "target_id": target,
                "target_slot": slot,
                "type": kind,
            }
        )
    return links


def drawing() -> dict:
    """The subgraph that draws one prompt with two models."""
    model, clip, vae, text, latent = (
        ("model", "MODEL"),
        ("clip", "CLIP"),
        ("vae", "VAE"),
        ("CONDITIONING", "CONDITIONING"),
        ("LATENT", "LATENT"),
    )
    sampled = {
        "inputs": [model, ("positive", "CONDITIONING"), ("negative", "CONDITIONING"), ("latent_image", "LATENT")],
        "outputs": [latent],
    }
    decoded = {"inputs": [("samples", "LATENT"), vae], "outputs": [("IMAGE", "IMAGE")]}
    enlarged = {"inputs": [("image", "IMAGE")], "outputs": [("IMAGE", "IMAGE")]}
    nodes = [
        node(
            11,
            "HalfsafeLoadCLIP",
            (0, 0),
            (320, 220),
            values=[FILE, "sd3", "auto", "auto", "none", "none", "none"],
            outputs=[("CLIP", "CLIP")],
        ),
        node(12, "HalfsafeLoadVAE", (0, 300), (320, 100), values=[FILE, "auto"], outputs=[("VAE", "VAE")]),
        node(13, "CLIPTextEncode", (380, 0), (300, 160), values=["a red heart"], inputs=[clip], outputs=[text]),
        node(14, "EmptyHunyuanLatentVideo", (380, 240), (300, 140), values=[128, 128, 1, 1], outputs=[latent]),
        node(15, "KSampler", (740, 0), (300, 280), values=SAMPLER, **sampled),
        node(16, "KSampler", (740, 360), (300, 280), values=SAMPLER, **sampled),
        node(17, "VAEDecode", (1100, 0), (200, 60), **decoded),
        node(18, "VAEDecode", (1100, 360), (200, 60), **decoded),
        node(19, "ImageScale", (1100, 120), (280, 130), values=LARGE, **enlarged),
        node(20, "ImageScale", (1100, 480), (280, 130), values=LARGE, **enlarged),
    ]
    wires = [
        (11, 0, 13, 0), (13, 0, 15, 1), (13, 0, 15, 2), (13, 0, 16, 1), (13, 0, 16, 2), (14, 0, 15, 3), (14, 0, 16, 3), (15, 0, 17, 0),
        (16, 0, 18, 0), (12, 0, 17, 1), (12, 0, 18, 1), (INTO, 0, 15, 0), (INTO, 1, 16, 0), (17, 0, 19, 0), (18, 0, 20, 0), (19, 0, OUT, 0), (20, 0, OUT, 1),
    ]  # fmt: skip
    links = linked(nodes, wires, 11)
    ends = {(link["origin_id"], link["origin_slot"]): link["id"] for link in links} | {
        (link["target_id"], link["target_slot"]): link["id"] for link in links
    }

    def socket(number: int, name: str, kind: str, end: int, slot: int) -> dict:
        return {
            "id": f"{DRAWING[:-1]}{number}",
            "name": name,
            "type": kind,
            "linkIds": [ends[end, slot]],
            "pos": [0, 0],
        }

    return {
        "id": DRAWING, "version": 1, "revision": 0, "config": {}, "name": "Draw with both", "extra": {}, "groups": [], "widgets": [],
        "state": {"lastGroupId": 0, "lastNodeId": 20, "lastLinkId": links[-1]["id"], "lastRerouteId": 0},
        "inputNode": {"id": INTO, "bounding": [-220, 120, 130, 88]}, "outputNode": {"id": OUT, "bounding": [1440, 120, 130, 88]},
        "inputs": [socket(2, "As it is", "MODEL", INTO, 0), socket(3, "Through Halfsafe", "MODEL", INTO, 1)],
        "outputs": [socket(4, "As it is", "IMAGE", OUT, 0), socket(5, "Through Halfsafe", "IMAGE", OUT, 1)],
        "nodes": nodes, "links": links,
    }  # fmt: skip


def main() -> None:
    model = ("MODEL", "MODEL")
    both = {
        "inputs": [("As it is", "MODEL"), ("Through Halfsafe", "MODEL")],
        "outputs": [("As it is", "IMAGE"), ("Through Halfsafe", "IMAGE")],
    }
    guarded = [("model", "MODEL"), ("clip", "CLIP"), ("vae", "VAE"), ("rules", "HALFSAFE_RULES")]
    given = [model, ("CLIP", "CLIP"), ("VAE", "VAE"), ("why", "STRING")]
    nodes = [
        node(
            1,
            "HalfsafeLoadDiffusionModel",
            (0, 0),
            (330, 120),
            "Overflows in fp16",
            [FILE, "fp16", "fp16"],
            outputs=[model],
        ),
        node(
            2,
            "HalfsafeAutoPrecision",
            (0, 165),
            (330, 440),
            "",
            ["balanced", "retry_higher", "off"],
            inputs=guarded,
            outputs=given,
        ),
        node(3, DRAWING, (345, 420), (200, 120), "Draw a heart twice", [], **both) | {"flags": {"collapsed": True}},
        node(4, "PreviewImage", (345, 0), (300, 340), "As it is", [], inputs=[("images", "IMAGE")]),
        node(5, "PreviewImage", (655, 0), (300, 340), "Through Halfsafe", [], inputs=[("images", "IMAGE")]),
    ]
    links = linked(nodes, [(1, 0, 2, 0), (1, 0, 3, 0), (2, 0, 3, 1), (3, 0, 4, 0), (3, 1, 5, 0)], 1)
    rows = [
        [link[key] for key in ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")] for link in links
    ]
    graph = {
        "id": "5c3f1d52-8a0e-4f0e-9f6b-2f6a1f0c7e10", "revision": 0, "last_node_id": 20, "last_link_id": 27, "nodes": nodes, "links": rows,
        "groups": [], "definitions": {"subgraphs": [drawing()]}, "config": {}, "extra": {}, "version": 0.4,
    }  # fmt: skip
    TARGET.write_text(json.dumps(graph) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
