"""What the page makes of a text that the server worded, without a browser: `said` of web/words.mjs in Python, and the English that is left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from halfsafe.precision.base.message import messages_in

WORDS = json.loads((Path(__file__).absolute().parents[2] / "locales" / "zh" / "main.json").read_text(encoding="utf-8"))[
    "halfsafe"
]
NAME = re.compile("[a-z_]+")


def said(text: str, messages: dict[str, dict]) -> str:
    """A text in Chinese. ``messages``: those that were sent along with it."""
    message = messages.get(text, {"template": text, "values": {}})
    values = {
        name: said(value, messages) if isinstance(value, str) and not NAME.fullmatch(value) else value
        for name, value in message["values"].items()
    }
    return re.sub(
        r"\{(\w+)\}",
        lambda found: str(values.get(found[1], found[0])),
        WORDS.get(message["template"], message["template"]),
    )


def english_in(text: str) -> list[str]:
    """The English words of a text, without names: those in a row, at least three."""
    words = "".join(letter if letter.isascii() and (letter.isalpha() or letter == " ") else "|" for letter in text)
    return [run.strip() for run in words.split("|") if len(run.split()) >= 3]


def untranslated(data: object) -> list[str]:
    """The texts of JSON data in which English is left where the page words them in Chinese, with the messages that are sent along."""
    messages = messages_in(data)
    return [text for text in texts_in(data) if english_in(said(text, messages))]


def texts_in(data: object) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    for inner in data.values() if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else ():
        yield from texts_in(inner)
