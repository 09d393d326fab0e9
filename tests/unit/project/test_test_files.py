"""The names of the tests: each says which file of the product it tests, so that whoever edits that file finds it."""

from __future__ import annotations

import ast

from support.shipped import ROOT

THEMES = ("host/compile", "host/cuda", "host/device", "host/graph", "unit/project", "browser", "gpu")
"""Folders of tests that go through the whole product; the folder's name says what they hold."""
PRODUCT = {path.stem for folder in ("precision", "nodes") for path in (ROOT / folder).rglob("*.py")} - {"__init__"} | {
    "__main__"
}
TESTS = [path.relative_to(ROOT / "tests") for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def names_a_file(test: str) -> bool:
    """Whether `test_<file>.py` or `test_<file>_<theme>.py` names a file of the product."""
    words = test.removeprefix("test_").removesuffix(".py")
    return any(words == name or words.startswith(f"{name}_") for name in PRODUCT)


def test_a_name_that_tells_nothing_is_seen() -> None:
    assert names_a_file("test_causes.py") and names_a_file("test_causes_inputs.py")
    assert not names_a_file("test_hunt.py") and not names_a_file("test_causeless.py")


def test_a_test_is_named_for_the_file_it_tests() -> None:
    """Call it test_<file>.py or test_<file>_<theme>.py, after a file of precision/ or nodes/."""
    assert [str(path) for path in TESTS if path.parent.as_posix() not in THEMES and not names_a_file(path.name)] == []


def test_no_theme_stands_for_a_folder_that_is_gone() -> None:
    assert [theme for theme in THEMES if not list((ROOT / "tests" / theme).glob("test_*.py"))] == []


def test_the_guide_names_every_file_of_support() -> None:
    guide = (ROOT / "tests" / "support" / "README.md").read_text(encoding="utf-8")
    assert [path.stem for path in (ROOT / "tests" / "support").glob("*.py") if f"`{path.stem}`" not in guide] == []


def reads_allowed() -> set[str]:
    """The "file" and "file.function" of the product that the host's tests let read a tensor back, from their conftest."""
    tree = ast.parse((ROOT / "tests" / "host" / "conftest.py").read_text(encoding="utf-8"))
    sets = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Set)]
    return {
        element.value
        for each in sets
        for element in each.elts
        if isinstance(element, ast.Constant) and "/" in element.value
    }


def test_a_read_is_allowed_only_to_functions_that_exist() -> None:
    """A name that is gone would allow nothing, and its function's reads fail far away under another name."""
    missing = []
    for allowed in reads_allowed():
        file, _, function = allowed.partition(".")
        paths = [path for folder in ("precision", "nodes/host") for path in (ROOT / folder).glob(f"{file}.py")]
        functions = {
            node.name
            for path in paths
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
        if not paths or (function and function not in functions):
            missing.append(allowed)
    assert len(reads_allowed()) > 10 and missing == []
