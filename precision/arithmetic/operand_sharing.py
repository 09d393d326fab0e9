"""Operands that several operations have in common, such as the input of q, k and v, or the text of every block: cast
and recorded once."""

import weakref
from typing import NamedTuple

import torch

from ..layer_names import block_of
from .bounds.known_values import KnownValues, Tag
from .operand_scale import OperandScale


class LastOperand(NamedTuple):
    """Keep the operand made last: of which tensor, by whose scale, as multiplied, and how many operations are still to
    share it."""

    x: torch.Tensor
    scale: OperandScale
    operand: torch.Tensor
    left: int = 0


class SharedOperands:
    """Make the operands of a model's operations.

    A call that calibrates finds out who shares an operand: who is given the very same tensor next, not written to in
    between, in the same block. Of these nothing is kept for a later block: ComfyUI's model compiler lends the next one
    the memory of the one before (``nodes/host/run/model_compiler.py``). What is measured once for several operations,
    which is nothing with that compiler, is cast once for them too, and kept as long as the tensor itself.
    """

    def __init__(self) -> None:
        self.values = KnownValues()
        self._last: LastOperand | None = None
        self._uses: dict[OperandScale, int] = {}
        self._first: dict[OperandScale, OperandScale] = {}
        self._sharing: dict[OperandScale, list[OperandScale]] = {}
        self._cast: list[weakref.ref[Tag]] = []

    def begin(self, calibrating: bool) -> None:
        """Start a call. One that calibrates forgets who shares an operand."""
        self.end()
        self.values.begin(calibrating)
        if calibrating:
            self._uses, self._first, self._sharing = {}, {}, {}

    def end(self) -> None:
        """Let go of the tensors of the call."""
        self._last = None
        for kept in self._cast:
            if (tag := kept()) is not None:
                tag.operand = None
        self._cast.clear()
        self.values.end()

    def sharing(self, proof: object) -> list[OperandScale]:
        """Return the scales of the operations after this one that take over its operand and its record."""
        return self._sharing.get(proof, [])  # type: ignore[call-overload]  # proofs of other kinds share nothing

    def place_of(self, scale: OperandScale) -> tuple[bool, int, bool]:
        """Tell of an operation whether it takes over an operand, how many take over its own, and whether it runs once
        in a call."""
        return scale in self._first, len(self._sharing.get(scale, [])), self.runs_once(scale)

    def operand(self, scale: OperandScale, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as it is multiplied: in fp16, scaled, and recorded unless it is known to fit."""
        if torch.compiler.is_compiling():
            operand = scale.scaled(x)
            scale.record(x, operand, alone=False)
            return operand
        last = self._last
        if last is not None and last.x is x and self._first.get(scale) is last.scale and _scale_alike(last, scale):
            self._last = last._replace(left=last.left - 1) if last.left > 1 else None
            return last.operand
        sharing = self._sharing.get(scale)
        known = not self.values.sampling and all(self.values.covers(each, x) for each in (scale, *(sharing or ())))
        operand = self._made(scale, x)
        if not known:
            scale.owed = not sharing and self._is_seen_in_result(scale, x)
            if not scale.owed:
                scale.record(x, operand, alone=self.runs_once(scale))
        self._last = LastOperand(x, scale, operand, len(sharing)) if sharing else None
        return operand

    def _made(self, scale: OperandScale, x: torch.Tensor) -> torch.Tensor:
        tag, is_view = self.values.tag_of(x)
        if tag is None or is_view or tag.once is None or not tag.once.is_shared or scale.exponent:
            return scale.scaled(x)
        if tag.operand is not None:
            return tag.operand
        operand = scale.scaled(x)
        if operand is not x:
            tag.operand = operand
            self._cast.append(weakref.ref(tag))
        return operand

    def _is_seen_in_result(self, scale: OperandScale, x: torch.Tensor) -> bool:
        return scale.by_result and not self.values.sampling and self.values.tag_of(x)[0] is not None

    def runs_once(self, scale: OperandScale) -> bool:
        """Tell whether an operation runs once in a call."""
        return self._uses.get(scale) == 1

    def calibrated_operand(self, scale: OperandScale, x: torch.Tensor) -> torch.Tensor:
        """Return the same in a call that calibrates, without a record."""
        operand, last = scale.scaled(x), self._last
        self._uses[scale] = self._uses.get(scale, 0) + 1
        if self._uses[scale] == 1 and last is not None and last.x is x and _are_equal(last, scale, operand):
            self._first[scale] = last.scale
            self._sharing.setdefault(last.scale, []).append(scale)
        else:
            self._first.pop(scale, None)
            self._last = LastOperand(x, scale, operand)
        return operand


def _are_equal(last: LastOperand, scale: OperandScale, operand: torch.Tensor) -> bool:
    in_one_block = block_of(last.scale.name) == block_of(scale.name)
    return in_one_block and last.scale is not scale and _scale_alike(last, scale) and torch.equal(last.operand, operand)


def _scale_alike(last: LastOperand, scale: OperandScale) -> bool:
    return last.scale.exponent == scale.exponent
