"""Pictures of the studies: each layer of an analysis, and time, memory and error of each setting
that was measured."""

import math
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageDraw

from ..base.text import size_text
from ..report.draw import BACKGROUND, MARGIN, ROW_HEIGHT, Bar, bar_chart, column_chart, write_text
from .analysis_text import decibel_text, error_text, outcome
from .sensitivity import Analysis
from .tradeoffs import Measurements, Tradeoff
from .tradeoffs_text import seconds_text, verdicts

TOP_DB = 60.0
"""The SNR of a bar of full width, unless a figure is higher."""
MOST_ROWS, LEGEND = 100, 0.04
COLOURS = {
    "chosen": "#36b284",
    "kept": "#eea52a",
    "pinned": "#5cb2ee",
    "not possible": "#7e8694",
    "never ran": "#5c606a",
}


def analysis_chart(analysis: Analysis, model: str = "") -> np.ndarray:
    """Draw a bar for each layer that was measured, as long as its SNR and coloured by outcome; the
    weakest first."""
    layers = analysis.weakest_first
    top = _highest(layer.worst_db for layer in layers)
    rows = [
        (layer.name, [(_share(layer.worst_db, top), COLOURS[layer.status])], decibel_text(layer.worst_db))
        for layer in layers[:MOST_ROWS]
    ]
    rest = [(f"and {len(layers) - MOST_ROWS} more", [], "")] if len(layers) > MOST_ROWS else []
    head = [("SNR of each layer's output in dB, the weakest first:", [], "")]
    legend = _legend(layer.status for layer in layers)
    title = f"{model or 'model'} in {analysis.candidate.name}"
    return bar_chart(title, [*legend, *head, *rows, *rest], outcome(analysis)).astype(np.float32) / 255


def tradeoffs_chart(found: Measurements) -> np.ndarray:
    """Draw a row for each setting that works, numbered as in the table, with bars of its time,
    memory and error below their heads; why the others do not; the two pictures of a setting that
    was measured with several seeds."""
    shown = [found.reference, *(row for row in found.rows if row.works)]
    most = max(row.seconds for row in shown), max(row.bytes for row in shown), max(map(_error, shown))
    rows = [_cells(f"{number}  {row.setting}", row, most) for number, row in enumerate(found.rows, 1)]
    rows.append(_cells(f"{found.reference.setting} (reference)", found.reference, most))
    title = f"{found.model} on {found.device}"
    chart = column_chart(title, ("s/step", "memory", "error"), rows, verdicts(found)).astype(np.float32) / 255
    return _with_pictures(chart, found)


def _with_pictures(chart: np.ndarray, found: Measurements) -> np.ndarray:
    """Return a chart with the pictures of ``found.shown`` beside one another below it, each below
    its caption; without pictures, the chart as it is.

    ``chart``: fp32 (height, width, 3) from 0 to 1. A pixel of a picture is one of a latent:
    pictures are enlarged without smoothing.
    """
    row = found.shown
    if row is None or not row.pictures:
        return chart
    height, width = chart.shape[:2]
    each = (width - MARGIN) // 2 - MARGIN
    tall = round(each * row.pictures[0].shape[0] / row.pictures[0].shape[1])
    image = Image.new("RGB", (width, height + ROW_HEIGHT + tall + MARGIN), BACKGROUND)
    image.paste(Image.fromarray(np.rint(chart * 255).astype(np.uint8)), (0, 0))
    for place, (picture, setting) in enumerate(zip(row.pictures, (found.reference.setting, row.setting), strict=True)):
        left = MARGIN + place * (each + MARGIN)
        caption = f"{setting}, after four steps, seed {found.seed + row.worst} (least cosine)"
        write_text(ImageDraw.Draw(image), left, height, caption, each, 15)
        drawn = Image.fromarray(picture).resize((each, tall), Image.Resampling.NEAREST)
        image.paste(drawn, (left, height + ROW_HEIGHT))
    return np.array(image).astype(np.float32) / 255


def _legend(names: Iterable[str]) -> list[Bar]:
    return [(name, [(LEGEND, COLOURS[name])], "") for name in dict.fromkeys(names)]


def _cells(name: str, row: Tradeoff, most: tuple[float, int, float]) -> tuple[str, list[tuple[float, str]]]:
    """Return the shares and figures of a row; without cells why it does not work."""
    if row.problem:
        return f"{name}: {row.problem}", []
    error = "-" if row.snr_db is None else error_text(row.snr_db)
    shares = row.seconds / most[0], row.bytes / most[1], _error(row) / (most[2] or 1.0)
    return name, list(zip(shares, (seconds_text(row.seconds), _size(row.bytes), error), strict=True))


def _size(count: int) -> str:
    """Write bytes in three digits or fewer, as a picture has room for."""
    number, unit = size_text(count).split()
    return f"{float(number):.3g} {unit}"


def _error(row: Tradeoff) -> float:
    return 0.0 if row.snr_db is None else 10 ** (-row.snr_db / 20)


def _highest(values) -> float:
    return max([TOP_DB, *(value for value in values if math.isfinite(value))])


def _share(decibels: float, top: float) -> float:
    return max(0.0, min(decibels, top)) / top
