"""The nodes' public contract: ids, inputs, options, defaults and outputs as workflows know them.

`HALFSAFE_WRITE_GOLDEN=1` adds what is new to the golden file; what is in it stays: a change there breaks workflows.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
from setup.comfyui_server import Server

GOLDEN = Path(__file__).absolute().parents[2] / "golden" / "object_info.json"
FILE_LISTS = (
    "model_name",
    "ckpt_name",
    "vae_name",
    "control_net_name",
    "clip_name1",
    "clip_name2",
    "clip_name3",
    "clip_name4",
)
CORE_LISTS = {("HalfsafeLoadCLIP", "type")}
KEPT = ("default", "min", "max", "step", "multiline", "options")


ADVANCED = {
    "HalfsafeAccumulation": {"reduced_precision_reduction", "tf32", "fp8_fast_accumulation"},
    "HalfsafeNaNGuard": {"max_retries"},
    "HalfsafeAnalyzeLayers": {"sensitive_layers"},
}


@pytest.fixture(scope="module")
def nodes(server: Server) -> dict:
    return {name: contract(name, info) for name, info in server.object_info().items() if name.startswith("Halfsafe")}


@pytest.fixture(scope="module")
def golden(nodes: dict) -> dict:
    known = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    if os.environ.get("HALFSAFE_WRITE_GOLDEN"):
        assert not broken(known, nodes)
        GOLDEN.write_text(json.dumps(dict(sorted(nodes.items())), indent=1) + "\n", encoding="utf-8")
        return nodes
    return known


def contract(name: str, info: dict) -> dict:
    """What of a node's description a workflow depends on."""
    inputs = {
        kind: {key: socket(name, key, *spec) for key, spec in info["input"].get(kind, {}).items()}
        for kind in ("required", "optional")
    }
    outputs = [list(output) for output in zip(info["output"], info["output_name"], strict=True)]
    return {"inputs": inputs, "outputs": outputs, "category": info["category"], "output_node": info["output_node"]}


def socket(node: str, name: str, kind: object, options: dict | None = None) -> dict:
    found = {key: value for key, value in (options or {}).items() if key in KEPT}
    if name in FILE_LISTS or (node, name) in CORE_LISTS:
        found.pop("options", None)
        found.pop("default", None)
        return {"type": "COMBO", **found}
    return {"type": kind, **found}


def broken(old: dict, new: dict) -> list[str]:
    """What a workflow made with ``old`` would trip over in ``new``."""
    problems = [f"{node} is gone" for node in old if node not in new]
    for node in old.keys() & new.keys():
        problems += [f"{node}: {problem}" for problem in _broken_node(old[node], new[node])]
    return problems


def _broken_node(old: dict, new: dict) -> list[str]:
    problems = []
    for kind in ("required", "optional"):
        before, after = old["inputs"][kind], new["inputs"][kind]
        if list(after)[: len(before)] != list(before):
            problems.append(f"{kind} inputs were {list(before)}, are {list(after)}")
        problems += [
            p for name in before.keys() & after.keys() for p in _broken_socket(name, before[name], after[name])
        ]
    added = list(new["inputs"]["required"])[len(old["inputs"]["required"]) :]
    problems += [f"a new required input {name}" for name in added]
    if new["outputs"][: len(old["outputs"])] != old["outputs"]:
        problems.append(f"outputs were {old['outputs']}, are {new['outputs']}")
    return problems + [f"{key} changed" for key in ("category", "output_node") if old[key] != new[key]]


def _broken_socket(name: str, old: dict, new: dict) -> list[str]:
    options = old.get("options", [])
    if new.get("options", [])[: len(options)] != options:
        return [f"{name}: options were {options}, are {new.get('options')}"]
    same = {key: value for key, value in new.items() if key != "options"}
    if {key: value for key, value in old.items() if key != "options"} != same:
        return [f"{name}: was {old}, is {new}"]
    return []


def test_the_contract_holds(nodes: dict, golden: dict) -> None:
    assert broken(golden, nodes) == []


def test_every_node_is_in_the_golden_file(nodes: dict, golden: dict) -> None:
    assert nodes.keys() == golden.keys(), "run this test with HALFSAFE_WRITE_GOLDEN=1"
    assert nodes == golden, "something was added: run this test with HALFSAFE_WRITE_GOLDEN=1"


BREAKS = {
    "a node is gone": lambda nodes: nodes.pop("HalfsafeReport"),
    "an input is gone": lambda nodes: nodes["HalfsafeLoadDiffusionModel"]["inputs"]["required"].pop("compute"),
    "a type": lambda nodes: nodes["HalfsafeSaveModel"]["inputs"]["required"]["model"].update(type="CLIP"),
    "a default": lambda nodes: nodes["HalfsafeSaveModel"]["inputs"]["required"]["storage"].update(default="bf16"),
    "a new required input": lambda nodes: nodes["HalfsafeReport"]["inputs"]["required"].update(more={"type": "INT"}),
    "an option": lambda nodes: nodes["HalfsafeLoadVAE"]["inputs"]["required"]["dtype"]["options"].reverse(),
    "the order of outputs": lambda nodes: nodes["HalfsafeLayerRules"]["outputs"].reverse(),
}


@pytest.mark.parametrize("change", BREAKS)
def test_a_break_is_noticed(golden: dict, change: str) -> None:
    nodes = copy.deepcopy(golden)
    BREAKS[change](nodes)
    assert len(broken(golden, nodes)) == 1


def test_additions_are_no_break(golden: dict) -> None:
    nodes = copy.deepcopy(golden)
    nodes["HalfsafeLoadVAE"]["inputs"]["optional"]["more"] = {"type": "INT"}
    nodes["HalfsafeLoadVAE"]["inputs"]["required"]["dtype"]["options"].append("fp64")
    nodes["HalfsafeLoadVAE"]["outputs"].append(["STRING", "text"])
    nodes["HalfsafeNew"] = nodes["HalfsafeLoadVAE"]
    assert broken(golden, nodes) == []


def test_inputs_that_few_need_are_folded_away(server: Server) -> None:
    found = {}
    for name, info in server.object_info().items():
        inputs = [item for kind in ("required", "optional") for item in info["input"].get(kind, {}).items()]
        if name.startswith("Halfsafe") and (
            folded := {key for key, (_, *options) in inputs if options and options[0].get("advanced")}
        ):
            found[name] = folded
    assert found == ADVANCED
