"""Draw bar charts: the one kit for every picture that a node shows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH = 1024
MARGIN = 32
INNER = WIDTH - 2 * MARGIN
LABEL = 300
BAR = 440
BAR_HEIGHT = 18
ROW_HEIGHT = 26
TITLE_HEIGHT = 44

BACKGROUND = (27, 29, 34)
TEXT = (232, 234, 238)
MUTED = (154, 160, 170)


@dataclass(frozen=True)
class Bar:
    """A bar of a chart, or a heading where ``parts`` is empty.

    ``parts``: (share of the whole bar, colour), drawn one after the other from the left; ``text`` stands at the right.
    """

    label: str
    parts: Sequence[tuple[float, str]] = ()
    text: str = ""


def bar_chart(title: str, rows: Sequence[Bar], notes: Sequence[str] = ()) -> np.ndarray:
    """Draw bars below a title, and notes below the bars: uint8 array (height, 1024, 3)."""
    first = MARGIN - 8 + TITLE_HEIGHT
    below = first + ROW_HEIGHT * len(rows) + ROW_HEIGHT // 2
    image = Image.new("RGB", (WIDTH, below + ROW_HEIGHT * len(notes) + MARGIN - 12), BACKGROUND)
    drawing = ImageDraw.Draw(image)
    write_text(drawing, MARGIN, MARGIN - 8, title, INNER, 22)
    for place, row in enumerate(rows):
        _draw_row(drawing, first + ROW_HEIGHT * place, row)
    for place, note in enumerate(notes):
        write_text(drawing, MARGIN, below + ROW_HEIGHT * place, note, INNER, 15, MUTED)
    return np.array(image)


def _draw_row(drawing: ImageDraw.ImageDraw, y: int, row: Bar) -> None:
    if not row.parts:
        write_text(drawing, MARGIN, y, row.label, INNER, 16)
        return
    write_text(drawing, MARGIN, y, row.label, LABEL - 12, 15)
    left, right = MARGIN + LABEL, MARGIN + LABEL + BAR
    start, done = left, 0.0
    for share, colour in row.parts:
        done += share
        end = left + round(BAR * min(done, 1.0))
        if end > start:
            drawing.rectangle((start, y, end - 1, y + BAR_HEIGHT - 1), fill=colour)
        start = end
    write_text(drawing, right + 12, y, row.text, WIDTH - MARGIN - right - 12, 15, MUTED)


def write_text(drawing: ImageDraw.ImageDraw, x: int, y: int, text: str, width: int, size: int, colour=TEXT) -> None:
    """Write a line, cut to a width in pixels."""
    drawing.text((x, y), shortened(text, width, size), font=ImageFont.load_default(size), fill=colour)


def shortened(text: str, width: float, size: int) -> str:
    """Cut a text to fit a width in pixels, ending it with "..."."""
    font = ImageFont.load_default(size)
    if len(text) <= width and font.getlength(text) <= width:
        return text
    text = text[: int(width)]
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
