"""The sentences that reports and guards are worded with, read from the code: `{0}`, `{1}` stand for an f-string's values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
WORDED_IN = (
    "precision/plan/accumulation.py", "precision/plan/compute.py", "precision/plan/goal.py", "precision/plan/loaded.py",
    "precision/plan/presets.py", "precision/plan/storage.py", "precision/plan/weights.py", "precision/devices/detect.py",
    "precision/devices/profiles.py", "precision/guard/drift.py", "precision/guard/verdicts.py", "precision/guard/wording.py",
    "nodes/host/report.py", "nodes/host/run/accumulation.py", "nodes/host/lora/patcher.py", "nodes/host/guard/drift.py",
    "nodes/host/guard/transfers.py",
)  # fmt: skip
"""The modules that say why a layer is stored and computed as it is, what to note, and what a guard found."""
ERRORS_SHOWN = "precision/plan/rules.py"
"""The module whose errors the page shows, line by line, while rules are written."""
WORD = re.compile(r"(?<![\w=.])[a-z]{2,}(?![\w=])")
WORDS = 3


def served_sentences() -> set[str]:
    """Every text of three words or more in those modules, but docstrings, annotations, log lines and errors; and the errors that the page shows."""
    found = [text for name in WORDED_IN for text in texts_of(tree_of(name))]
    raised = [text for node in ast.walk(tree_of(ERRORS_SHOWN)) if named(node) == "RuleError" for text in texts_of(node)]
    return {text for text in found if words_in(text) >= WORDS} | {text for text in raised if words_in(text)}


def words_in(text: str) -> int:
    return len(WORD.findall(re.sub(r"\{\w*\}", " ", text)))


def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def named(node: ast.AST) -> str:
    """Return what a call calls."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts and f-strings below a node, without what is no part of a report."""
    if isinstance(tree, ast.Raise) or is_docstring(tree) or is_log(tree):
        return
    if isinstance(tree, (ast.JoinedStr, ast.Constant)):
        yield from [template_of(tree)] if isinstance(tree, ast.JoinedStr) or isinstance(tree.value, str) else []
        tree = ast.Module([part.value for part in getattr(tree, "values", ()) if isinstance(part, ast.FormattedValue)], [])
    for child in ast.iter_child_nodes(tree):
        yield from texts_of(child)


def template_of(text: ast.JoinedStr | ast.Constant) -> str:
    """Write a text with a number in braces for each value, without the joint it begins or ends with."""
    whole = text.value if isinstance(text, ast.Constant) else "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in text.values)
    numbers = iter(range(whole.count("{}")))
    return re.sub(r"\{\}", lambda _: f"{{{next(numbers)}}}", whole).strip(" ;")


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"
