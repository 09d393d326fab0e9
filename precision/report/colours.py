"""Colours of storages, modes and accumulation, in pictures and on the page."""

from ..formats.registry import FORMAT_OF_STORAGE
from ..modes import FP8, FP16_ACC16, FP32, MODES

Colour = tuple[int, int, int]

OTHER: Colour = (176, 160, 90)
MODE_COLOURS = {name: mode.colour for name, mode in MODES.items()}
STORAGE_COLOURS = {
    **{row.storage: row.colour for row in FORMAT_OF_STORAGE.values()},
    **{name: MODES[name].colour for name in ("fp16", "bf16", "fp32")},
}
SUM_COLOURS = {"fp32": FP32.colour, "fp16": FP16_ACC16.colour, "fp8_fast": FP8.colour}


def hex_of(colour: Colour) -> str:
    """Write an RGB colour as CSS does: #eea52a."""
    return "#{:02x}{:02x}{:02x}".format(*colour)
