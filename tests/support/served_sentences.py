"""The sentences that the pack words while it runs in ComfyUI, read from its code.

Reasons, notes, advice, errors and what guards found: all that a page may draw. A new module is read without being named here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
OUTSIDE_OF_THE_PAGE = ("precision/commands", "precision/base/debug_log.py", "nodes/host/comfyui/bodies.py")
"""The command line, a line for the log, and answers to programs that send what the page does not."""
TEXTS_AND_PICTURES = (
    "precision/study/analysis_text.py", "precision/study/charts.py", "precision/report/draw.py", "precision/study/tradeoffs_text.py",
    "precision/report/report_chart.py", "precision/report/view.py", "precision/report/report_text.py", "precision/report/doctor.py",
    "precision/report/model_card.py",
)  # fmt: skip
"""What a STRING or IMAGE output, or a file beside a saved model, holds, which stays as it was made."""
WORD = re.compile(r"(?<![\w=.])[A-Za-z][a-z]+(?![\w=])")
WORDS = 2
CODE = re.compile(r"\\\S|\||\(\?|^[^ ]*$")
"""Regular expressions, paths and names."""
UNSAID = {"schema", "compile", "define"}
"""What takes words to search a node by, patterns, or an operator's types."""


def served_sentences() -> set[str]:
    """Every text of two words or more in what runs in ComfyUI, but docstrings, annotations, log lines and the nodes' own labels; and every template of a message."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules()]
    said = {text for tree in trees for text in texts_of(tree) if is_sentence(text) and not CODE.search(text)}
    return said | {text for tree in trees for text in templates_in(tree)}


def templates_in(tree: ast.AST) -> Iterator[str]:
    """Yield the templates that are written where a message is made, and those that join messages; a space or a line's end is the same in each language."""
    for call in ast.walk(tree):
        name = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
        if name == "Message":
            yield from (
                part.value
                for part in ast.walk(call.args[0])
                if isinstance(part, ast.Constant)
                and isinstance(part.value, str)
                and part.value not in ("{0} {1}", "{problem} {advice}")
            )
        if name == "joined" and len(call.args) == 2 and call.args[1].value.strip():
            yield f"{{0}}{call.args[1].value}{{1}}"


def sentences_without_template() -> set[str]:
    """Every f-string of two words or more that a page may draw: its values cannot be told from its words."""
    found = set()
    for path in modules():
        for text in shown_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(text, ast.JoinedStr):
                words = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in text.values)
                found |= (
                    {f"{path.relative_to(ROOT)}:{text.lineno}: {words}"}
                    if is_sentence(words) and not CODE.search(words)
                    else set()
                )
    return found


def is_sentence(text: str) -> bool:
    """Whether a text has enough words, one of them in lower case: others are names."""
    words = WORD.findall(re.sub(r"\{\w*\}", " ", text))
    return len(words) >= WORDS and any(word.islower() for word in words)


def modules() -> list[Path]:
    skipped = [ROOT / name for name in (*OUTSIDE_OF_THE_PAGE, *TEXTS_AND_PICTURES)]
    paths = [path for package in ("precision", "nodes") for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in paths if not any(path.is_relative_to(folder) for folder in skipped)]


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts below a node, without what no page shows, and without the joint that they begin or end with."""
    yield from (
        node.value.strip(" ;")
        for node in shown_nodes(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def shown_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it that a page may show; of an f-string, no part."""
    if is_docstring(tree) or is_log(tree) or is_unsaid(tree):
        return
    yield tree
    for child in [] if isinstance(tree, ast.JoinedStr) else ast.iter_child_nodes(tree):
        yield from shown_nodes(child)


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_log(node: ast.AST) -> bool:
    """Whether this is written to the log alone: what ``logger`` is given, and a ``__repr__``, which the log at debug prints."""
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "repr_of")
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "logger"
    )


def is_unsaid(node: ast.AST) -> bool:
    """Whether this is a call of one of :data:`UNSAID`."""
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in UNSAID
