"""Draw a report: how layers are stored, computed and summed, in model order and in all."""

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from ..base.text import count_text, size_text
from .draw import Bar, bar_chart
from .report_text import verdict_shown
from .schema import Report
from .view import MODE_COLOURS, OTHER, STORAGE_COLOURS, SUM_COLOURS, shares


def chart(report: Report) -> np.ndarray:
    """Draw a report: uint8 array (height, 1024, 3)."""
    model, device, layers = report.model, report.device, report.layers
    size = f"{count_text(model.parameters)} parameters, {size_text(model.weight_bytes)}, {len(layers)} layers"
    rows = [
        *_bytes(model.bytes_by_storage),
        *_values("storage of each layer", [layer.storage for layer in layers], STORAGE_COLOURS),
        *_values("how each layer computes", [layer.mode for layer in layers], MODE_COLOURS),
        *_values("how its products are summed", [layer.accumulation for layer in layers], SUM_COLOURS),
    ]
    simulated = " (simulated)" if device.get("simulated") else ""
    where = [f"{device['name']}, {device['profile']}{simulated}"] if device else []
    if (guard := report.guard).verdict != "off":
        verdict = verdict_shown(guard.verdict, [event.kind for event in guard.events], guard.calls)
        where.append(f"guard: {verdict}, {guard.calls} calls, {guard.extra_calls} repeated")
    return bar_chart(f"{model.cls or 'model'}: {size}", rows, where)


def _bytes(by_storage: Mapping[str, int]) -> Iterator[Bar]:
    if by_storage:
        yield (f"weight bytes by storage, {size_text(sum(by_storage.values()))} in all", [], "")
    for name, share, size in shares(by_storage):
        yield (name, [(share, STORAGE_COLOURS.get(name, OTHER))], f"{size_text(size)}, {share:.1%}")


def _values(title: str, values: list[str], colours: Mapping[str, str]) -> Iterator[Bar]:
    if values:
        yield (title, [], "")
        yield ("in model order", [(1 / len(values), colours.get(value, OTHER)) for value in values], "")
    for name, count in Counter(values).most_common():
        yield (name, [(count / len(values), colours.get(name, OTHER))], f"{count} layer{'' if count == 1 else 's'}")
