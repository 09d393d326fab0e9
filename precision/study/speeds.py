"""Speeds of 8-bit weights beside 16-bit ones, in what was measured on a card."""

from collections.abc import Iterator

from ..devices.measurements import Measurement
from ..plan.auto import UNQUANTIZED
from ..plan.compute import SAFE
from .tradeoffs import Measurements, Tradeoff

SOURCE = "Measure my card"
HALF = ("fp16", "bf16", SAFE)
IN_8_BITS = {"int8": "int8", "fp8_e4m3fn": "fp8"}
"""Storage -> the mode of its products."""


def speeds_beside_16_bit(found: Measurements, date: str) -> list[Measurement]:
    """List the speeds of int8 and fp8, multiplied and unpacked, relative to the fastest 16-bit row.

    The ends of a ratio are what the spreads of both rows allow. Rows that did not work, and rows
    whose timed steps lie too far apart to rank them, are left out; without a 16-bit row the list is
    empty.

    Args:
        found: the measurements of one model.
        date: year, month and day of the measurement.
    """
    rows = [row for row in found.rows if row.works and row.seconds and not row.is_noisy]
    plain = [row for row in rows if _stored(row, found) in UNQUANTIZED and row.computed_by in HALF]
    if not plain:
        return []
    beside = min(plain, key=lambda row: row.seconds)
    card, _, torch = found.machine
    shape = "latent " + " x ".join(map(str, found.shape))
    return [
        Measurement(card, found.model, setting, _ratio(row, beside), "16 bit", torch, date, SOURCE, shape)
        for setting, row in _in_8_bits(rows, found)
    ]


def _in_8_bits(rows: list[Tradeoff], found: Measurements) -> Iterator[tuple[str, Tradeoff]]:
    """Yield the fastest row of each setting in 8 bits."""
    by_setting: dict[str, list[Tradeoff]] = {}
    for row in rows:
        if mode := IN_8_BITS.get(_stored(row, found)):
            by_setting.setdefault(mode if row.computed_by == mode else f"{mode} unpacked", []).append(row)
    for setting, alike in by_setting.items():
        yield setting, min(alike, key=lambda row: row.seconds)


def _stored(row: Tradeoff, found: Measurements) -> str:
    return found.storage if found.is_as_file(row) else row.storage


def _ratio(row: Tradeoff, beside: Tradeoff) -> tuple[float, float]:
    least = (beside.seconds - beside.spread) / (row.seconds + row.spread)
    most = (beside.seconds + beside.spread) / max(row.seconds - row.spread, row.seconds / 2)
    return round(least, 2), round(most, 2)
