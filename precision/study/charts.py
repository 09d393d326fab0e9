"""Pictures of the studies: each layer of an analysis, and time, memory and SNR of each setting that was measured."""

import math
from collections.abc import Iterable

import numpy as np

from ..base.text import size_text
from ..report.draw import Bar, bar_chart
from .analysis_text import decibel_text, outcome
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
    "time": "#eea52a",
    "memory": "#36b284",
    "SNR": "#5cb2ee",
}


def analysis_chart(analysis: Analysis, model: str = "") -> np.ndarray:
    """Draw a bar for each layer that was measured, as long as its SNR and coloured by outcome; the weakest first."""
    layers = analysis.weakest_first
    top = _highest(layer.worst_db for layer in layers)
    rows = [
        Bar(layer.name, [(_share(layer.worst_db, top), COLOURS[layer.status])], decibel_text(layer.worst_db))
        for layer in layers[:MOST_ROWS]
    ]
    rest = [Bar(f"and {len(layers) - MOST_ROWS} more")] if len(layers) > MOST_ROWS else []
    head = [Bar("SNR of each layer's output in dB, the weakest first:")]
    legend = _legend(layer.status for layer in layers)
    title = f"{model or 'model'} in {analysis.candidate.name}"
    return bar_chart(title, [*legend, *head, *rows, *rest], outcome(analysis)).astype(np.float32) / 255


def tradeoffs_chart(found: Measurements) -> np.ndarray:
    """Draw three bars for each setting that works, numbered as in the table; why the others do not."""
    working = [row for row in found.rows if row.works]
    shown = [found.reference, *working]
    most = max(row.seconds for row in shown), max(row.bytes for row in shown), _highest(row.snr_db for row in working)
    rows = [line for number, row in enumerate(found.rows, 1) for line in _lines(f"{number}  {row.setting}", row, most)]
    rows += _lines(f"{found.reference.setting} (reference)", found.reference, most)
    legend = _legend(("time", "memory", "SNR"))
    return bar_chart(f"{found.model} on {found.device}", [*legend, *rows], verdicts(found)).astype(np.float32) / 255


def _legend(names: Iterable[str]) -> list[Bar]:
    return [Bar(name, [(LEGEND, COLOURS[name])]) for name in dict.fromkeys(names)]


def _lines(label: str, row: Tradeoff, most: tuple[float, int, float]) -> list[Bar]:
    if row.problem:
        return [Bar(f"{label}: {row.problem}")]
    lines = [
        Bar(label, [(row.seconds / most[0], COLOURS["time"])], f"{seconds_text(row.seconds)} s/step"),
        Bar("", [(row.bytes / most[1], COLOURS["memory"])], size_text(row.bytes)),
    ]
    if row.snr_db is not None:
        lines.append(Bar("", [(_share(row.snr_db, most[2]), COLOURS["SNR"])], f"SNR {decibel_text(row.snr_db)}"))
    return lines


def _highest(values) -> float:
    return max([TOP_DB, *(value for value in values if math.isfinite(value))])


def _share(decibels: float, top: float) -> float:
    return max(0.0, min(decibels, top)) / top
