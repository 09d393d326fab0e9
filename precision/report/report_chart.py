"""Draw a report: every layer in order, coloured by storage, mode and accumulation, its range,
and the guard's events."""

import math
from collections import Counter

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..text import count_text, size_text
from .colours import MODE_COLOURS, OTHER, STORAGE_COLOURS, SUM_COLOURS
from .report_text import verdict_shown
from .schema import GuardReport, Report

WIDTH = 1024
MARGIN = 32
STRIP_HEIGHT = 56
BAR_HEIGHT = 34
INNER = WIDTH - 2 * MARGIN

RANGE_HEIGHT = 96
LOWEST_EXPONENT = -4
HIGHEST_EXPONENT = 24
FP16_EXPONENT = 16
EVENTS_SHOWN = 8

BACKGROUND = (27, 29, 34)
TEXT = (232, 234, 238)
MUTED = (154, 160, 170)
WITHIN, BEYOND = (92, 178, 238), (224, 88, 78)


def chart(report: Report) -> np.ndarray:
    """Draw a report: float32 array (height, 1024, 3) with values in 0..1."""
    canvas = Canvas()
    _title(canvas, report)
    _strip(canvas, "storage of each layer, in model order", [layer.storage for layer in report.layers], STORAGE_COLOURS)
    _strip(canvas, "how each layer computes", [layer.mode for layer in report.layers], MODE_COLOURS)
    _strip(canvas, "how its products are summed", [layer.accumulation for layer in report.layers], SUM_COLOURS)
    _ranges(canvas, report)
    _bytes_bar(canvas, report.model.bytes_by_storage)
    _guard(canvas, report.guard)
    return canvas.picture()


class Canvas:
    """An image of fixed width that grows downwards; ``y`` is where the next item goes."""

    def __init__(self):
        self.image = Image.new("RGB", (WIDTH, 4096), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.y = MARGIN - 8

    def text(self, x: float, text: str, size: int = 15, colour=TEXT) -> float:
        """Write at ``y`` and return the x after it."""
        font = font_of(size)
        self.draw.text((x, self.y), text, font=font, fill=colour)
        return x + font.getlength(text)

    def picture(self) -> np.ndarray:
        cropped = self.image.crop((0, 0, WIDTH, self.y + MARGIN - 12))
        return np.asarray(cropped, dtype=np.float32) / 255.0


def font_of(size: int):
    """Load Pillow's own font in a size in pixels; the fixed one where Pillow has no other."""
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


def _title(canvas: Canvas, report: Report) -> None:
    model, device = report.model, report.device
    canvas.text(MARGIN, model.cls or "model", 24)
    canvas.y += 34
    size = f"{count_text(model.parameters)} parameters, {size_text(model.weight_bytes)}, {len(report.layers)} layers"
    simulated = " (simulated)" if device.get("simulated") else ""
    where = f"   {device['name']}, {device['profile']}{simulated}" if device else ""
    canvas.text(MARGIN, shortened(size + where, INNER, 15), 15, MUTED)
    canvas.y += 36


def shortened(text: str, width: float, size: int) -> str:
    """Cut a text to fit a width in pixels, ending it with "..."."""
    font = font_of(size)
    if len(text) <= width and font.getlength(text) <= width:
        return text
    text = text[: int(width)]
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _strip(canvas: Canvas, title: str, values: list[str], colours: dict) -> None:
    canvas.text(MARGIN, title, 16)
    canvas.y += 26
    canvas.image.paste(strip_image(values, colours), (MARGIN, canvas.y))
    _separators(canvas, len(values))
    canvas.y += STRIP_HEIGHT + 10
    counts = Counter(values)
    legend(canvas, [(name, f"{count}", colours) for name, count in counts.most_common()])


def strip_image(values: list[str], colours: dict) -> Image.Image:
    """Draw one column of pixels per INNER-th of the layers; an empty report gives an empty strip."""
    rows = np.array([colours.get(value, OTHER) for value in values] or [BACKGROUND], dtype=np.uint8)
    columns = rows[np.arange(INNER) * len(rows) // INNER]
    return Image.fromarray(np.repeat(columns[None], STRIP_HEIGHT, axis=0))


def _separators(canvas: Canvas, count: int) -> None:
    if not 1 < count <= INNER // 6:
        return
    for place in range(1, count):
        x = MARGIN + place * INNER // count
        canvas.draw.line((x, canvas.y, x, canvas.y + STRIP_HEIGHT - 1), fill=BACKGROUND)


def legend(canvas: Canvas, entries: list[tuple[str, str, dict]]) -> None:
    """Draw entries of (name, detail, colours by name), each with its coloured box, in rows."""
    x: float = MARGIN
    for name, detail, colours in entries:
        if x + 44 + font_of(15).getlength(f"{name} {detail}") > WIDTH - MARGIN and x > MARGIN:
            x, canvas.y = MARGIN, canvas.y + 26
        canvas.draw.rounded_rectangle((x, canvas.y + 2, x + 16, canvas.y + 18), 4, fill=colours.get(name, OTHER))
        x = canvas.text(x + 24, f"{name} ")
        x = canvas.text(x, detail, colour=MUTED) + 26
    canvas.y += 44


def _ranges(canvas: Canvas, report: Report) -> None:
    """Draw a bar per layer, as high as the exponent of its largest input, and a line at fp16's limit."""
    if not report.ranges:
        return
    canvas.text(MARGIN, "largest input of each layer that is watched, as a power of two; the line is fp16's range", 16)
    canvas.y += 26
    bottom = canvas.y + RANGE_HEIGHT
    for index, layer in enumerate(report.layers):
        exponent = _exponent(report.ranges.get(layer.name, 0.0))
        if exponent > LOWEST_EXPONENT:
            left, right = (MARGIN + place * INNER // len(report.layers) for place in (index, index + 1))
            colour = BEYOND if exponent >= FP16_EXPONENT else WITHIN
            canvas.draw.rectangle((left, bottom - _height(exponent), max(left, right - 2), bottom), fill=colour)
    canvas.draw.line(
        (MARGIN, bottom - _height(FP16_EXPONENT), WIDTH - MARGIN, bottom - _height(FP16_EXPONENT)), fill=MUTED
    )
    canvas.y = bottom + 14
    colours = {"fits fp16": WITHIN, "past 65504": BEYOND}
    legend(canvas, [(name, "", colours) for name in colours])


def _exponent(largest: float) -> float:
    if not largest > 0:
        return LOWEST_EXPONENT
    return HIGHEST_EXPONENT if math.isinf(largest) else min(math.log2(largest), HIGHEST_EXPONENT)


def _height(exponent: float) -> int:
    return round(RANGE_HEIGHT * (exponent - LOWEST_EXPONENT) / (HIGHEST_EXPONENT - LOWEST_EXPONENT))


def _guard(canvas: Canvas, guard: GuardReport) -> None:
    if guard.verdict == "off":
        return
    verdict = verdict_shown(guard.verdict, (event.kind for event in guard.events))
    canvas.text(MARGIN, f"guard: {verdict}, {guard.calls} calls, {guard.extra_calls} repeated", 16)
    canvas.y += 28
    for event in guard.events[:EVENTS_SHOWN]:
        op = f" ({event.op})" if event.op and event.op != event.layer else ""
        modes = f", {event.from_mode} to {event.to_mode}" if event.from_mode else ""
        line = f"step {event.step}: {event.kind} in {event.layer or 'the model'}{op}{modes}"
        canvas.text(MARGIN + 12, shortened(line, INNER - 12, 15), 15, MUTED if event.recovered else BEYOND)
        canvas.y += 24
    if len(guard.events) > EVENTS_SHOWN:
        canvas.text(MARGIN + 12, f"and {len(guard.events) - EVENTS_SHOWN} more", 15, MUTED)
        canvas.y += 24
    canvas.y += 10


def _bytes_bar(canvas: Canvas, by_storage: dict[str, int]) -> None:
    total = sum(by_storage.values())
    if not total:
        return
    canvas.text(MARGIN, f"weight bytes by storage, {size_text(total)} in all", 16)
    canvas.y += 26
    ordered = sorted(by_storage.items(), key=lambda item: -item[1])
    edge, done = MARGIN, 0
    for name, size in ordered:
        done += size
        right = MARGIN + round(INNER * done / total)
        if right > edge:
            box = (edge, canvas.y, right - 1, canvas.y + BAR_HEIGHT)
            canvas.draw.rectangle(box, fill=STORAGE_COLOURS.get(name, OTHER))
        edge = right
    canvas.y += BAR_HEIGHT + 10
    legend(canvas, [(name, f"{size_text(size)}, {size / total:.1%}", STORAGE_COLOURS) for name, size in ordered])
