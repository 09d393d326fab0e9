"""An analysis as a picture: one bar per layer in model order, and the weakest layers by name."""

import math

import numpy as np

from ..report.draw import BACKGROUND, INNER, MARGIN, MUTED, TEXT, WIDTH, Canvas, font_of, shortened
from .analysis_rules import crest_text, decibel_text, whole_decibel_text
from .results import BARRED, CHOSEN, KEPT, PINNED, UNUSED, Analysis, LayerResult

HEIGHT = 260
AXIS = 40
ROW = 24
NAMED = 16
NAME_WIDTH = 420
CREST = WIDTH - MARGIN - 48
TOP_DB = 60.0
GRID_DB = 10
GRID = (58, 62, 70)
COLOURS = {
    CHOSEN: (54, 178, 132),
    KEPT: (238, 165, 42),
    PINNED: (92, 178, 238),
    BARRED: (126, 134, 148),
    UNUSED: (92, 96, 106),
}


def analysis_chart(analysis: Analysis, model: str = "") -> np.ndarray:
    """Draw an analysis: float32 array (height, 1024, 3) with values in 0..1."""
    canvas = Canvas()
    _title(canvas, analysis, model)
    measured = [layer for layer in analysis.layers if layer.worst_db is not None]
    top = _top(measured)
    canvas.text(MARGIN, "SNR of each layer's output in dB, in model order; low is bad", 16)
    canvas.y += 28
    _bars(canvas, measured, top)
    _legend(canvas, analysis)
    _weakest(canvas, sorted(measured, key=lambda layer: layer.worst_db)[:NAMED], top)
    return canvas.picture()


def _title(canvas: Canvas, analysis: Analysis, model: str) -> None:
    canvas.text(MARGIN, shortened(f"{model or 'model'} in {analysis.candidate.name}", INNER, 24), 24)
    canvas.y += 34
    plain = f"{analysis.all_count} layers of the plain preset: {whole_decibel_text(analysis.all_db)}"
    chosen = f"{len(analysis.chosen)} layers: {whole_decibel_text(analysis.snr_db)}"
    line = (
        f"target {analysis.target_db:g} dB end to end, {chosen}, {whole_decibel_text(analysis.free_db)} in a free run; "
        f"{plain}"
    )
    canvas.text(MARGIN, shortened(line, INNER, 15), 15, MUTED)
    canvas.y += 36


def _top(layers: list[LayerResult]) -> float:
    finite = [layer.worst_db for layer in layers if math.isfinite(layer.worst_db)]
    return min(TOP_DB, max([GRID_DB, *(GRID_DB * math.ceil(value / GRID_DB) for value in finite)]))


def _share(value: float, top: float) -> float:
    """Return the share of the axis that a bar fills: all of it without error, 1 % for an overflow."""
    return 0.01 if value <= 0 else min(value, top) / top


def _bars(canvas: Canvas, layers: list[LayerResult], top: float) -> None:
    left, width = MARGIN + AXIS, INNER - AXIS
    for value in range(0, int(top) + 1, GRID_DB):
        y = canvas.y + HEIGHT - round(HEIGHT * value / top)
        canvas.draw.line((left, y, WIDTH - MARGIN, y), fill=GRID)
        canvas.draw.text((left - 8, y), f"{value}", font=font_of(13), fill=MUTED, anchor="rm")
    gap = 1 if len(layers) <= width // 4 else 0
    for place, layer in enumerate(layers):
        start, end = (left + index * width // len(layers) for index in (place, place + 1))
        y = canvas.y + HEIGHT - max(2, round(HEIGHT * _share(layer.worst_db, top)))
        canvas.draw.rectangle((start, y, max(start, end - 1 - gap), canvas.y + HEIGHT), fill=COLOURS[layer.status])
    canvas.y += HEIGHT + 16


def _legend(canvas: Canvas, analysis: Analysis) -> None:
    counts = ((status, len(analysis.named(status))) for status in COLOURS)
    x: float = MARGIN
    for status, count in counts:
        if count:
            canvas.draw.rounded_rectangle((x, canvas.y + 2, x + 16, canvas.y + 18), 4, fill=COLOURS[status])
            x = canvas.text(canvas.text(x + 24, f"{status} "), f"{count}", colour=MUTED) + 26
    canvas.y += 44


def _weakest(canvas: Canvas, layers: list[LayerResult], top: float) -> None:
    if not layers:
        return
    canvas.text(MARGIN, "weakest layers", 16)
    canvas.text(CREST, "crest", 15, MUTED)
    canvas.y += 28
    left = MARGIN + NAME_WIDTH
    for layer in layers:
        canvas.text(MARGIN, shortened(layer.name, NAME_WIDTH - 12, 15), 15, TEXT)
        right = left + max(2, round((CREST - 80 - left) * _share(layer.worst_db, top)))
        place = (left, canvas.y + 3, right, canvas.y + 17)
        canvas.draw.rectangle(place, fill=COLOURS[layer.status], outline=BACKGROUND)
        canvas.text(right + 8, decibel_text(layer.worst_db), 15, MUTED)
        canvas.text(CREST, crest_text(layer.crest), 15, MUTED)
        canvas.y += ROW
