"""The budget of lines. A sum here only falls, and a room grows by less than others shrink: whoever adds says in the CHANGELOG or the
commit what went for it. The aim is 21,000 lines of product, 31,500 of tests and 4,600 of their support."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from support.shipped import ROOT, tracked_files

MOST_LINES = {
    "precision/base": 778,
    "precision/files": 519,
    "precision/formats": 1859,
    "precision/devices": 856,
    "precision/make": 506,
    "precision/plan": 1864,
    "precision/arithmetic": 1685,
    "precision/guard": 1422,
    "precision/check": 167,
    "precision/study": 990,
    "precision/report": 839,
    "precision/commands": 766,
    "nodes/host/comfyui": 939,
    "nodes/host/replay": 350,
    "nodes/host/compute": 1214,
    "nodes/host/accumulation": 345,
    "nodes/host/lora": 512,
    "nodes/host/load": 1488,
    "nodes/host/guard": 1266,
    "nodes/host/check": 237,
    "nodes/host/reporting": 476,
    "nodes/host/study": 554,
    "nodes": 1117,
}
MOST = {"product": 20797, "tests": 31493, "tests/support": 4594, "benchmarks": 2364, "scripts": 3_400}
MOST_WORDS, MOST_RESULTS, MOST_SMALL, SMALL = 30_000, 12, 15, 40
MOST_RIDDLES = 0.05
LONGEST, MOST_FILES = 400, 14
PRONOUN = re.compile(r"\b(what|that|which|those|one|ones|it|this)\b", re.IGNORECASE)


def python_files(*tops: str) -> list[Path]:
    return [ROOT / path for path in tracked_files() if path.suffix == ".py" and path.as_posix().startswith(tops)]


def lines(files: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def product() -> list[Path]:
    return python_files("precision/", "nodes/", "__init__.py", "__main__.py")


def room_of(path: Path) -> str:
    """The longest room of the table that a file lies in."""
    name = path.relative_to(ROOT).as_posix()
    return max((room for room in MOST_LINES if name.startswith(f"{room}/")), key=len, default="")


def test_each_room_keeps_to_its_budget() -> None:
    taken = dict.fromkeys(MOST_LINES, 0)
    for path in product():
        if room := room_of(path):
            taken[room] += lines([path])
    assert {room: count for room, count in taken.items() if count > MOST_LINES[room]} == {}
    without = {path.relative_to(ROOT).as_posix() for path in product() if not room_of(path)}
    assert without <= {"__init__.py", "__main__.py", "precision/__init__.py"}


@pytest.mark.parametrize("what", MOST)
def test_the_sums_keep_to_theirs(what: str) -> None:
    files = product() if what == "product" else python_files(f"{what}/")
    assert 0 < lines(files) <= MOST[what]


def test_documents_and_results_keep_to_theirs() -> None:
    english = [ROOT / path for path in tracked_files() if path.suffix == ".md" and not path.name.endswith("zh.md")]
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in english) <= MOST_WORDS
    assert sum(path.as_posix().startswith("benchmarks/results/") for path in tracked_files()) <= MOST_RESULTS


def test_whoever_opens_a_file_reads_it_whole() -> None:
    sources = [path for path in tracked_files() if path.suffix in (".py", ".js") and path.parts[0] != "tests"]
    lengths = {str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources}
    assert len(lengths) > 100 and {name: count for name, count in lengths.items() if count > LONGEST} == {}


def test_no_room_is_crowded() -> None:
    rooms = Counter(path.parent.relative_to(ROOT).as_posix() for path in product())
    assert {room: count for room, count in rooms.items() if count > MOST_FILES} == {}


def test_few_files_are_small() -> None:
    small = [path.relative_to(ROOT).as_posix() for path in product() if path.name != "__init__.py" and lines([path]) < SMALL]
    assert len(small) <= MOST_SMALL, small


def test_a_docstring_stands_alone() -> None:
    """Its first sentence repeats the noun: few have two or more pronouns."""
    found, riddles = 0, []
    for path in product():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (docstring := ast.get_docstring(node)):
                found += 1
                sentence = re.split(r"(?<=[.:;])\s", docstring)[0]
                if len(PRONOUN.findall(sentence)) > 1:
                    riddles.append(f"{path.relative_to(ROOT)}:{node.lineno} {sentence}")
    assert len(riddles) <= MOST_RIDDLES * found, "\n".join(riddles)
