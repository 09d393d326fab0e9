"""Operands in fp16: made anew for a layer, or taken over from the layer before that was given the same tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..base.layer_names import block_of
from .operand_scale import OperandScale


class MadeOperand(NamedTuple):
    """Hold the last operand with its tensor and scale, and the number of layers still to take the operand."""

    x: torch.Tensor
    scale: OperandScale
    operand: torch.Tensor
    left: int = 0


class SharedOperands:
    """Make the operands of a model's operations.

    A call that calibrates finds out who shares an operand: who is given the very same tensor next, not written to in
    between, in the same block. Nothing is left for a later block: ComfyUI's model compiler lends the next one the
    memory of the one before (``nodes/host/run/model_compiler.py``).
    """

    def __init__(self) -> None:
        self._made: MadeOperand | None = None
        self._calls: dict[OperandScale, int] = {}
        self._first: dict[OperandScale, OperandScale] = {}
        self.sharing: dict[OperandScale, list[OperandScale]] = {}

    def begin(self) -> None:
        """Start a call that calibrates: who shares an operand is found out anew."""
        self._made, self._calls, self._first, self.sharing = None, {}, {}, {}

    def end(self) -> None:
        """Let go of the call's tensors."""
        self._made = None

    def of(self, scale: OperandScale, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in fp16, scaled, and recorded where it is watched. A compiled graph records every operand, in
        the kernel that makes it."""
        if torch.compiler.is_compiling():
            operand = scale.scaled(x)
            scale.record(x, operand)
            return operand
        made = self._made
        alike = made is not None and made.x is x and made.scale.exponent == scale.exponent
        if alike and self._first.get(scale) is made.scale:
            self._made = made._replace(left=made.left - 1) if made.left > 1 else None
            return made.operand
        operand = scale.scaled_eagerly(x)
        if scale.gain is None:
            scale.recorder.missed.any = True
        elif scale.is_watched:
            scale.record(x, operand)
        takers = self.sharing.get(scale)
        self._made = MadeOperand(x, scale, operand, len(takers)) if takers else None
        return operand

    def measured(self, scale: OperandScale, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in fp16, scaled, in a call that calibrates."""
        operand, made = scale.scaled_eagerly(x), self._made
        self._calls[scale] = self._calls.get(scale, 0) + 1
        if self._calls[scale] == 1 and made is not None and made.x is x and _is_same(made, scale, operand):
            self._first[scale] = made.scale
            self.sharing.setdefault(made.scale, []).append(scale)
        else:
            self._first.pop(scale, None)
            self._made = MadeOperand(x, scale, operand)
        return operand


def _is_same(made: MadeOperand, scale: OperandScale, operand: torch.Tensor) -> bool:
    in_one_block = made.scale is not scale and block_of(made.scale.name) == block_of(scale.name)
    return in_one_block and made.scale.exponent == scale.exponent and torch.equal(made.operand, operand)
