"""What model code makes of a norm's result with small tensors: scaled by one and shifted by another, it is bounded by
the amax of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from ...amax import amax, norm_loses_nan
from ...dtypes import FP16_MAX
from ..operand_scale import converts_results
from ..proofs import HEADROOM_BITS, Proof
from ..result_bound import RESULT_MARGIN
from .value_bounds import ValueBound, modulated

if TYPE_CHECKING:
    from .known_values import Tag

SMALL = 16
"""How many times fewer numbers a tensor has that is measured in place of the result."""


class Operands:
    """Tell the operands of an operation that modulates: which is followed, and which scale and shift it.

    ``small``: those, the one that scales first. None where an operand is of another kind.
    """

    def __init__(self, x: torch.Tensor, scale: torch.Tensor | None, shift: torch.Tensor | None):
        self.x = x
        self.scale = scale
        self.shift = shift
        self.small = [each for each in (scale, shift) if each is not None]

    def can_be_measured(self) -> bool:
        """Tell whether what is small is that, and can be kept side by side."""
        if not all(map(self._is_measurable, self.small)):
            return False
        sizes = {each.numel() for each in self.small}
        return len(sizes) == 1 and 0 < SMALL * sizes.pop() <= self.x.numel() and not self.x.requires_grad

    def _is_measurable(self, small: object) -> bool:
        if not torch.is_tensor(small) or small.requires_grad:
            return False
        return small.is_floating_point() and small.device == self.x.device and self._is_spread_over(small.shape)

    def _is_spread_over(self, shape: torch.Size) -> bool:
        """Tell whether the result has the shape of what is followed."""
        own = self.x.shape[self.x.dim() - len(shape) :]
        return len(own) == len(shape) and all(size in (1, each) for size, each in zip(shape, own, strict=True))


class Modulation(Proof):
    """Prove that ``scale * x + shift`` keeps a bound, and so fits fp16, from amax of the scale and of the shift.

    They are copied to one place in the call and measured at its end, with those of all other modulations by one
    reduction: model code may write to them in between.

    Args:
        operation: torch's function.

    Attributes:
        bound: of the result. ``limits``: amax of what scales and of what shifts that it is made of: at least 1, and
            what held before.
        tag: of the result, in the call that calibrated, ``since``.
        wanted: a layer has multiplied the result in fp16. ``refused``: something else was done to it.
        path: what was done to the result.
        place: where what is small is copied to: (2 or 1, numbers).
    """

    def __init__(self, operation: object):
        super().__init__("modulation")
        self.operation = operation
        self.bound = ValueBound(math.inf)
        self.limits: list[float] = []
        self.tag: Tag | None = None
        self.since: object = None
        self.numbers = 0
        self.fits = False
        self.wanted = False
        self.refused = False
        self.path = Path()
        self.place: torch.Tensor | None = None
        self._recorded_in: object = None

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.limits)

    @property
    def narrows(self) -> bool:
        """Tell whether the result is made in fp16 at once."""
        return self.fits and self.wanted and not self.refused

    @property
    def is_relied_on(self) -> bool:
        return self.tag is not None and (self.narrows or self.tag.used)

    def calibrate(self, operands: Operands, x: ValueBound, source: Tag) -> bool:
        """Assume that what is small keeps two bits above what it is now. Returns False where the operation runs twice
        in a call: one place holds what is small of one run."""
        if self.since is source.call:
            self.tag = None
            return False
        self.since, self.tag = source.call, None
        self.recorder.device = operands.x.device
        self.numbers, self.wanted, self.refused = operands.small[0].numel(), False, False
        self.limits = _assumed(operands.small, self.limits)
        left = iter(self.limits)
        scale = 1.0 if operands.scale is None else next(left)
        shift = 0.0 if operands.shift is None else next(left)
        self.bound = modulated(x, scale, shift, operands.x.shape[-1])
        self.fits = self.bound.largest <= FP16_MAX / RESULT_MARGIN and converts_results(operands.x.device)
        return True

    def forget(self) -> None:
        """Begin anew, for a model whose operands are others now."""
        super().forget()
        self.limits = []

    def record(self, operands: Operands, call: object) -> None:
        """Keep what is small until the end of the call, by one kernel."""
        again, self._recorded_in = self._recorded_in is call, call
        device = None if self.place is None else self.place.device
        if again or device != operands.x.device or self.numbers != operands.small[0].numel():
            self.recorder.missed = True
        elif len(operands.small) == 1:
            self.place.copy_(operands.small[0].reshape(1, -1))
        else:
            torch.cat([each.reshape(1, -1) for each in operands.small], out=self.place)

    def magnitude(self, numbers: list[float]) -> float:
        """Return how much of a limit is reached; 1 is all of it."""
        shares = [number / limit for number, limit in zip(numbers, self.limits, strict=True)]
        return math.nan if any(map(math.isnan, shares)) else max(shares)

    def holds(self, magnitude: float) -> bool:
        return magnitude <= 1.0


def _assumed(small: list[torch.Tensor], before: list[float]) -> list[float]:
    found = torch.stack([amax(each) for each in small]).tolist()
    if not all(map(math.isfinite, found)):
        return [math.inf] * len(found)
    kept = [old if math.isfinite(old) else 1.0 for old in before] or [1.0] * len(found)
    return [max(old, 2.0**HEADROOM_BITS * now) for now, old in zip(found, kept, strict=True)]


class Path:
    """List what modulates one tensor of a model, in the order of model code."""

    def __init__(self) -> None:
        self.steps: list[Modulation] = []

    def next_of(self, tag: Tag, operation: object) -> Modulation | None:
        """Return the next modulation of a tensor; None for one that the call that calibrated did not meet there."""
        place, tag.steps = tag.steps, tag.steps + 1
        step = self.steps[place] if place < len(self.steps) else None
        if tag.values.calibrating:
            if step is None or step.operation is not operation:
                step = Modulation(operation)
                self.steps[place:] = [step]
            return step
        return step if step is not None and step.operation is operation and step.since is tag.values.since else None

    def modulations(self) -> Iterator[Modulation]:
        """Yield them, and those of their results."""
        for step in self.steps:
            yield step
            yield from step.path.modulations()


class SmallTensors:
    """Keep what modulations of one device are given in a call, and measure it at its end.

    Args:
        modulations: that are relied on, sorted by ``numbers``.
        records: where to write the amax of each of their small tensors, in this order.
    """

    def __init__(self, modulations: Sequence[Modulation], records: torch.Tensor):
        self._groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        first = 0
        with torch.inference_mode(False):
            for numbers, group in groupby(modulations, lambda modulation: modulation.numbers):
                alike = list(group)
                widths = [modulation.width for modulation in alike]
                rows = torch.zeros(sum(widths), numbers, device=records.device)
                self._groups.append((rows, records[first : first + len(rows)]))
                for modulation, place in zip(alike, rows.split(widths), strict=True):
                    modulation.place = place
                first += len(rows)

    def measure(self) -> None:
        """Write the amax of each."""
        for rows, records in self._groups:
            if norm_loses_nan(rows.device):
                records.copy_(rows.abs().amax(1))
            else:
                torch.linalg.vector_norm(rows, math.inf, dim=1, out=records)
