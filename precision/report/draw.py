"""Draw bar charts: the one kit for every picture that a node shows."""

import functools
from collections.abc import Sequence

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
TRACK = (56, 59, 66)
FILL = (47, 158, 143)
LENGTH = 92
"""The pixels of a bar in a column: the figure has the rest."""


Bar = tuple[str, Sequence[tuple[float, str]], str]
"""A bar of a chart: its label, its parts as (share of the whole bar, colour), drawn one after the other from the left,
and the text at its right. A heading where there are no parts."""


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


LARGE = 26
"""The size of letters that are read where a picture of 1,024 pixels is shown in 512."""
LINE = 46
NAME = 316
COLUMN = (WIDTH - 2 * MARGIN - NAME) // 3


def column_chart(
    title: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[float, str]]]], notes: Sequence[str] = ()
) -> np.ndarray:
    """Draw three columns of bars below their heads, each row with its name: uint8 array (height,
    1024, 3).

    ``rows``: a name, and for each column the share of its longest bar and the figure beside it; a
    name alone is a remark. All is read at half of its size.
    """
    first = MARGIN + LINE + 8
    below = first + LINE * (len(rows) + 1) + 10
    image = Image.new("RGB", (WIDTH, below + (LINE - 10) * len(notes) + MARGIN - 12), BACKGROUND)
    drawing = ImageDraw.Draw(image)
    write_text(drawing, MARGIN, MARGIN - 8, title, INNER, LARGE + 4)
    for place, head in enumerate(heads):
        write_text(drawing, _left_of(place), first, head, COLUMN, LARGE - 2, MUTED)
    for number, (name, cells) in enumerate(rows, 1):
        y = first + LINE * number
        write_text(drawing, MARGIN, y, name, NAME - 12 if cells else INNER, LARGE, TEXT if cells else MUTED)
        for place, (share, figure) in enumerate(cells):
            _draw_cell(drawing, _left_of(place), y, share, figure)
    for place, note in enumerate(notes):
        write_text(drawing, MARGIN, below + (LINE - 10) * place, note, INNER, LARGE - 2, MUTED)
    return np.array(image)


def _left_of(column: int) -> int:
    return MARGIN + NAME + COLUMN * column


def _draw_cell(drawing: ImageDraw.ImageDraw, left: int, y: int, share: float, figure: str) -> None:
    """Draw a bar on its track, and the figure at its right."""
    top, bottom = y + 9, y + 9 + BAR_HEIGHT - 4
    right = left + LENGTH
    drawing.rectangle((left, top, right - 1, bottom), fill=TRACK)
    if share > 0:
        drawing.rectangle((left, top, left + max(3, round(LENGTH * min(share, 1.0))) - 1, bottom), fill=FILL)
    write_text(drawing, right + 10, y, figure, COLUMN - LENGTH - 18, LARGE - 2)


def _draw_row(drawing: ImageDraw.ImageDraw, y: int, row: Bar) -> None:
    label, parts, text = row
    if not parts:
        write_text(drawing, MARGIN, y, label, INNER, 16)
        return
    write_text(drawing, MARGIN, y, label, LABEL - 12, 15)
    left, right = MARGIN + LABEL, MARGIN + LABEL + BAR
    start, done = left, 0.0
    for share, colour in parts:
        done += share
        end = left + round(BAR * min(done, 1.0))
        if end > start:
            drawing.rectangle((start, y, end - 1, y + BAR_HEIGHT - 1), fill=colour)
        start = end
    write_text(drawing, right + 12, y, text, WIDTH - MARGIN - right - 12, 15, MUTED)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, which ``load_default`` unpacks from base64 in each call."""
    return ImageFont.load_default(size)


def write_text(drawing: ImageDraw.ImageDraw, x: int, y: int, text: str, width: int, size: int, colour=TEXT) -> None:
    """Write a line, cut to a width in pixels."""
    drawing.text((x, y), _shortened(text, width, size), font=_font(size), fill=colour)


def _shortened(text: str, width: float, size: int) -> str:
    """Cut a text to fit a width in pixels, ending it with "..."."""
    font = _font(size)
    if len(text) <= width and font.getlength(text) <= width:
        return text
    text = text[: int(width)]
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
