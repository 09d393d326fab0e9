"""Code that packs several steps into one expression is refused: a reader has to unpack it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from support.shipped import ROOT

from .test_ideas import product

BRANCHES = (ast.IfExp, ast.BoolOp)
TRUTHS = (ast.Compare, ast.BoolOp)
MOST_OF_THREE = 37


def conditions(tree: ast.AST) -> set[int]:
    """The ids of all nodes inside of conditions, where ``:=`` saves a line that would only name what is asked."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            found.append(node.test)
        elif isinstance(node, ast.comprehension):
            found += node.ifs
    return {id(inner) for condition in found for inner in ast.walk(condition)}


def packed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each place of a file."""
    inside = conditions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len({type(operator) for operator in node.ops}) > 1:
            yield node.lineno, "a comparison that mixes operators"
        elif isinstance(node, ast.Starred) and isinstance(node.value, BRANCHES):
            yield node.lineno, "a star of a condition"
        elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.iter, ast.IfExp):
            yield node.iter.lineno, "a loop over a condition"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, TRUTHS):
            yield node.lineno, "a product with a truth value"
        elif isinstance(node, ast.NamedExpr) and id(node) not in inside:
            yield node.lineno, "an assignment inside of an expression that is no condition"


@pytest.mark.parametrize(
    "source", ["a < b in c", "f(*([x] if y else []))", "for x in y if z else (): pass", "'s' * (n > 1)", "f(x := 1)"]
)
def test_each_kind_is_seen(source):
    assert list(packed(ast.parse(source)))


def test_no_step_of_the_product_is_packed_into_another():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in product()
        for line, what in packed(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_assignments_of_three_values_on_one_line_become_fewer():
    """Some name one thing in parts: a decision and its reason, the words of a scale. A new one has a line for each value."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in product()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        if len(node.value.elts) > 2
    ]
    assert len(found) <= MOST_OF_THREE, "\n".join(found)
