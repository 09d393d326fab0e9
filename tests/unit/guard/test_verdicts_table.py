"""Verdicts are decided in the core alone: the files that call ComfyUI spell none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from halfsafe.precision.guard import verdicts
from halfsafe.precision.report.schema import VERDICTS
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


def test_the_table_has_every_verdict_of_the_report() -> None:
    assert set(VERDICTS) == NAMES | {"off"}


@pytest.mark.parametrize("path", sorted((ROOT / "nodes").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_of_the_nodes_spells_or_imports_a_verdict(path: Path) -> None:
    assert [*spelled(path), *imported(path)] == []


def test_the_guard_of_the_core_spells_them_in_its_table_alone() -> None:
    found = [one for path in sorted(TABLE.parent.glob("*.py")) if path != TABLE for one in spelled(path)]
    assert found == []
    assert len(list(spelled(TABLE))) == len(NAMES)
