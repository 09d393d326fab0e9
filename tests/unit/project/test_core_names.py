"""What the nodes read of ComfyUI's modules stands in one file, and nothing reads comfy-kitchen's private attributes."""

import ast
import re

from support.core_names import CORE, NODES, module_attributes

ATTRIBUTES = {attribute for _, attribute in module_attributes()}
PRIVATE = re.compile(r"\b_qdata\b|\._params\b|\b_layout_cls\b")


def touched(code: str) -> list[str]:
    """Attributes of ComfyUI's modules that code reads, sets or names, those of its own objects left out."""
    nodes = list(ast.walk(ast.parse(code)))
    attributes = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES and ast.unparse(node.value) != "self"]
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if text.rpartition(".")[2] in ATTRIBUTES] + attributes


def test_attributes_of_comfyuis_modules_are_touched_in_one_file_alone() -> None:
    assert len(ATTRIBUTES) > 15 and len(touched("hasattr(module, '_v') or len(module.weight_function)")) == 2
    found = {path.name: touched(path.read_text(encoding="utf-8")) for path in NODES.rglob("*.py") if path != CORE}
    assert {name: names for name, names in found.items() if names} == {}


def test_no_file_reads_a_private_attribute_of_comfy_kitchens_tensors() -> None:
    assert [path.name for path in NODES.rglob("*.py") if PRIVATE.search(path.read_text(encoding="utf-8"))] == []
