"""The rooms of the source: who may import whom. Read from the source, so that nothing has to be imported."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shipped import ROOT

FLOORS = (
    {"base"},
    {"files"},
    {"formats", "arithmetic"},
    {"devices"},
    {"make"},
    {"plan"},
    {"report"},
    {"guard", "check", "study", "commands"},
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
HOST_ROOMS = ("comfyui", "replay", "compute", "accumulation", "lora", "load", "guard", "check", "reporting", "study")
"""Those of ``nodes/host``, from the bottom: none imports one that stands after it."""


def _imports(path: Path) -> Iterator[tuple[str, ...]]:
    """The parts of every module that a file imports from this pack, those for type checkers left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing = {id(node) for test in ast.walk(tree) if _is_for_types(test) for node in ast.walk(test)}
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing:
            base = here[: len(here) - node.level] + tuple((node.module or "").split(".") if node.module else ())
            yield from ((*base, alias.name) for alias in node.names)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _room(parts: tuple[str, ...], base: tuple[str, ...] = ("precision",)) -> str:
    """The room or file below ``base`` that a module belongs to; empty for what is elsewhere."""
    return parts[len(base)] if parts[: len(base)] == base and len(parts) > len(base) else ""


def test_the_core_imports_from_its_own_floor_or_below() -> None:
    upward = []
    for path in sorted((ROOT / "precision").rglob("*/*.py")):
        floor = FLOOR_OF[_room(path.relative_to(ROOT).with_suffix("").parts)]
        targets = [target for target in _imports(path) if target[0] != "precision" or FLOOR_OF[_room(target)] > floor]
        upward += [f"{path.relative_to(ROOT)} imports {'.'.join(target)}" for target in targets]
    assert upward == []


@pytest.mark.parametrize("room", HOST_ROOMS)
def test_a_room_of_the_host_imports_from_those_below(room: str) -> None:
    base = ("nodes", "host")
    above = set(HOST_ROOMS[HOST_ROOMS.index(room) + 1 :])
    for path in ROOT.joinpath(*base, room).glob("*.py"):
        assert above & {_room(target, base) for target in _imports(path)} == set(), path.name


@pytest.mark.parametrize("base", [("precision",), ("nodes", "host")])
def test_rooms_import_in_no_circle(base: tuple[str, ...]) -> None:
    graph: dict[str, set[str]] = {}
    for path in ROOT.joinpath(*base).rglob("*.py"):
        room = _room(path.relative_to(ROOT).with_suffix("").parts, base)
        graph.setdefault(room, set()).update({_room(target, base) for target in _imports(path)} - {room})
    assert sum(map(len, graph.values())) > 3 and _circles(graph) == {}


def test_a_public_name_is_defined_once() -> None:
    """Of the functions and classes at the top of a file: a reader who searches for one finds the one that is meant."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in [*(ROOT / "precision").rglob("*.py"), *(ROOT / "nodes").rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_scripts_and_benchmarks_run_what_they_have_and_import_in_no_circle() -> None:
    files = {_name(path): path for folder in ("scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    assert len(files) > 25 and {"setup.environment", "benchmarks.reporting", "demo"} <= files.keys()
    assert all(
        b'if __name__ == "__main__"' in code for code in map(Path.read_bytes, files.values()) if b"\ndef main(" in code
    )
    graph = {name: {one for one in _plain_imports(path) if one in files} for name, path in files.items()}
    assert (
        "benchmarks.guard" in graph["benchmarks.compute"]
        and "setup.machine" in graph["benchmarks.host"]
        and _circles(graph) == {}
    )


def _name(path: Path) -> str:
    """The name that a file of `scripts/` or `benchmarks/` is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("scripts.")


def _circles(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of a graph once everything that reaches no circle is taken off."""
    while leaves := {name for name in graph if not graph[name] & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    return graph


def _plain_imports(path: Path) -> Iterator[str]:
    """The modules that a file may import, relative ones by their whole name; each name of a package counts as one."""
    package = _name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
