"""The README is one screen, what it left out is one link away, and no link leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[3]
WORDS_BEFORE_DETAILS, WORDS_IN_ALL = 600, 800
CHARACTERS = {"README.zh.md": 1800}
DETAILS = ("## Read on", "## 继续阅读")
DOCUMENTS = sorted(path.relative_to(ROOT) for pattern in ("README*.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/README.md") for path in ROOT.glob(pattern))
LINK = re.compile(r"\]\(<?([^)>#]+?)>?(?:#[^)]*)?\)")
SYMPTOMS = {"README.md": ("black", "out of memory", "precision"), "README.zh.md": ("黑图", "显存不足", "精度")}


def prose(text: str) -> str:
    """A text without the addresses of its links and pictures and without table rules."""
    return re.sub(r"\]\([^)]*\)|^\|[-|]+\|$|[|*`#!\[]", " ", text, flags=re.MULTILINE)


@pytest.mark.parametrize("readme", SYMPTOMS)
def test_the_readme_is_one_screen(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    (details,) = [heading for heading in DETAILS if heading in text]
    if readme in CHARACTERS:
        assert len(re.sub(r"\s", "", prose(text))) <= CHARACTERS[readme]
        return
    assert len(prose(text.split(details)[0]).split()) <= WORDS_BEFORE_DETAILS
    assert len(prose(text).split()) <= WORDS_IN_ALL


@pytest.mark.parametrize("readme", SYMPTOMS)
def test_it_begins_with_a_picture_the_symptoms_and_how_to_install(readme: str) -> None:
    first, symptoms, install, *_ = re.split(r"^## .*$", (ROOT / readme).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert "docs/images/rescue.jpg" in first
    rows = [row for row in symptoms.splitlines() if row.startswith("| **")]
    assert len(rows) == len(SYMPTOMS[readme])
    assert all(word in row.lower() for word, row in zip(SYMPTOMS[readme], rows, strict=True))
    assert "comfy node install halfsafe" in install


def test_no_link_leads_nowhere() -> None:
    links = [(document, link) for document in DOCUMENTS for link in LINK.findall((ROOT / document).read_text(encoding="utf-8"))]
    local = [(document, link) for document, link in links if not link.startswith(("http://", "https://"))]
    assert [(str(document), link) for document, link in local if not (ROOT / document).parent.joinpath(link).exists()] == []


def test_the_readme_leads_to_every_page_of_docs() -> None:
    assert {path.name for path in ROOT.glob("docs/internals/*.md")} == {"calibration.md", "decisions.md", "drift.md", "failure-classes.md", "how-a-call-runs.md", "scaling.md"}
    for readme in SYMPTOMS:
        led = set(LINK.findall((ROOT / readme).read_text(encoding="utf-8")))
        pages = {re.sub(r"(\.zh)?\.md$", "", link) for link in led if link.startswith("docs/") and link.endswith(".md")}
        assert {re.sub(r"(\.zh)?\.md$", "", f"docs/{path.name}") for path in ROOT.glob("docs/*.md")} <= pages


@pytest.mark.parametrize("page", ["docs/nodes.md", "docs/nodes.zh.md"])
def test_every_workflow_is_listed(page: str) -> None:
    linked = {Path(link).stem for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")) if link.endswith(".json")}
    assert linked == {path.stem for path in (ROOT / "workflows").glob("*.json")}


@pytest.mark.parametrize("readme", SYMPTOMS)
def test_it_can_be_tried_by_two_commands_whose_cost_is_told_above_what_else_it_can_do(readme: str) -> None:
    (tried,) = [part for part in re.split(r"^## .*$", (ROOT / readme).read_text(encoding="utf-8"), flags=re.MULTILINE) if "scripts/demo.py" in part]
    assert {"python scripts/demo.py", "python scripts/test.py"} <= set(tried.splitlines())
    assert all(word in tried for word in ("3 GB", "6 GB", "--serve", "CPU")) and "GPU" in tried.strip().splitlines()[-1]


def test_that_nothing_was_measured_on_a_gpu_is_said_once_where_the_figures_are() -> None:
    said = [path.name for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")] if "was measured on a GPU yet" in path.read_text(encoding="utf-8")]
    assert said == ["numbers.md"]
