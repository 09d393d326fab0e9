"""Draw a bar chart, and lay out a table of text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..report.report_chart import INNER, MARGIN, MUTED, WIDTH, Canvas, legend, shortened

LABEL_WIDTH, BAR_WIDTH, ROW_HEIGHT = 400, 360, 24
MOST_ROWS = 100
COLOURS = {
    "chosen": (54, 178, 132),
    "kept": (238, 165, 42),
    "pinned": (92, 178, 238),
    "not possible": (126, 134, 148),
    "never ran": (92, 96, 106),
    "time": (238, 165, 42),
    "weights": (54, 178, 132),
    "activations": (160, 190, 176),
    "SNR": (92, 178, 238),
}


@dataclass(frozen=True)
class Row:
    """One line of a bar chart.

    Args:
        label: what the line is of, on the left.
        parts: the pieces of the bar, each a share of the full width, and the name of its colour in ``COLOURS``.
        text: figures, right of the bar.
    """

    label: str
    parts: Sequence[tuple[float, str]]
    text: str


def bar_chart(title: str, rows: Sequence[Row], notes: Sequence[str]) -> np.ndarray:
    """Draw a title, notes, the legend of the colours and a line for each row: float32 (height, 1024, 3) in 0..1."""
    canvas = Canvas()
    canvas.text(MARGIN, shortened(title, INNER, 24), 24)
    canvas.y += 38
    for note in notes:
        canvas.text(MARGIN, shortened(note, INNER, 15), 15, MUTED)
        canvas.y += 24
    canvas.y += 8
    names = dict.fromkeys(name for row in rows for _, name in row.parts)
    legend(canvas, [(name, "", COLOURS) for name in names])
    for row in rows[:MOST_ROWS]:
        _draw_row(canvas, row)
    if len(rows) > MOST_ROWS:
        _draw_row(canvas, Row(f"and {len(rows) - MOST_ROWS} more", (), ""))
    return canvas.picture()


def _draw_row(canvas: Canvas, row: Row) -> None:
    canvas.text(MARGIN, shortened(row.label, LABEL_WIDTH - 12, 15), 15)
    left = MARGIN + LABEL_WIDTH
    for share, name in row.parts:
        right = left + max(2, round(BAR_WIDTH * min(share, 1.0)))
        canvas.draw.rectangle((left, canvas.y + 3, right, canvas.y + 17), fill=COLOURS[name])
        left = right
    left += 8 if row.parts else 0
    canvas.text(left, shortened(row.text, WIDTH - MARGIN - left, 15), 15, MUTED)
    canvas.y += ROW_HEIGHT


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> list[str]:
    """Lay out lines of cells, two spaces between columns: the first and the last column to the left, others right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:]), line[-1]]).rstrip()
        for line in lines
    ]
