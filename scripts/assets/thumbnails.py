"""Draw the workflows' thumbnails: what a workflow shows as real pictures of the shapes model, what it measures or connects as a sketch."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

SIZE = (512, 384)
GROUND, PANEL, INK, DIM = "#202124", "#303236", "#f2f2f2", "#9aa0a6"
GOOD, BAD, COOL = "#57bb8a", "#e0695c", "#6fa8dc"
MARGIN, CAPTION = 16, 44


def pictures(shown: Sequence[tuple[bytes, str]]) -> Image.Image:
    """Pictures side by side, each with what it is below it."""
    card, draw = _card()
    width = (SIZE[0] - MARGIN * (len(shown) + 1)) // len(shown)
    height = min(width, SIZE[1] - 2 * MARGIN - CAPTION)
    top = (SIZE[1] - height - CAPTION) // 2
    for index, (data, caption) in enumerate(shown):
        left = MARGIN + index * (width + MARGIN)
        card.paste(
            Image.open(io.BytesIO(data)).convert("RGB").resize((width, height), Image.Resampling.LANCZOS), (left, top)
        )
        draw.rectangle((left, top, left + width - 1, top + height - 1), outline=DIM)
        _text(draw, (left + width / 2, top + height + CAPTION / 2), caption, 24)
    return card


def bars(heading: str, rows: Sequence[tuple[str, float, str]]) -> Image.Image:
    """A sketch: a label, a length from 0 to 1 and a colour for each row."""
    card, draw = _card()
    _text(draw, (SIZE[0] / 2, 44), heading, 30)
    step = (SIZE[1] - 96) / len(rows)
    for index, (label, length, colour) in enumerate(rows):
        middle = 84 + step * (index + 0.5)
        _text(draw, (MARGIN, middle), label, 24, "lm")
        draw.rounded_rectangle((190, middle - step * 0.3, 190 + length * 300, middle + step * 0.3), 6, fill=colour)
    return card


def chain(name: str, below: str = "one node added") -> Image.Image:
    """A sketch: loader, Halfsafe, sampler, under the model's name."""
    card, draw = _card()
    _text(draw, (SIZE[0] / 2, 92), name, 46)
    middle, width, gap = 230, 140, 30
    for index, label in enumerate(("Load", "Halfsafe", "Sample")):
        left = MARGIN + index * (width + gap)
        draw.rounded_rectangle(
            (left, middle - 52, left + width, middle + 52), 12, fill=COOL if index == 1 else PANEL, outline=DIM
        )
        _text(draw, (left + width / 2, middle), label, 28, colour=GROUND if index == 1 else INK)
        if index:
            draw.line((left - gap, middle, left, middle), fill=INK, width=4)
    _text(draw, (SIZE[0] / 2, 332), below, 24, colour=DIM)
    return card


def _card() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    card = Image.new("RGB", SIZE, GROUND)
    return card, ImageDraw.Draw(card)


def _text(
    draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, size: int, anchor: str = "mm", colour: str = INK
) -> None:
    draw.text(place, text, font=ImageFont.load_default(size), fill=colour, anchor=anchor)
