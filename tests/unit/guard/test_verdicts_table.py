"""Verdicts are decided in the core alone: the files that call ComfyUI spell none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from halfsafe.precision.guard import verdicts
from halfsafe.precision.guard.verdicts import ADVICE, CLEAN
from support.shipped import ROOT

NAMES = {value for name, value in vars(verdicts).items() if name.isupper() and isinstance(value, str)}
TABLE = ROOT / "precision" / "guard" / "verdicts.py"


def spelled(path: Path) -> Iterator[str]:
    """The verdicts among the text constants of a file, docstrings and longer sentences left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"


def imported(path: Path) -> Iterator[str]:
    """The verdicts that a file imports by their names in the table."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("guard.verdicts"):
            yield from (alias.name for alias in node.names if isinstance(getattr(verdicts, alias.name), str))


def test_no_file_of_the_nodes_spells_or_imports_a_verdict() -> None:
    assert [found for path in sorted((ROOT / "nodes").rglob("*.py")) for found in (*spelled(path), *imported(path))] == []


def test_every_verdict_but_clean_has_advice() -> None:
    assert set(ADVICE) == NAMES - {CLEAN}
