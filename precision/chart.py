"""The report as a picture: every layer in order, coloured by storage and by mode, and the bytes they take."""

from collections import Counter

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .report_text import amount, size_text

WIDTH = 1024
MARGIN = 32
STRIP_HEIGHT = 56
BAR_HEIGHT = 34
INNER = WIDTH - 2 * MARGIN

BACKGROUND = (27, 29, 34)
TEXT = (232, 234, 238)
MUTED = (154, 160, 170)
OTHER = (176, 160, 90)
STORAGE_COLOURS = {
    "fp8_e4m3fn": (238, 165, 42), "fp8_e5m2": (220, 104, 46), "fp16": (92, 178, 238), "bf16": (54, 178, 132),
    "fp32": (126, 134, 148), "int8": (214, 120, 172), "nvfp4": (236, 214, 92), "mxfp8": (190, 108, 70),
}  # fmt: skip
MODE_COLOURS = {
    "fp8": (238, 165, 42), "fp16_acc16": (214, 120, 172), "fp16": (92, 178, 238), "fp16_wide": (62, 116, 216),
    "fp16_scaled": (146, 112, 224), "bf16": (54, 178, 132), "fp32": (126, 134, 148),
}  # fmt: skip


def chart(report) -> np.ndarray:
    """A picture of a ``Report``: float32 array (height, 1024, 3) with values in 0..1."""
    canvas = _Canvas()
    _title(canvas, report)
    _strip(canvas, "storage of each layer, in model order", [layer.storage for layer in report.layers], STORAGE_COLOURS)
    _strip(canvas, "how each layer computes", [layer.mode for layer in report.layers], MODE_COLOURS)
    _bytes_bar(canvas, report.model.bytes_by_storage)
    return canvas.picture()


class _Canvas:
    """A fixed width image that grows downwards; ``y`` is where the next thing goes."""

    def __init__(self):
        self.image = Image.new("RGB", (WIDTH, 4096), BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)
        self.y = MARGIN - 8

    def text(self, x: float, text: str, size: int = 15, colour=TEXT) -> float:
        """Write at ``y`` and return the x after it."""
        font = _font(size)
        self.draw.text((x, self.y), text, font=font, fill=colour)
        return x + font.getlength(text)

    def picture(self) -> np.ndarray:
        cropped = self.image.crop((0, 0, WIDTH, self.y + MARGIN - 12))
        return np.asarray(cropped, dtype=np.float32) / 255.0


def _font(size: int):
    try:
        return ImageFont.load_default(size)
    except TypeError:
        return ImageFont.load_default()


def _title(canvas: _Canvas, report) -> None:
    model, device = report.model, report.device
    canvas.text(MARGIN, model.cls or "model", 24)
    canvas.y += 34
    size = f"{amount(model.parameters)} parameters, {size_text(model.weight_bytes)}, {len(report.layers)} layers"
    simulated = " (simulated)" if device.get("simulated") else ""
    where = f"   {device['name']}, {device['profile']}{simulated}" if device else ""
    canvas.text(MARGIN, shortened(size + where, INNER, 15), 15, MUTED)
    canvas.y += 36


def shortened(text: str, width: float, size: int) -> str:
    """The text, cut with "..." to fit a width in pixels."""
    font = _font(size)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _strip(canvas: _Canvas, title: str, values: list[str], colours: dict) -> None:
    canvas.text(MARGIN, title, 16)
    canvas.y += 26
    canvas.image.paste(strip_image(values, colours), (MARGIN, canvas.y))
    _separators(canvas, len(values))
    canvas.y += STRIP_HEIGHT + 10
    counts = Counter(values)
    _legend(canvas, [(name, f"{count}", colours) for name, count in counts.most_common()])


def strip_image(values: list[str], colours: dict) -> Image.Image:
    """One column of pixels per INNER-th of the layers; empty reports give a plain strip."""
    rows = np.array([colours.get(value, OTHER) for value in values] or [BACKGROUND], dtype=np.uint8)
    columns = rows[np.arange(INNER) * len(rows) // INNER]
    return Image.fromarray(np.repeat(columns[None], STRIP_HEIGHT, axis=0))


def _separators(canvas: _Canvas, count: int) -> None:
    if not 1 < count <= INNER // 6:
        return
    for place in range(1, count):
        x = MARGIN + place * INNER // count
        canvas.draw.line((x, canvas.y, x, canvas.y + STRIP_HEIGHT - 1), fill=BACKGROUND)


def _legend(canvas: _Canvas, entries: list[tuple[str, str, dict]]) -> None:
    x = MARGIN
    for name, detail, colours in entries:
        if x + 44 + _font(15).getlength(f"{name} {detail}") > WIDTH - MARGIN and x > MARGIN:
            x, canvas.y = MARGIN, canvas.y + 26
        canvas.draw.rounded_rectangle((x, canvas.y + 2, x + 16, canvas.y + 18), 4, fill=colours.get(name, OTHER))
        x = canvas.text(x + 24, f"{name} ")
        x = canvas.text(x, detail, colour=MUTED) + 26
    canvas.y += 44


def _bytes_bar(canvas: _Canvas, by_storage: dict[str, int]) -> None:
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
    _legend(canvas, [(name, f"{size_text(size)}, {size / total:.1%}", STORAGE_COLOURS) for name, size in ordered])
