"""Pictures of the studies: each layer of an analysis, and time, memory and SNR of each setting that was measured."""

import math

import numpy as np

from ..text import size_text
from .analysis_text import decibel_text, outcome
from .draw import Row, bar_chart
from .sensitivity import Analysis
from .tradeoffs import Measurements, Tradeoff
from .tradeoffs_text import seconds_text, snr_text

TOP_DB = 60.0
"""The SNR of a bar of full width, unless a figure is higher."""


def analysis_chart(analysis: Analysis, model: str = "") -> np.ndarray:
    """Draw a bar for each layer that was measured, as long as its SNR and coloured by outcome; the weakest first."""
    layers = analysis.weakest_first
    top = _highest(layer.worst_db for layer in layers)
    rows = [
        Row(layer.name, [(_share(layer.worst_db, top), layer.status)], decibel_text(layer.worst_db)) for layer in layers
    ]
    notes = [*outcome(analysis), "SNR of each layer's output in dB, the weakest first:"]
    return bar_chart(f"{model or 'model'} in {analysis.candidate.name}", rows, notes)


def tradeoffs_chart(found: Measurements) -> np.ndarray:
    """Draw three bars for each setting that works, numbered as in the table; why the others do not."""
    working = [row for row in found.rows if row.works]
    shown = [found.reference, *working]
    most = max(row.seconds for row in shown), max(row.bytes for row in shown), _highest(row.snr_db for row in working)
    rows = [line for number, row in enumerate(found.rows, 1) for line in _lines(f"{number}  {row.setting}", row, most)]
    rows += _lines(f"{found.reference.setting} (reference)", found.reference, most)
    notes = [f"best for {goal}: {row.setting}" for goal, row in found.best.items()]
    return bar_chart(f"{found.model} on {found.device}", rows, notes)


def _lines(label: str, row: Tradeoff, most: tuple[float, int, float]) -> list[Row]:
    if row.problem:
        return [Row(label, [], row.problem)]
    parts = [(row.weight_bytes / most[1], "weights")]
    if row.extra_bytes:
        parts.append((row.extra_bytes / most[1], "activations"))
    lines = [
        Row(label, [(row.seconds / most[0], "time")], f"{seconds_text(row.seconds)} s/step"),
        Row("", parts, size_text(row.bytes)),
    ]
    if row.snr_db is not None:
        lines.append(Row("", [(_share(row.snr_db, most[2]), "SNR")], f"SNR {snr_text(row)}"))
    return lines


def _highest(values) -> float:
    return max([TOP_DB, *(value for value in values if math.isfinite(value))])


def _share(decibels: float, top: float) -> float:
    return max(0.0, min(decibels, top)) / top
