"""Colours of storages, modes and accumulation, in pictures and on the page."""

from ..modes import FP8, FP16_ACC16, FP32, INT8, MODES

Colour = tuple[int, int, int]

OTHER: Colour = (176, 160, 90)
MODE_COLOURS = {name: mode.colour for name, mode in MODES.items()}
STORAGE_COLOURS = {
    "fp8_e4m3fn": FP8.colour, "fp8_e5m2": (220, 104, 46), "fp16": MODES["fp16"].colour, "bf16": MODES["bf16"].colour,
    "fp32": FP32.colour, "int8": INT8.colour, "nvfp4": (236, 214, 92), "mxfp8": (190, 108, 70),
}  # fmt: skip
SUM_COLOURS = {"fp32": FP32.colour, "fp16": FP16_ACC16.colour, "fp8_fast": FP8.colour}


def hex_of(colour: Colour) -> str:
    """Write an RGB colour as CSS does: #eea52a."""
    return "#{:02x}{:02x}{:02x}".format(*colour)
