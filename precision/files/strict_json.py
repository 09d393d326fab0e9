"""Strict JSON for untrusted files."""

import json
from collections import Counter


def read_object(text: str | bytes) -> dict:
    """Parse a JSON object in UTF-8 with unique keys and no lone surrogates.

    Raises:
        ValueError: ``text`` is no such object; the message says why, in ASCII.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair, which no file can hold
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no valid JSON ({ascii(str(error))[1:-1]})") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return result
