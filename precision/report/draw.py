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
class Row:
    """A bar of a chart, or a heading where ``parts`` is empty.

    ``parts``: (share of the whole bar, colour), drawn one after the other from the left; ``text`` stands at the right.
    """

    label: str
    parts: Sequence[tuple[float, str]] = ()
    text: str = ""


def bar_chart(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> np.ndarray:
    """Draw bars below a title, and notes below the bars: uint8 array (height, 1024, 3)."""
    canvas = Canvas(2 * MARGIN + TITLE_HEIGHT + ROW_HEIGHT * (len(rows) + len(notes) + 1))
    canvas.text(MARGIN, shortened(title, INNER, 22), 22)
    canvas.y += TITLE_HEIGHT
    for row in rows:
        _draw_row(canvas, row)
    canvas.y += ROW_HEIGHT // 2
    for note in notes:
        canvas.text(MARGIN, shortened(note, INNER, 15), 15, MUTED)
        canvas.y += ROW_HEIGHT
    return canvas.pixels()


def _draw_row(canvas: "Canvas", row: Row) -> None:
    if not row.parts:
        canvas.text(MARGIN, shortened(row.label, INNER, 16), 16)
        canvas.y += ROW_HEIGHT
        return
    canvas.text(MARGIN, shortened(row.label, LABEL - 12, 15))
    left, right = MARGIN + LABEL, MARGIN + LABEL + BAR
    start, done = left, 0.0
    for share, colour in row.parts:
        done += share
        end = left + round(BAR * min(done, 1.0))
        if end > start:
            canvas.draw.rectangle((start, canvas.y, end - 1, canvas.y + BAR_HEIGHT - 1), fill=colour)
        start = end
    canvas.text(right + 12, shortened(row.text, WIDTH - MARGIN - right - 12, 15), 15, MUTED)
    canvas.y += ROW_HEIGHT


class Canvas:
    """An image of fixed width that grows downwards; ``y`` is where the next item goes."""

    def __init__(self, height: int = 4096):
        self.image = Image.new("RGB", (WIDTH, height), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.y = MARGIN - 8

    def text(self, x: float, text: str, size: int = 15, colour=TEXT) -> float:
        """Write at ``y`` and return the x after the text."""
        font = font_of(size)
        self.draw.text((x, self.y), text, font=font, fill=colour)
        return x + font.getlength(text)

    def pixels(self) -> np.ndarray:
        """Cut the image below the last item: uint8 array (height, 1024, 3)."""
        return np.array(self.image.crop((0, 0, WIDTH, self.y + MARGIN - 12)))

    def picture(self) -> np.ndarray:
        """Return the pixels as float32 values in 0..1."""
        return self.pixels().astype(np.float32) / 255.0


def font_of(size: int):
    """Load Pillow's own font in a size in pixels; the fixed one where Pillow has no other."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


def shortened(text: str, width: float, size: int) -> str:
    """Cut a text to fit a width in pixels, ending it with "..."."""
    font = font_of(size)
    if len(text) <= width and font.getlength(text) <= width:
        return text
    text = text[: int(width)]
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
