"""The names of the tests: each says which file of the product it tests, so that whoever edits that file finds it."""

from __future__ import annotations

import ast
from pathlib import Path

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


def test_the_next_core_is_asked_for_tests_that_exist() -> None:
    """pytest runs none of a tier where one of the names it is given is gone."""
    tree = ast.parse((ROOT / "scripts" / "test.py").read_text(encoding="utf-8"))
    (table,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEXT_CORE"
    )
    gone = []
    for file, names in table.items():
        module = ast.parse((ROOT / "tests" / "host" / file).read_text(encoding="utf-8"))
        there = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        gone += [f"{file}: {name}" for name in names if f"test_{name}" not in there]
    assert len(table) > 5 and gone == []


def session_fixtures(conftest: Path) -> dict[str, set[str]]:
    """Name of each session fixture -> names of the fixtures that it asks for."""
    found = {}
    for node in ast.parse(conftest.read_text(encoding="utf-8")).body:
        marks = getattr(node, "decorator_list", [])
        if any("pytest.fixture" in (text := ast.unparse(mark)) and "scope='session'" in text for mark in marks):
            found[node.name] = {argument.arg for argument in node.args.args}
    return found


def kept_of_another_folder(outer: dict[str, set[str]], inner: dict[str, set[str]]) -> set[str]:
    """The fixtures of an outer conftest that ask for one that an inner conftest replaces, and are not replaced there."""
    return {name for name, asked in outer.items() if asked & inner.keys() and name not in inner}


def test_no_session_fixture_keeps_what_another_folder_replaces() -> None:
    """pytest makes a session fixture once: with what the first folder that asked replaces, for the tests of every other one too."""
    conftests = {path.parent: session_fixtures(path) for path in (ROOT / "tests").rglob("conftest.py")}
    wrong = {
        f"{folder.relative_to(ROOT)}: {name}"
        for folder, inner in conftests.items()
        for above in folder.parents
        for name in kept_of_another_folder(conftests.get(above, {}), inner)
    }
    assert len(conftests[ROOT / "tests" / "host"]) > 5 and not wrong
    assert kept_of_another_folder({"wan": {"files"}, "call": {"wan"}}, {"files": set()}) == {"wan"}
