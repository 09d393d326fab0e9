"""A verdict is a row of `precision/guard/verdicts.py`: no other file of the product compares with its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import get_args

import pytest
from halfsafe.precision.guard import verdicts
from halfsafe.precision.guard.verdicts import VERDICTS
from halfsafe.precision.report.schema import Verdict
from support.shipped import ROOT, tracked_files

TABLE = {"precision/guard/verdicts.py", "precision/report/schema.py"}
EXCEPT = {"precision/report/report_text.py": {"clean", "stopped"}}
"""File -> names it compares with: the room of reports is above the guard's and may not import its table; it words a guard that checked no call,
and a run that ended before its result. Any other verdict is shown by its name."""
COMMENT = re.compile(r"/\*.*?\*/|(?<![:\w])//[^\n]*", re.DOTALL)
NAMES = "|".join(VERDICTS)
IN_PAGE = re.compile(rf"""(?<!\bt\()["'`]({NAMES})["'`]|[{{,]\s*({NAMES}):|=\s*({NAMES})\]""")
"""A name of a verdict that is not a word for people: in quotes, as a key of a table, or in a selector of a style."""


def spelled(node: ast.AST | None) -> set[str]:
    """The verdicts among a constant, or the items of a tuple, list or set."""
    values = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return {value.value for value in values if isinstance(value, ast.Constant) and value.value in [*VERDICTS]}


def compared(source: str) -> Iterator[str]:
    """Names of verdicts that code compares with, matches, or has a table of."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        else:
            sides = (
                node.keys if isinstance(node, ast.Dict) else [node.value] if isinstance(node, ast.MatchValue) else []
            )
        yield from (name for side in sides for name in spelled(side))


def in_page(source: str) -> set[str]:
    return {name for names in IN_PAGE.findall(COMMENT.sub("", source)) for name in names if name}


def test_no_python_file_but_the_table_compares_with_a_verdict() -> None:
    files = [
        path.as_posix() for path in tracked_files() if path.parts[0] in ("precision", "nodes") and path.suffix == ".py"
    ]
    found = {path: {*compared((ROOT / path).read_text(encoding="utf-8"))} for path in files if path not in TABLE}
    assert len(files) > 100 and {path: names for path, names in found.items() if names} == EXCEPT


def test_no_file_of_the_page_compares_with_a_verdict() -> None:
    files = [
        path.as_posix() for path in tracked_files() if path.parts[0] == "web" and path.suffix in (".js", ".mjs", ".css")
    ]
    found = {path: in_page((ROOT / path).read_text(encoding="utf-8")) for path in files}
    assert len(files) > 10 and {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("code", [
    'guard.verdict === "stopped"', "{ bad_input: 1 }", '.hs[data-verdict="clean"]', ".hs[data-verdict=clean]", "case 'recovered':",
])  # fmt: skip
def test_a_comparison_in_the_page_is_found(code: str) -> None:
    assert len(in_page(code)) == 1 and not in_page(f"/** {code} */") and not in_page('t("stopped") event.recovered')


@pytest.mark.parametrize("code", [
    'x == "stopped"', '"clean" != x', 'x in ("bad_input", y)', '{"recovered": 1}', 'match x:\n    case "clean": pass',
])  # fmt: skip
def test_a_comparison_in_python_is_found(code: str) -> None:
    assert len([*compared(code)]) == 1 and not [*compared('log.note("stopped", rows["clean"])')]


def test_every_verdict_has_a_row_with_each_field() -> None:
    assert list(VERDICTS) == [*get_args(Verdict)]
    styles = (ROOT / "web/halfsafe.css").read_text(encoding="utf-8")
    for name, row in VERDICTS.items():
        assert row.cause and bool(row.advice) == bool(row.rank), f"{name} has no words"
        assert row.cured == (row.tone != "bad") and (row.tone == "good") == (row.rank == verdicts.NOTHING_FOUND), name
        assert f'.hs-verdict[data-tone="{row.tone}"]' in styles, name
        assert not row.cure or len(row.cure) < len(row.advice), f"the short cure of {name} is no shorter"


def test_the_page_reads_each_field_that_is_sent_of_a_verdict() -> None:
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web").glob("*.mjs"))
    sent = {key for row in VERDICTS.values() for key in row.shown()}
    [declared] = re.findall(r"@typedef \{\{(.*)\}\} About\b", page)
    assert {*re.findall(r"(\w+):", declared)} == sent


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
    assert imported and not (spelled | imported) & {*VERDICTS}
