"""The first line of each help page says when to use the node and when not, and all lead to the one node to begin with."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).absolute().parents[3]
FOLDER = ROOT / "web" / "docs"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md"))
ONE_NODE = "HalfsafeAutoPrecision"
MOST_WORDS = 450
SHAPES = {
    "": re.compile(r"Use it (if|to|first)\b[^.]*(\.\d[^.]*)*\. Not (needed|for)\b.+\."),
    "zh": re.compile(r"适用于.[^。]+。.*不.*。"),
}


def first_line(page: str, language: str) -> str:
    path = FOLDER / page / f"{language}.md" if language else FOLDER / f"{page}.md"
    title, empty, line, after = path.read_text(encoding="utf-8").splitlines()[:4]
    assert title.startswith("# ") and not empty and not after, path
    return line


def test_the_first_line_says_when_to_use_the_node_and_when_not() -> None:
    lines = [(shape, first_line(page, language)) for language, shape in SHAPES.items() for page in PAGES]
    assert [line for shape, line in lines if not shape.fullmatch(line) or len(line) > 200] == []


def test_no_two_nodes_are_for_the_same() -> None:
    uses = [first_line(page, "").split(". Not")[0] for page in PAGES]
    assert len(set(uses)) == len(PAGES)
    assert [page for page, use in zip(PAGES, uses, strict=True) if use.startswith("Use it first")] == [ONE_NODE]


def test_guards_and_choices_send_back_to_the_one_node() -> None:
    for page in (
        "HalfsafeNaNGuard",
        "HalfsafeGuardVAE",
        "HalfsafeGuardCLIP",
        "HalfsafeComputeDtype",
        "HalfsafeReport",
        "HalfsafeAccumulation",
    ):
        assert "Not needed beside " in first_line(page, ""), page


def test_a_page_is_short_and_its_tables_of_inputs_and_outputs_have_two_columns() -> None:
    """ComfyUI's panel may be 250 pixels wide; what is longer is a page of docs/."""
    for page in PAGES:
        text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
        words = re.sub(r"^\|[-|]+\|$|[|*`#]", " ", text, flags=re.MULTILINE).split()
        assert len(words) <= MOST_WORDS, (page, len(words))
        assert "| Type |" not in text, page
