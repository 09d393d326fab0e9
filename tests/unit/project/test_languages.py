"""Every language says what English says: the same keys, help pages and sections, with the same settings, figures and links.

A language is a folder of `locales/` and needs no code: `nodeDefs.json`, `settings.json` and `main.json` there, `web/docs/<node>/<language>.md`,
`README.<language>.md` and `docs/<page>.<language>.md` for the pages of `docs/` that the README leads a user to. A language that is not complete yet is refused here, so that its users do not meet half of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[3]
LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir() if path.name != "en")
PAGES = sorted(path.stem for path in (ROOT / "web" / "docs").glob("*.md"))
TOLD = ["README.md", *(f"docs/{page}.md" for page in ("black-images", "command-line", "devices", "nodes", "numbers"))]
TEXTS = [*TOLD, *(f"web/docs/{page}.md" for page in PAGES)]

TRANSLATED = re.compile(rf"\.({'|'.join(LANGUAGES)})\.md$")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)]+)\)")
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)*(?:e-?\d+)?(?![\w.]*\w)|(?<![\w.])\d+\.\d+(?=x )")
HEADING = re.compile(r"^(#+) ", re.MULTILINE)
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CELLS = re.compile(r"(?<!\\)\|")
NAME = re.compile(r"(?a:\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b)")


def translation_of(text: str, language: str) -> Path:
    english = ROOT / text
    return english.parent / (f"{english.stem}.{language}.md" if text in TOLD else f"{english.stem}/{language}.md")


def read_json(language: str, name: str) -> dict:
    return json.loads((ROOT / "locales" / language / name).read_text(encoding="utf-8"))


def shape(words: object) -> object:
    """Nested keys, and at each leaf whether there is a text."""
    return {key: shape(value) for key, value in words.items()} if isinstance(words, dict) else bool(words)


def figures(section: str) -> set[str]:
    """Numbers, without those that are part of a name such as fp16, and single digits, which a text may spell as words."""
    return {figure for figure in FIGURE.findall(section) if len(figure) > 1}


def names_in_tables(section: str) -> set[str]:
    """The inputs, options and dtypes in a section's tables, as far as a name tells itself by an underscore."""
    return {name for row in ROW.findall(section) for name in NAME.findall(row)}


def links(section: str) -> list[str]:
    """Where a section leads, whatever the language of the page there."""
    return [TRANSLATED.sub(".md", link) for link in LINK.findall(section)]


def sections(text: str) -> list[str]:
    """The text cut before each heading, without its fenced blocks, whose comments look like headings."""
    bare = FENCED.sub("", text)
    starts = [match.start() for match in HEADING.finditer(bare)]
    return [bare[start:end] for start, end in zip(starts, [*starts[1:], len(bare)], strict=True)]


def outline(text: str) -> list[tuple]:
    """Per section: the level of its heading, the rows of its tables, the names in them, and its links."""
    return [
        (HEADING.match(section).group(1), len(ROW.findall(section)), names_in_tables(section), sorted(links(section)))
        for section in sections(text)
    ]


def named(text: str) -> list[tuple[set[str], set[str]]]:
    """Per section: what stands in backticks, and the figures."""
    return [(set(CODE.findall(section)), figures(CODE.sub("", LINK.sub("", section)))) for section in sections(text)]


def test_every_translated_page_of_the_documents_is_compared() -> None:
    assert {path.name for path in ROOT.glob("docs/*.*.md")} == {
        f"{Path(text).stem}.{language}.md" for text in TOLD[1:] for language in LANGUAGES
    }


@pytest.mark.parametrize("text", TOLD)
def test_a_reader_of_one_language_stays_in_it(text: str) -> None:
    for language in LANGUAGES:
        path = translation_of(text, language)
        first, *rest = sections(path.read_text(encoding="utf-8"))
        assert (
            path.name in (ROOT / text).read_text(encoding="utf-8").splitlines()[2]
            and f"{Path(text).name})" in first.splitlines()[2]
        )
        assert [
            link for section in rest for link in LINK.findall(section) if link in TOLD or f"docs/{link}" in TOLD
        ] == []


def test_there_is_a_language_and_a_page_for_each_node() -> None:
    assert "zh" in LANGUAGES
    assert set(PAGES) == set(read_json("en", "nodeDefs.json"))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", ["nodeDefs.json", "settings.json"])
def test_a_language_has_the_keys_of_english(language: str, name: str) -> None:
    assert shape(read_json(language, name)) == shape(read_json("en", name))


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_names_the_nodes_category_and_that_of_the_settings(language: str) -> None:
    words = read_json(language, "main.json")
    page = (ROOT / "web" / "main.js").read_text(encoding="utf-8")
    subcategories = re.findall(r'category: \[PREFIX, "(\w+)", "(\w+)"\]', page)
    assert subcategories
    assert set(words) == {"halfsafe", "nodeCategories", "settingsCategories"}
    assert set(words["nodeCategories"]) == {"precision", "load", "guard", "measure", "expert"}
    assert set(words["settingsCategories"]) == {word for pair in subcategories for word in pair}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_sections_tables_and_links_of_english(language: str, text: str) -> None:
    path = translation_of(text, language)
    assert path.exists(), f"{path.relative_to(ROOT)} is missing"
    translated, english = path.read_text(encoding="utf-8"), (ROOT / text).read_text(encoding="utf-8")
    assert outline(translated) == outline(english)
    assert FENCED.findall(translated) == FENCED.findall(english)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_settings_and_figures_of_english(language: str, text: str) -> None:
    translated = named(translation_of(text, language).read_text(encoding="utf-8"))
    for (codes, numbers), section in zip(translated, sections((ROOT / text).read_text(encoding="utf-8")), strict=True):
        wanted_codes, wanted_numbers = named(section)[0]
        where = section.splitlines()[0]
        assert codes == wanted_codes, where
        assert numbers == wanted_numbers, where


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_help_page_has_each_input_by_its_label_and_its_id(language: str) -> None:
    labels = read_json(language, "nodeDefs.json")
    for node in PAGES:
        rows = ROW.findall(translation_of(f"web/docs/{node}.md", language).read_text(encoding="utf-8"))
        for name, words in labels[node]["inputs"].items():
            assert any(words["name"] in CELLS.split(row)[1] and name in row for row in rows), (
                f"{node}: {words['name']}, {name}"
            )


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_page_of_a_language_is_left_of_a_node_that_is_gone(language: str) -> None:
    assert {path.parent.name for path in (ROOT / "web" / "docs").glob(f"*/{language}.md")} <= set(PAGES)
