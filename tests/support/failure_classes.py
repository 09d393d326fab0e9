"""The classes of precision failures that users of diffusion models report, and what is known of those no test here makes.

``tests/host/guard/test_failure_classes.py`` makes the others happen and measures them; ``scripts/assets/failure_classes.py`` prints both.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES = {
    1: "Feed-forward product past 65504 just before a norm",
    2: "Residual stream past 65504",
    3: "Text encoder overflows in fp16",
    4: "VAE overflows in fp16",
    5: "Attention scores overflow in an unfused attention",
    6: "Quantized attention kernel gives NaN",
    7: "fp16 sums overflow on the way",
    8: "Hand-written norm in fp16",
    9: "Rotary positions rounded",
    10: "Timesteps rounded",
    11: "Mask of another dtype becomes -inf",
    12: "Clamp in the model's code hides the loss",
    13: "Clamp in fp16 that belongs to the model",
    14: "fp16 forced on a model that is not made for it",
    15: "The dtype asked for is not the one used",
    16: "No bf16 in hardware: all in fp32, slow",
    17: "fp8 scales dropped by the loader",
    18: "Scaled e5m2 read as e4m3fn",
    19: "Scale of an unknown shape or dtype",
    20: "Cast to fp8 without a scale",
    21: "fp8 products with activations clipped at 448",
    22: "fp8 products not used, or slower",
    23: "LoRA rounded away on fp8 weights",
    24: "fp8 arithmetic missing in LoRA code",
    25: "Activation dtype taken from an fp8 weight",
    26: "Two dtypes meet",
    27: "dtype missing on the device",
    28: "torch.compile with e4m3fn before sm_89",
    29: "Compiled graph gives NaN, eager does not",
    30: "The device's fp16 product is wrong",
    31: "Non-finite in every dtype on one backend",
    32: "Finite once, NaN when run again",
    33: "NaN or Inf in a file",
    34: "Loading takes all memory",
    35: "Non-finite that no dtype cures",
}
NOT_MADE = {
    15: ("nothing is NaN", "Compute Dtype sets it for quantized weights too; Report lists storage and mode of each layer"),
    19: ("an error or wrong scale while loading", "the pack's loaders read row- and block-wise scales, of any float dtype"),
    21: ("fp8 products need a GPU; finite, so not seen but by `check`, see drift.md", "Compute Dtype fp8 scales activations as they come, and clips none"),
    22: ("speed, not values", "Report names the mode of each layer; Device Info tells whether fp8 products run"),
    23: ("finite, so not seen but by `check`, see drift.md", "Halfsafe's loaders and Compute Dtype add a LoRA beside weights in 8 bits, where it keeps its effect"),
    24: ("an error of other packs' code", "nothing of this pack; errors pass through the guard (see 26)"),
    25: ("an error of other packs' code", "rules keep embedders out of fp8; errors pass through the guard (see 26)"),
    27: ("needs MPS or XPU", "not tried; Device Info names what a device lacks"),
    28: ("needs an older GPU and Triton", "storage e5m2 or fp16; the guard does nothing, as compilation raises"),
    34: ("memory, not values", "the pack's loaders stream tensor by tensor"),
}


@dataclass(frozen=True)
class Measured:
    """One class as a test made it. ``before``, ``after``: relative error against fp32, None where there is no result."""

    number: int
    how: str
    verdict: str
    before: float | None
    after: float | None
    extra_calls: int | None
    note: str = ""


def table(rows: list[Measured]) -> str:
    """All classes as Markdown."""
    lines = [
        "| # | class | how it was made | error without the guard | verdict | error with it | extra calls | note |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, name in NAMES.items():
        made = [row for row in rows if row.number == number]
        lines += [_line(name, row) for row in made] if made else [_not_made(number, name)]
    return "\n".join(lines)


def _line(name: str, row: Measured) -> str:
    calls = "" if row.extra_calls is None else row.extra_calls
    return f"| {row.number} | {name} | {row.how} | {_error(row.before)} | {row.verdict} | {_error(row.after)} | {calls} | {row.note} |"


def _not_made(number: int, name: str) -> str:
    why, help_ = NOT_MADE[number]
    return f"| {number} | {name} | not reproduced here: {why} | | not seen | | | {help_} |"


def _error(value: float | None) -> str:
    if value is None:
        return "no result"
    return "NaN" if value != value else f"{value:.1e}"
