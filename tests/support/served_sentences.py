"""The sentences that the pack words while it runs in ComfyUI, read from its code: `{0}`, `{1}` stand for an f-string's values.

Reasons, notes, advice, errors and what guards found: all that a page may draw. A new module is read without being named here.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
OUTSIDE_OF_COMFYUI = ("precision/commands",)
"""The command line."""
TEXTS_AND_PICTURES = (
    "precision/study/analysis_text.py", "precision/study/charts.py", "precision/report/draw.py", "precision/study/tradeoffs_text.py",
    "precision/report/report_chart.py", "precision/report/view.py", "precision/report/report_text.py", "precision/report/doctor.py",
)  # fmt: skip
"""What a STRING or IMAGE output holds, which stays as it was made."""
WORD = re.compile(r"(?<![\w=.])[A-Za-z][a-z]+(?![\w=])")
WORDS = 2
CODE = re.compile(r"\\\S|\||\(\?|^[^ ]*$")
"""Regular expressions, paths and names."""
UNSAID = {"Schema", "compile", "define"}
"""What takes texts that the page has from nodeDefs.json, or that are patterns or an operator's types."""


def served_sentences() -> set[str]:
    """Every text of two words or more in what runs in ComfyUI, but docstrings, annotations, log lines and the nodes' own labels."""
    labels = list(labels_in(json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules()]
    said = {text for tree in trees for text in texts_of(tree) if is_sentence(text)} | {text for tree in trees for text in error_frames(tree)}
    return {text for text in said if not CODE.search(text) and not is_label(text, labels)}


def is_sentence(text: str) -> bool:
    """Whether a text has enough words, one of them in lower case: others are names."""
    words = WORD.findall(re.sub(r"\{\w*\}", " ", text))
    return len(words) >= WORDS and any(word.islower() for word in words)


def is_label(text: str, labels: list[str]) -> bool:
    """Whether nodeDefs.json has a text, or the sentence that a text is, in what a node and its inputs are labelled with."""
    return text in labels or (text.endswith(".") and any(text in label for label in labels))


def error_frames(tree: ast.AST) -> set[str]:
    """What the classes of errors put around every problem, in a word or more."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and any("Error" in ast.unparse(base) for base in node.bases)]
    return {text for node in classes for text in texts_of(node) if re.search(r"[A-Za-z]{4,}", re.sub(r"\{\w*\}", " ", text))}


def modules() -> list[Path]:
    skipped = [ROOT / name for name in (*OUTSIDE_OF_COMFYUI, *TEXTS_AND_PICTURES)]
    paths = [path for package in ("precision", "nodes") for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in paths if not any(path.is_relative_to(folder) for folder in skipped)]


def labels_in(words: object) -> Iterator[str]:
    if isinstance(words, dict):
        for inner in words.values():
            yield from labels_in(inner)
    else:
        yield str(words)


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts and f-strings below a node, without what no page shows."""
    if is_docstring(tree) or is_log(tree) or is_unsaid(tree):
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
    """Whether this is written to the log alone: what ``logger`` is given, and a ``__repr__``, which the log at debug prints."""
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "repr_of")
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"


def is_unsaid(node: ast.AST) -> bool:
    """Whether this is a call of one of :data:`UNSAID`, or a keyword that labels a node's input."""
    name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
    return name in UNSAID or (isinstance(node, ast.keyword) and node.arg in ("tooltip", "display_name"))
