"""Wording shared by reports, analyses, commands and errors: sizes, counts, wrapped lines, tables."""

import textwrap
from collections.abc import Iterable, Sequence

from .message import Message

WIDTH = 80


def wrapped(text: str, indent: str, more: str = "") -> list[str]:
    """Wrap a text to indented lines of at most 80 columns; an empty text gives none.

    ``more``: what lines after the first are indented by besides.
    """
    wrap = textwrap.TextWrapper(WIDTH, indent, indent + more, break_long_words=False, break_on_hyphens=False)
    return wrap.wrap(text)


def paragraph(sentences: Iterable[str], indent: str = "") -> list[str]:
    """Wrap each of the sentences to lines of its own."""
    return [line for sentence in sentences for line in wrapped(sentence, indent)]


def hanging(head: str, text: str) -> list[str]:
    """Write a text beside ``head``, in lines of at most 80 columns, or below it where the head leaves no room."""
    if len(head) > WIDTH // 2:
        indent = " " * (len(head) - len(head.lstrip()) + 4)
        return [head.rstrip(), *wrapped(text, indent)]
    lines = wrapped(text, " " * len(head)) or [""]
    return [(head + lines[0].lstrip()).rstrip(), *lines[1:]]


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), width: float = WIDTH) -> str:
    """Align cells in columns of ``width`` characters in all; the last cell of a row is wrapped in its own column."""
    given = [header, *rows] if header else rows
    widths = [max(map(len, column)) + 2 for column in zip(*(row[:-1] for row in given), strict=True)]
    lines = []
    for row in given:
        head = "".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=False))
        fits = len(head + row[-1]) <= width
        lines += [(head + row[-1]).rstrip()] if fits else hanging(head, row[-1])
    return "\n".join(lines)


def size_text(count: float) -> str:
    """Write a number of bytes in GiB, MiB or KiB: 2.64 GiB."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def count_text(count: int) -> str:
    """Write a count in billions or millions: 1.42 B, 35.0 M."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """Write the first names, and how many more there are."""
    first = ", ".join(names[:most])
    return first if len(names) <= most else Message("{0} and {1} more", first, len(names) - most)


def on_off(value: bool | None) -> str:
    """Write a switch as on, off, or "-" where it is not known."""
    return "-" if value is None else "on" if value else "off"
