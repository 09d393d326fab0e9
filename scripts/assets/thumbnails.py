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
        card.paste(Image.open(io.BytesIO(data)).convert("RGB").resize((width, height), Image.Resampling.LANCZOS), (left, top))
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


def layers(heading: str, errors: Sequence[float], target: float) -> Image.Image:
    """A sketch: a column per layer, those above the target marked as kept."""
    card, draw = _card()
    _text(draw, (SIZE[0] / 2, 44), heading, 30)
    width = (SIZE[0] - 2 * MARGIN) / len(errors)
    floor, room = SIZE[1] - 64, SIZE[1] - 150
    for index, error in enumerate(errors):
        left = MARGIN + index * width
        draw.rectangle((left + 3, floor - error * room, left + width - 3, floor), fill=BAD if error > target else GOOD)
    draw.line((MARGIN, floor - target * room, SIZE[0] - MARGIN, floor - target * room), fill=INK, width=2)
    draw.rectangle((MARGIN + 60, SIZE[1] - 42, MARGIN + 80, SIZE[1] - 22), fill=GOOD)
    _text(draw, (MARGIN + 92, SIZE[1] - 32), "8 bits", 24, "lm")
    draw.rectangle((MARGIN + 230, SIZE[1] - 42, MARGIN + 250, SIZE[1] - 22), fill=BAD)
    _text(draw, (MARGIN + 262, SIZE[1] - 32), "kept in 16 bits", 24, "lm")
    return card


def chain(name: str) -> Image.Image:
    """A sketch: loader, Halfsafe, sampler, under the model's name."""
    card, draw = _card()
    _text(draw, (SIZE[0] / 2, 92), name, 46)
    middle, width, gap = 230, 140, 30
    for index, label in enumerate(("Load", "Halfsafe", "Sample")):
        left = MARGIN + index * (width + gap)
        draw.rounded_rectangle((left, middle - 52, left + width, middle + 52), 12, fill=COOL if index == 1 else PANEL, outline=DIM)
        _text(draw, (left + width / 2, middle), label, 28, colour=GROUND if index == 1 else INK)
        if index:
            draw.line((left - gap, middle, left, middle), fill=INK, width=4)
    _text(draw, (SIZE[0] / 2, 332), "one node added", 24, colour=DIM)
    return card


def _card() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    card = Image.new("RGB", SIZE, GROUND)
    return card, ImageDraw.Draw(card)


def _text(draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, size: int, anchor: str = "mm", colour: str = INK) -> None:
    draw.text(place, text, font=ImageFont.load_default(size), fill=colour, anchor=anchor)
