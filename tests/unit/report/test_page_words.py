"""The page's own words: every text the page shows is in each language's file, with the same values to fill in."""

import ast
import functools
import json
import re
from pathlib import Path

import pytest
from halfsafe.precision.base.message import messages_in
from halfsafe.precision.base.modes import MODES
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from halfsafe.precision.guard import verdicts
from halfsafe.precision.report import doctor, result
from halfsafe.precision.study.analysis_text import EXACT, HEAD, NO_ERROR
from halfsafe.precision.study.sensitivity import BARRED, CHOSEN, KEPT, PINNED, UNUSED
from halfsafe.precision.study.tradeoffs_text import NOISY, REFERENCE, TABLE
from support.page_words import said
from support.served_sentences import sentences_without_template, served_sentences, templates_in, texts_of

ROOT = Path(__file__).absolute().parents[3]
LANGUAGES = sorted(path.name for path in (ROOT / "locales").iterdir() if path.name != "en")
BADGE_WORDS = {"guarded", "fp16 sums", "fp32 sums", "fast fp8 sums"}
INPUTS = {"latent", "noise", "conditioning", "sampler", "ControlNet output"}
KINDS = {"overflow", "nan", "weights", "input", "saturation", "canary", "drift"}
CALL = re.compile(r'\bt\("((?:[^"\\]|\\.)*)"')
VALUE = re.compile(r"\{\w+\}")


@functools.cache
def words_of_the_page() -> set[str]:
    """Texts spelled in the page's code, and those it takes from the server: verdicts, kinds of events, modes, badges, reasons."""
    code = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "web").iterdir() if path.suffix in (".js", ".mjs")
    )
    shown = {verdict.replace("_", " ") for verdict in verdicts.VERDICTS}
    shown |= {row.cause for row in verdicts.VERDICTS.values()}
    tables = {*HEAD, *TABLE, NOISY, REFERENCE, NO_ERROR, EXACT, BARRED, CHOSEN, KEPT, PINNED, UNUSED}
    given = {*verdicts.ENCODER_INPUTS, *(name for name, _ in verdicts.ENCODER_INPUTS.values())} | INPUTS
    templates = {text for text in vars(result).values() if isinstance(text, str) and "{" in text}
    fixed = templates | tables | given | KINDS | BADGE_WORDS | {mode.label for mode in MODES.values()}
    return set(CALL.findall(code)) | shown | fixed | guards_sentences() | served_sentences() | titles_of_the_demo()


def guards_sentences() -> set[str]:
    """The fixed sentences of guards: what to do, and what a verdict rests on; those with values filled in are not."""
    found = {
        text
        for text in sentences_in([*(value for name, value in vars(verdicts).items() if not name.startswith("__"))])
        if text.endswith((".", ":"))
    }
    return {text for text in found if "{}" not in text and "{0}" not in text}


def sentences_in(value: object) -> set[str]:
    """Every text in nested values, and in what a kind of call is worded with."""
    if isinstance(value, str):
        return {*getattr(value, "sentences", ())} or {value}
    if isinstance(value, verdicts.Wording):
        return sentences_in([*vars(value).values()])
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {text for one in values for text in sentences_in(one)}


def titles_of_the_demo() -> set[str]:
    graph = json.loads((ROOT / "web" / "show_me.json").read_text(encoding="utf-8"))
    return {node["title"] for node in graph["nodes"] if "title" in node}


def words_in(language: str) -> dict[str, str]:
    return json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))["halfsafe"]


def test_sentences_are_read_from_the_code():
    code = """
def why(name, held):
    '''Say why a layer is kept.'''
    logger.info("this line is for the log")
    if not held:
        raise ValueError(f"{name} is held in no dtype that is known")
    return joined([Message("kept in {0}: {1} is too wide", held, name), "as in the file"], "; ")
"""
    tree = ast.parse(code)
    assert {*texts_of(tree)} == {"kept in {0}: {1} is too wide", "as in the file", ""}
    assert {*templates_in(tree)} == {"kept in {0}: {1} is too wide", "{0}; {1}"}


def test_a_sentence_with_values_keeps_its_template():
    assert sentences_without_template() == set()


def test_the_pages_texts_are_found_in_its_code():
    assert len(words_of_the_page()) > 50 and "Copy as rules" in words_of_the_page()


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_the_pages_words_and_no_others(language):
    assert set(words_in(language)) == words_of_the_page()


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_fills_in_the_same_values(language):
    for english, text in words_in(language).items():
        assert text and set(VALUE.findall(text)) == set(VALUE.findall(english)), english


def test_a_list_in_a_sentence_is_joined_in_the_language_of_the_page():
    """`joined` makes a message of "or" and "and"; a text of `str.join` or of an f-string stays English."""
    english = re.compile(r"""["'],? (?:and|or) ["']\s*\.join\(|join\(["'],? (?:and|or) ["']\)""")
    files = [
        path
        for room in ("precision", "nodes", "web")
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".mjs", ".js")
    ]
    assert [str(path.relative_to(ROOT)) for path in files if english.search(path.read_text(encoding="utf-8"))] == []
    for profile in PROFILE_NAMES:
        told = doctor.diagnosis_result(doctor.diagnose(profile=profile)).sentence
        compute = told.sentences[0].named["compute"]
        words = said(compute, messages_in([told]))
        assert " or " not in words and (" or " not in compute or "或" in words), (profile, words)
