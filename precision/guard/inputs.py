"""What holds NaN or Inf: nested values of a graph, and what a call was given, with the verdict if it is the cause."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ..base.amax import amax_value
from ..base.nested import leaves, replaced, tensors_in
from ..report.schema import Verdict
from .localize import Origin
from .verdicts import BAD_INPUT, BETWEEN_CALLS, NOT_PRECISION

LISTED = 8
SIGMA, SIGMAS, SAMPLER = "sigma", "sigmas of the scheduler", "sampler"
MADE_WHILE_SAMPLING = (SIGMA, SIGMAS, SAMPLER)
"""Inputs that no node of the graph gave: the sampler or its scheduler made them."""


@dataclass(frozen=True)
class NotFiniteInput:
    """An input of a call with NaN or Inf, in the tensors ``values``.

    ``verdict``: of the run if it is the cause, and ``advice`` what to do then; None for what the verdict has.
    """

    name: str
    values: tuple[torch.Tensor, ...]
    verdict: Verdict = BAD_INPUT
    advice: str | None = None

    def nan_rows(self, batch: int) -> set[int]:
        """List the rows of a batch that were given NaN: all of them, where a value has no row for each."""
        rows: set[int] = set()
        for value in self.values:
            bad = torch.isnan(value if value.dim() else value[None])
            bad = bad.reshape(len(bad), -1).any(1)
            found = bad.nonzero().flatten().tolist()
            rows.update(found if len(bad) == batch else range(batch) if found else ())
        return rows

    def diagnosis(self, evidence: str) -> "Diagnosis":
        """Blame it for the failure."""
        evidence = BETWEEN_CALLS if self.name == SAMPLER else evidence
        return Diagnosis(Origin(self.name, "", "input", "", math.nan), self.verdict, self.advice, evidence)


@dataclass(frozen=True)
class Diagnosis:
    """A verdict beyond the reach of repeats, with its evidence. ``advice``: None for what the verdict has."""

    origin: Origin | None
    verdict: Verdict
    advice: str | None = None
    evidence: str = ""


def inputs_not_finite(
    named: Iterable[tuple[str, object]], advice: dict[str, str] | None = None
) -> list[NotFiniteInput]:
    """List the inputs with NaN or Inf among (name, nested values). ``advice``: name -> what to do."""
    found = ((name, tuple(tensor for tensor in tensors_in(values) if not is_finite(tensor))) for name, values in named)
    verdicts: dict[str, Verdict] = dict.fromkeys(MADE_WHILE_SAMPLING, NOT_PRECISION)
    return [
        NotFiniteInput(name, bad, verdicts.get(name, BAD_INPUT), (advice or {}).get(name)) for name, bad in found if bad
    ]


def nan_inputs(named: Iterable[tuple[str, object]]) -> list[NotFiniteInput]:
    """List the inputs with NaN among (name, nested values). What is infinite may be meant, or may not matter."""
    return [one for one in inputs_not_finite(named) if any(torch.isnan(value).any() for value in one.values)]


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds neither NaN nor Inf, which waits for its device."""
    return math.isfinite(amax_value(tensor))


def rows_not_finite(tensor: torch.Tensor) -> list[int]:
    """List the places along the first dimension that hold NaN or Inf."""
    return (~torch.isfinite(tensor.flatten(1))).any(1).nonzero().flatten().tolist()


def with_nan(values, rows: Iterable[int]):
    """Return a copy of nested values with NaN in these rows."""
    index = torch.tensor(sorted(rows))
    return replaced(values, lambda value: value.index_fill(0, index.to(value.device), math.nan))


def changed(chosen: Iterable[NotFiniteInput], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Return a function that changes each tensor of the chosen inputs, and no other tensor."""
    wanted = {id(value) for one in chosen for value in one.values}
    return lambda value: change(value) if id(value) in wanted else value


def without_nan(inputs: Iterable[NotFiniteInput]) -> tuple[Callable, list[NotFiniteInput]]:
    """Return (a function that gives a tensor of these inputs with a zero for each NaN, and any other tensor as it is;
    the inputs that hold Inf then)."""
    zeros: dict[int, torch.Tensor] = {}
    infinite = []
    for one in inputs:
        zeros |= {id(value): torch.where(torch.isnan(value), torch.zeros_like(value), value) for value in one.values}
        left = tuple(zeros[id(value)] for value in one.values if not is_finite(zeros[id(value)]))
        if left:
            infinite.append(replace(one, values=left))
    return (lambda value: zeros.get(id(value), value)), infinite


@dataclass(frozen=True)
class NotFiniteTensor:
    """A tensor that holds NaN or Inf. ``rows``: the places along its first dimension that do."""

    name: str
    nan: int
    inf: int
    total: int
    rows: tuple[int, ...]

    def __str__(self) -> str:
        what = [f"{self.nan} NaN"] * bool(self.nan) + [f"{self.inf} Inf"] * bool(self.inf)
        share = (self.nan + self.inf) / self.total
        rows = ", ".join(map(str, self.rows[:LISTED])) + (", ..." if len(self.rows) > LISTED else "")
        return f"{self.name}: {' and '.join(what)} of {self.total} values ({share:.1%}), batch rows {rows}"


def zeroed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with a zero for each NaN and Inf: it shows a cause and is never a cure."""
    return torch.where(torch.isfinite(tensor), tensor, torch.zeros_like(tensor))


def not_finite(values) -> list[NotFiniteTensor]:
    """List the tensors with NaN or Inf in nested lists, tuples and dicts, named by their places."""
    found = (_check(leaf, name) for name, leaf in leaves(values) if isinstance(leaf, torch.Tensor))
    return [finding for finding in found if finding]


def _check(tensor: torch.Tensor, name: str) -> NotFiniteTensor | None:
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
    rows = rows.float() if rows.dtype.itemsize == 1 else rows
    bad = ~torch.isfinite(rows)
    if not bad.any():
        return None
    nan = int(torch.isnan(rows).sum())
    places = tuple(bad.any(1).nonzero().flatten().tolist())
    return NotFiniteTensor(name, nan, int(bad.sum()) - nan, tensor.numel(), places)
