"""What one must hold in mind to change the product, counted: each count may only fall. Lines of code and tokens a line are printed beside them,
without a limit."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.shipped import ROOT, tracked_files

AT_MOST = {
    "places that put a forward on a module": 4,
    "record types": 60,
    "public names": 662,
    "questions of format or scale": 0,
    "states of a module": 17,
    "states of a page's module": 4,
    "lines over 100 columns, in thousandths": 67,
}
"""What is counted -> how many there may be. A lower count is written here; a higher one names in its commit what it replaces."""
IS_STATE = re.compile(r"WeakKeyDictionary|ContextVar|threading\.|^\{\}$|^set\(\)$|^\[\]$|deque\(")
ASKS_FORMAT = re.compile(
    r"\bis_scaled\b|\.granularity\b|\.scale is None|\.scale is not None|\.format is None|\.format is not None"
)
ASKS_WEIGHT = re.compile(r"\.plain\b(?! import)|\.data\.dtype\b|\b(?:if|and|or|not) \w+\.tensors\b")
"""Of a weight: what the room of formats alone looks at."""
PAGE_STATE = re.compile(r"^(?:let|const) \w+ = (?:new (?:Map|Set|WeakMap|WeakSet)\(|\[\]|\{\})|^let ", re.MULTILINE)
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


@cache
def sources() -> tuple[str, ...]:
    found = [path for path in product() if path.parent != ROOT]
    assert len(found) > 100
    return tuple(path.read_text(encoding="utf-8") for path in found)


def format_questions() -> int:
    formats = ROOT / "precision/formats"
    outside = [path.read_text(encoding="utf-8") for path in product() if not path.is_relative_to(formats)]
    asked = [len(ASKS_FORMAT.findall(source)) for source in sources()]
    return sum(asked) + sum(len(ASKS_WEIGHT.findall(source)) for source in outside)


@cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(map(ast.parse, sources()))


def nodes() -> Iterator[ast.AST]:
    for tree in trees():
        yield from ast.walk(tree)


def is_forward(node: ast.AST) -> bool:
    """True for the name of a forward, and for a variable that holds it."""
    return (isinstance(node, ast.Constant) and node.value == "forward") or ast.unparse(node) == "method"


def puts_a_forward(node: ast.AST) -> bool:
    """True for ``(module, "forward", value)``, which a patch is, and for ``module.__dict__["forward"] = value``."""
    if isinstance(node, ast.Tuple):
        return len(node.elts) == 3 and is_forward(node.elts[1])
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(isinstance(target, ast.Subscript) and is_forward(target.slice) for target in targets)


def is_record(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def public_names() -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for tree in trees() for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"}


def module_states() -> Iterator[ast.AST]:
    for tree in trees():
        for node in tree.body:
            value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is not None and IS_STATE.search(ast.unparse(value)):
                yield node


def page_states() -> list[str]:
    pages = [ROOT / path for path in tracked_files() if path.parts[0] == "web" and path.suffix in (".js", ".mjs")]
    return [state for page in pages for state in PAGE_STATE.findall(page.read_text(encoding="utf-8"))]


def long_lines() -> int:
    lines = [line for source in sources() for line in source.splitlines()]
    return round(1000 * sum(len(line) > 100 for line in lines) / len(lines))


COUNTS = {
    "places that put a forward on a module": lambda: sum(map(puts_a_forward, nodes())),
    "record types": lambda: sum(map(is_record, nodes())),
    "public names": lambda: len(public_names()),
    "questions of format or scale": format_questions,
    "states of a module": lambda: len([*module_states()]),
    "states of a page's module": lambda: len(page_states()),
    "lines over 100 columns, in thousandths": long_lines,
}


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


@cache
def size_of_the_product() -> tuple[int, float]:
    """Count (lines that bear code, tokens a line)."""
    sizes = [size_of(source) for source in sources()]
    lines = sum(size[0] for size in sizes)
    return lines, sum(size[1] for size in sizes) / lines


@pytest.mark.parametrize("what", COUNTS)
def test_a_count_of_ideas_only_falls(what: str) -> None:
    found = COUNTS[what]()
    lines, tokens = size_of_the_product()
    print(f"{found} {what}, at most {AT_MOST[what]}; {lines} lines of code, {tokens:.2f} tokens a line")
    assert found <= AT_MOST[what], "more than before: the commit that raises a count says what goes for it"
    is_share = what.endswith("in thousandths")  # a share moves with every file that grows or goes
    assert is_share or found == AT_MOST[what], "fewer than written: write the new count in AT_MOST"
