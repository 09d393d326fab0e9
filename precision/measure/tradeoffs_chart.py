"""Draw the settings that were measured: SNR over time with memory as area, and the three figures of each as bars."""

import math
from collections.abc import Sequence

import numpy as np

from ..analysis.analysis_chart import GRID, GRID_DB, TOP_DB
from ..report.draw import BACKGROUND, INNER, MARGIN, MUTED, TEXT, WIDTH, Canvas, font_of, shortened
from ..text import size_text
from .tradeoffs import Measurements, Row, pareto_front
from .tradeoffs_text import seconds_text, snr_text

FRONT, OTHER, ACTIVATIONS = (54, 178, 132), (110, 138, 178), (160, 190, 176)
BEYOND = (224, 88, 78)
LEFT, HEIGHT, ROW = 48, 300, 30
LARGEST, SMALLEST = 22, 5
COLUMNS = {"seconds per step": 200, "memory": 376, "SNR in dB": 588, "best for": 736}
BAR = 90
SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1))


def tradeoffs_chart(found: Measurements) -> np.ndarray:
    """Draw measurements: float32 array (height, 1024, 3) with values in 0..1. Rows are numbered as in the table."""
    canvas = Canvas()
    canvas.text(MARGIN, shortened(f"{found.model} on {found.device}", INNER, 24), 24)
    canvas.y += 42
    front = pareto_front(found.rows)
    points = [(number, row) for number, row in enumerate(found.rows, 1) if row.works]
    if points:
        _scatter(canvas, points, front)
    _bars(canvas, found, front)
    return canvas.picture()


def _scatter(canvas: Canvas, points: Sequence[tuple[int, Row]], front: Sequence[Row]) -> None:
    """Draw SNR upwards and time to the right: the best is in the upper left corner, and small."""
    canvas.text(
        MARGIN,
        "SNR in dB over seconds per step; the area is the memory; green: no other is as fast, as small and as close",
        16,
    )
    canvas.y += 34 + LARGEST
    top, slowest = _top([row for _, row in points]), 1.12 * max(row.seconds for _, row in points)
    _grid(canvas, top, slowest)
    largest = max(row.bytes for _, row in points)
    circles = {}
    for number, row in sorted(points, key=lambda point: -point[1].bytes):
        x = MARGIN + LEFT + (INNER - LEFT) * row.seconds / slowest
        y = canvas.y + HEIGHT * (1 - max(0.0, min(row.snr_db, top)) / top)
        circles[number] = x, y, max(SMALLEST, LARGEST * math.sqrt(row.bytes / largest))
        box = (x - circles[number][2], y - circles[number][2], x + circles[number][2], y + circles[number][2])
        canvas.draw.ellipse(box, fill=FRONT if row in front else OTHER, outline=BACKGROUND, width=2)
    _numbers(canvas, circles)
    canvas.y += HEIGHT + 44


def _numbers(canvas: Canvas, circles: dict[int, tuple[float, float, float]]) -> None:
    """Write the number of each circle (x, y, radius) beside it, where it lies on no circle and no other number."""
    taken = list(circles.values())
    for number, (x, y, radius) in circles.items():
        places = [
            (x + dx * far, y + dy * far)
            for far in range(round(radius) + 11, round(radius) + 90, 12)
            for dx, dy in SIDES
        ]
        free = (place for place in places if all(math.dist(place, other[:2]) > other[2] + 9 for other in taken))
        place = next(free, places[0])
        taken.append((*place, 9))
        canvas.draw.text(place, str(number), font=font_of(16), fill=TEXT, anchor="mm")


def _top(rows: Sequence[Row]) -> float:
    """Return the end of the SNR axis in dB; what is exact is drawn there."""
    finite = [row.snr_db for row in rows if row.works and math.isfinite(row.snr_db)]
    return max([TOP_DB, *(GRID_DB * math.ceil(value / GRID_DB) for value in finite)])


def _step(slowest: float) -> float:
    """Return the distance of marks on the time axis: 1, 2 or 5 times a power of ten,
    so that there are 4 to 10 of them."""
    power = 10.0 ** math.floor(math.log10(slowest))
    return next(power * part for part in (0.1, 0.2, 0.5, 1.0) if slowest / (power * part) <= 10)


def _grid(canvas: Canvas, top: float, slowest: float) -> None:
    left, bottom = MARGIN + LEFT, canvas.y + HEIGHT
    for value in range(0, int(top) + 1, GRID_DB):
        y = bottom - HEIGHT * value / top
        canvas.draw.line((left, y, WIDTH - MARGIN, y), fill=GRID)
        canvas.draw.text((left - 8, y), f"{value}", font=font_of(13), fill=MUTED, anchor="rm")
    step = _step(slowest)
    for count in range(int(slowest / step) + 1):
        x = left + (INNER - LEFT) * count * step / slowest
        canvas.draw.text((x, bottom + 16), f"{count * step:g}", font=font_of(13), fill=MUTED, anchor="mm")


def _bars(canvas: Canvas, found: Measurements, front: Sequence[Row]) -> None:
    for title, x in COLUMNS.items():
        canvas.text(MARGIN + x, title, 15, MUTED)
    canvas.y += ROW
    shown = [row for row in found.rows if row.works] or [found.reference]
    scale = max(row.seconds for row in shown), max(row.bytes for row in shown), _top(found.rows)
    best = found.best
    for number, row in enumerate(found.rows, 1):
        goals = ", ".join(goal for goal, chosen in best.items() if chosen is row)
        _row(canvas, f"{number}  {row.setting}", row, goals, scale, FRONT if row in front else OTHER)
    _row(canvas, f"    {found.reference.setting}", found.reference, "reference", scale, OTHER)


def _row(
    canvas: Canvas, name: str, row: Row, goals: str, scale: tuple[float, int, float], colour: tuple[int, int, int]
) -> None:
    time, memory, snr, last = (MARGIN + x for x in COLUMNS.values())
    canvas.text(MARGIN, shortened(name, COLUMNS["seconds per step"] - 8, 15), 15)
    if row.problem:
        canvas.text(time, shortened(row.problem.text, WIDTH - MARGIN - time, 15), 15, BEYOND)
        canvas.y += ROW
        return
    _bar(canvas, time, row.seconds / scale[0], colour, seconds_text(row.seconds))
    _bar(canvas, memory, row.bytes / scale[1], ACTIVATIONS, size_text(row.bytes))
    _bar(canvas, memory, row.weight_bytes / scale[1], colour)
    if goals != "reference":
        _bar(canvas, snr, max(0.0, min(row.snr_db, scale[2])) / scale[2], colour, snr_text(row))
    canvas.text(last, shortened(goals, WIDTH - MARGIN - last, 15), 15, MUTED if goals == "reference" else TEXT)
    canvas.y += ROW


def _bar(canvas: Canvas, x: float, share: float, colour: tuple[int, int, int], text: str = "") -> None:
    """Draw a share of the largest candidate; the reference may be more, and ends there."""
    right = x + max(2, round(BAR * min(share, 1.0)))
    canvas.draw.rectangle((x, canvas.y + 3, right, canvas.y + 17), fill=colour)
    canvas.text(right + 8, text, 15, MUTED)
