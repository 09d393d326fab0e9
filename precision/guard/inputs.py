"""Find NaN and Inf in nested values of a graph and in the inputs of a call."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ..base.amax import amax_value, finite, floats
from ..base.errors import HalfsafeError
from ..base.message import Message, joined
from ..base.nested import floats_in, leaves, replaced
from ..report.schema import Verdict
from .localize import Origin
from .verdicts import BETWEEN_CALLS

LISTED = 8
SIGMA, SIGMAS, SAMPLER = "sigma", "sigmas of the scheduler", "sampler"
MADE_WHILE_SAMPLING = (SIGMA, SIGMAS, SAMPLER)
"""Inputs that no node of the graph gave: the sampler or its scheduler made them."""


@dataclass(frozen=True)
class NotFiniteInput:
    """An input of a call with NaN or Inf, in the tensors ``values``.

    ``verdict``: of the run if this input is the cause. ``advice``: for the user then; None for the
    verdict's own advice.
    """

    name: str
    values: tuple[torch.Tensor, ...]
    verdict: Verdict = "bad_input"
    advice: str | None = None

    @property
    def has_nan(self) -> bool:
        """True if it holds NaN. Inf alone may be intended (a mask) or harmless."""
        return any(bool(torch.isnan(floats(value)).any()) for value in self.values)

    def nan_rows(self, batch: int) -> set[int]:
        """List the rows of a batch whose input holds NaN; all rows if a value has no batch
        dimension."""
        rows: set[int] = set()
        for value in self.values:
            found = _rows_of(torch.isnan(floats(value)))
            has_rows = value.dim() and len(value) == batch
            rows.update(found if has_rows else range(batch) if found else ())
        return rows

    def diagnosis(self, evidence: str = "") -> "Diagnosis":
        """Return the diagnosis that blames this input."""
        evidence = BETWEEN_CALLS if self.name == SAMPLER else evidence
        return Diagnosis(Origin(self.name, "", "input", "", math.nan), self.verdict, self.advice, evidence)


@dataclass(frozen=True)
class Diagnosis:
    """A verdict on a call that no repeat cures, with its evidence. ``advice``: None for the
    verdict's own advice."""

    origin: Origin | None
    verdict: Verdict
    advice: str | None = None
    evidence: str = ""


def inputs_not_finite(
    named: Iterable[tuple[str, object]], advice: dict[str, str] | None = None
) -> list[NotFiniteInput]:
    """List the inputs with NaN or Inf among (name, nested values). ``advice``: name -> what to
    do."""
    found = ((name, tuple(tensor for tensor in floats_in(values) if not is_finite(tensor))) for name, values in named)
    return [NotFiniteInput(name, bad, _verdict_on(name), (advice or {}).get(name)) for name, bad in found if bad]


def _verdict_on(name: str) -> Verdict:
    return "not_precision" if name in MADE_WHILE_SAMPLING else "bad_input"


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf. Synchronizes with its device."""
    return math.isfinite(amax_value(tensor))


def rows_not_finite(values) -> set[int]:
    """Return the indices of rows with NaN or Inf: in the first of nested tensors, and in each other
    with as many rows."""
    tensors = floats_in(values)
    return {row for each in tensors if each.shape[:1] == tensors[0].shape[:1] for row in _rows_of(~finite(each))}


def _rows_of(mask: torch.Tensor) -> list[int]:
    """List the places along the first dimension where a mask is set; a 0-dim mask has one."""
    rows = mask if mask.dim() else mask[None]
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).any(1).nonzero().flatten().tolist()


def rows_that_differ(values, others) -> set[int]:
    """Return the rows in which the first tensors of nested values differ."""
    one, other = (floats_in(each)[0].flatten(1) for each in (values, others))
    return {*(one != other).any(1).nonzero().flatten().tolist()}


def with_nan(values, rows: Iterable[int]):
    """Return a copy of nested values with these rows of their floating-point tensors set to NaN."""
    index = torch.tensor(sorted(rows))

    def filled(value: torch.Tensor) -> torch.Tensor:
        # Token masks beside a conditioning are integers, and a number for all rows has no
        # dimension.
        has_rows = value.is_floating_point() and value.dim() and len(value) > index[-1]
        return value.index_fill(0, index.to(value.device), math.nan) if has_rows else value

    return replaced(values, filled)


def without_nan(inputs: Iterable[NotFiniteInput]) -> tuple[Callable, list[NotFiniteInput]]:
    """Return (function, inputs): the function replaces each NaN by a zero in tensors of these
    inputs and returns other tensors unchanged; the inputs are those that hold Inf afterwards."""
    zeros: dict[int, torch.Tensor] = {}
    infinite = []
    for one in inputs:
        zeros |= {id(value): torch.where(torch.isnan(value), torch.zeros_like(value), value) for value in one.values}
        left = tuple(zeros[id(value)] for value in one.values if not is_finite(zeros[id(value)]))
        if left:
            infinite.append(replace(one, values=left))
    return (lambda value: zeros.get(id(value), value)), infinite


def zeroed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with a zero for each NaN and Inf. For evidence only: results of it are never
    returned to the user."""
    return torch.where(finite(tensor), tensor, torch.zeros_like(tensor))


def not_finite(values) -> list[tuple[str, str]]:
    """List the tensors with NaN or Inf in nested lists, tuples and dicts: (path, sentence on how
    many values are NaN and Inf, and in which rows along the first dimension).

    Raises:
        HalfsafeError: a tensor is on torch's meta device.
    """
    tensors = [(name, leaf) for name, leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
    for name, tensor in tensors:
        if tensor.is_meta:
            problem = Message("Check Finite cannot check '{0}': a tensor on torch's meta device has no values.", name)
            raise HalfsafeError(problem, "Check the node before it.")
    return [(name, _described(name, tensor)) for name, tensor in tensors if not is_finite(tensor)]


def _described(name: str, tensor: torch.Tensor) -> str:
    numbers = floats(tensor)
    bad = ~torch.isfinite(numbers)
    nan = int(torch.isnan(numbers).sum())
    count = int(bad.sum())
    what = [f"{number} {kind}" for kind, number in (("NaN", nan), ("Inf", count - nan)) if number]
    places = _rows_of(bad)
    rows = ", ".join(map(str, places[:LISTED])) + (", ..." if len(places) > LISTED else "")
    found = joined(what, " and "), numbers.numel(), f"{count / numbers.numel():.1%}", rows
    return Message("{0}: {1} of {2} values ({3}), batch rows {4}", name, *found)
