"""Rotary position embeddings: pairs of numbers of q and k are multiplied by 2 x 2 matrices, which a model makes once a
call for all of its blocks."""

from __future__ import annotations

import math

import torch

from ..norms import largest_row_norm
from ..proofs import Proof
from .value_bounds import ROUNDING, ValueBound


class Rotation(Proof):
    """Prove that the rows of a model's 2 x 2 matrices keep a 2-norm: 1 where they only rotate.

    ``size``: that norm. Model code makes the matrices once in a call, and nobody writes to them.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.size = 1.0

    def measure(self, matrices: torch.Tensor) -> None:
        """Assume of matrices (..., 2, 2) what they keep now; never less than a rotation."""
        self.recorder.device = matrices.device
        self.size = max(1.0, largest_row_norm(matrices).item()) * ROUNDING

    def record(self, matrices: torch.Tensor) -> None:
        """Record the largest 2-norm of a row."""
        if self.recorder.entry is None or self.recorder.entry.device != matrices.device:
            self.recorder.missed = True
        else:
            self.recorder.entry.write_row_norm(matrices)

    def holds(self, magnitude: float) -> bool:
        """Tell whether matrices keep the norm."""
        return magnitude <= self.size

    def of(self, x: ValueBound) -> ValueBound:
        """Bound what becomes of rows: a number is at most ``size`` times the 2-norm of its pair, a pair's 2-norm
        ``sqrt(2)`` times as much."""
        factor = ROUNDING * math.sqrt(2.0) * self.size
        return ValueBound(factor * x.largest, factor * x.norm)
