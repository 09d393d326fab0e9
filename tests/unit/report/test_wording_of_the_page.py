"""The page's own words: every text the page shows is in each language's file, with the same values to fill in."""

import json
import re
from pathlib import Path

import pytest
from halfsafe.precision.modes import MODES
from halfsafe.precision.report.result import SENTENCES
from halfsafe.precision.report.schema import VERDICTS

ROOT = Path(__file__).absolute().parents[3]
LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir() if path.name != "en")
BADGE_WORDS = {"fp16 sums", "fp32 sums", "fast fp8 sums"}
KINDS = {"overflow", "nan", "weights", "input", "saturation", "canary", "drift"}
CALL = re.compile(r'\bt\("((?:[^"\\]|\\.)*)"')
VALUE = re.compile(r"\{\w+\}")


def words_of_the_page() -> set[str]:
    """Texts spelled in the page's code, and those it takes from the server: verdicts, kinds of events, modes, badges."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web").iterdir() if path.suffix in (".js", ".mjs"))
    verdicts = {verdict.replace("_", " ") for verdict in VERDICTS if verdict != "off"}
    return set(CALL.findall(code)) | verdicts | KINDS | BADGE_WORDS | {*SENTENCES} | {mode.label for mode in MODES.values()}


def words_in(language: str) -> dict[str, str]:
    return json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))["halfsafe"]


def test_the_pages_texts_are_found_in_its_code():
    assert len(words_of_the_page()) > 50 and "Copy as rules" in words_of_the_page()


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_the_pages_words_and_no_others(language):
    assert set(words_in(language)) == words_of_the_page()


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_fills_in_the_same_values(language):
    for english, text in words_in(language).items():
        assert text and set(VALUE.findall(text)) == set(VALUE.findall(english)), english
