"""The size of the product: one sum of lines that bear code, and the tokens in them. Blank lines, comments and docstrings are free, and no room,
test or document has a limit of its own. The aim is 14,000 lines of 9.8 tokens."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

from support.shipped import ROOT, tracked_files

MOST_LINES = 16_759
MOST_TOKENS_A_LINE = 10.76
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def product() -> list[Path]:
    tops = ("precision/", "nodes/", "__init__.py", "__main__.py")
    return [ROOT / path for path in tracked_files() if path.suffix == ".py" and path.as_posix().startswith(tops)]


def docstring_lines(source: str) -> set[int]:
    """The numbers of the lines that a string by itself takes: docstrings, and those of attributes."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def size_of(source: str) -> tuple[int, int]:
    """Count (lines that bear code, tokens in them), as tinygrad's ``sz.py`` counts."""
    docstrings = docstring_lines(source)
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in NOT_CODE or token.start[0] in docstrings:
            continue
        tokens += 1
        lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines), tokens


def test_air_docstrings_and_comments_are_free() -> None:
    assert size_of(
        '"""Of a file."""\n\n# why\nx = 1  # one\n\n\ndef f():\n    """Of a function."""\n    return x\n'
    ) == (3, 10)


def test_the_product_keeps_to_its_size() -> None:
    sizes = [size_of(path.read_text(encoding="utf-8")) for path in product()]
    lines, tokens = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    print(f"{lines} lines that bear code, {tokens / lines:.2f} tokens a line")
    assert len(sizes) > 100
    assert lines <= MOST_LINES
    assert tokens / lines <= MOST_TOKENS_A_LINE
