"""The products of a layer's inputs, summed over tokens in blocks along the diagonal: what rounding has to know of them.

The squared error that a change ``D`` of a weight (rows, K) makes on inputs ``X`` (tokens, K) is ``tr(D H D^T)`` with
``H = X^T X``. Whole, H of 14336 inputs takes 822 MB; its blocks of 256 take 15 MB and keep most of what it knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..formats.int8 import rotation_group

WIDTHS = (1024, 512, 256)
ROWS = 2048


def block_width(columns: int, width: int) -> int:
    """Return the width of equal blocks of ``columns`` inputs, ``width`` at most: a multiple of the rotation's group."""
    group = rotation_group(columns) or 1
    units = columns // group
    counts = (count for count in range(-(-columns // width), units) if units % count == 0)
    return columns // next(counts, units)


def products_bytes(columns: Iterable[int], width: int) -> int:
    """Count the bytes of the products of layers with so many inputs."""
    return sum(number * block_width(number, width) * 4 for number in columns)


@dataclass
class Products:
    """Sums of ``x^T x`` over ``tokens`` inputs of a layer: fp32 blocks ``(K / width, width, width)`` in host memory.

    ``left_out``: inputs that hold NaN or Inf, which are not in the sums.
    """

    blocks: torch.Tensor
    tokens: int = 0
    left_out: int = 0

    @classmethod
    def empty(cls, columns: int, width: int) -> Products:
        width = block_width(columns, width)
        with torch.inference_mode(False):
            return cls(torch.zeros(columns // width, width, width))

    @property
    def width(self) -> int:
        return self.blocks.shape[1]

    @property
    def columns(self) -> int:
        return self.blocks.shape[0] * self.width

    @torch.no_grad()
    def add(self, x: torch.Tensor) -> None:
        """Add a layer's input ``(..., K)``, of which at most ``ROWS`` tokens, spread evenly, are taken."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > ROWS:
            rows = rows[torch.linspace(0, len(rows) - 1, ROWS, device=x.device).long()]
        rows = rows.float()
        finite = torch.isfinite(rows).all(1)
        count = int(finite.sum())
        if count < len(rows):
            self.left_out += len(rows) - count
            rows = rows[finite]
        self.tokens += count
        parts = rows.unflatten(1, (-1, self.width)).transpose(0, 1)
        self.blocks += torch.bmm(parts.mT, parts).cpu()
