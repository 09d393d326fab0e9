"""Verdicts are decided in the core alone: the files that call ComfyUI spell none."""

from __future__ import annotations

import ast

from halfsafe.precision.guard import verdicts
from support.shipped import ROOT

VERDICTS = {"clean", *verdicts.ADVICE}


def test_no_file_of_the_nodes_spells_or_imports_a_verdict() -> None:
    nodes = [
        node
        for path in sorted((ROOT / "nodes").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    spelled = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    imports = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("guard.verdicts")
    ]
    imported = {str(getattr(verdicts, alias.name)) for node in imports for alias in node.names}
    assert imported and not (spelled | imported) & VERDICTS
