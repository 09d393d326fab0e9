"""What a call was given that is not finite: which rows of its result that explains,
and the verdict if it is the cause."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..base.amax import amax_value
from ..base.nested import tensors_in
from .finite import zeroed
from .localize import Origin
from .verdicts import BAD_INPUT, NOT_PRECISION
from .wording import BETWEEN_CALLS

SIGMA, SIGMAS, SAMPLER = "sigma", "sigmas of the scheduler", "sampler"
MADE_WHILE_SAMPLING = (SIGMA, SIGMAS, SAMPLER)
"""Inputs that no node of the graph gave: the sampler or its scheduler made them."""


def input_origin(name: str) -> Origin:
    """Return the origin of what a call was given."""
    return Origin(name, "", "input", "", math.nan)


@dataclass(frozen=True)
class NotFiniteInput:
    """An input of a call with NaN or Inf.

    Args:
        name: what people know it as.
        values: its tensors that are not finite.
        verdict: the verdict if it is the cause, and ``advice`` what to do then; None for what the verdict has.
    """

    name: str
    values: tuple[torch.Tensor, ...]
    verdict: str = BAD_INPUT
    advice: str | None = None

    @property
    def origin(self) -> Origin:
        """Return where NaN or Inf came from: this input."""
        return input_origin(self.name)

    def nan_rows(self, batch: int) -> set[int]:
        """List the rows of a batch that were given NaN: all of them, where a value has no row for each."""
        rows: set[int] = set()
        for value in self.values:
            bad = (
                torch.isnan(value).reshape(value.shape[0], -1).any(1) if value.dim() else torch.isnan(value).reshape(1)
            )
            found = bad.nonzero().flatten().tolist()
            rows.update(found if len(bad) == batch else range(batch) if found else ())
        return rows

    def diagnosis(self, evidence: str) -> "Diagnosis":
        """Blame it for the failure."""
        return Diagnosis(self.origin, self.verdict, self.advice, BETWEEN_CALLS if self.name == SAMPLER else evidence)


@dataclass(frozen=True)
class Diagnosis:
    """A verdict beyond the reach of repeats, with its evidence.

    Args:
        advice: what to do; None for what the verdict has.
    """

    origin: Origin | None
    verdict: str
    advice: str | None = None
    evidence: str = ""


def inputs_not_finite(
    named: Iterable[tuple[str, object]], advice: dict[str, str] | None = None
) -> list[NotFiniteInput]:
    """List the inputs with NaN or Inf among (name, nested values).

    ``advice``: name -> what to do if the input is the cause.
    """
    found = ((name, tuple(tensor for tensor in tensors_in(values) if not is_finite(tensor))) for name, values in named)
    return [NotFiniteInput(name, bad, _verdict_on(name), (advice or {}).get(name)) for name, bad in found if bad]


def _verdict_on(name: str) -> str:
    return NOT_PRECISION if name in MADE_WHILE_SAMPLING else BAD_INPUT


def nan_inputs(named: Iterable[tuple[str, object]]) -> list[NotFiniteInput]:
    """List the inputs with NaN among (name, nested values). What is infinite may be meant, or may not matter."""
    return [one for one in inputs_not_finite(named) if any(torch.isnan(value).any() for value in one.values)]


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds neither NaN nor Inf, which waits for its device."""
    return math.isfinite(amax_value(tensor))


def rows_not_finite(tensor: torch.Tensor) -> list[int]:
    """List the places along the first dimension that hold NaN or Inf."""
    return (~torch.isfinite(tensor.flatten(1))).any(1).nonzero().flatten().tolist()


def zero_for_nan(chosen: Iterable[NotFiniteInput]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that replaces each NaN in tensors of the chosen inputs by zero."""
    return _changed(chosen, lambda value: torch.where(torch.isnan(value), torch.zeros_like(value), value))


def zero_for_not_finite(chosen: Iterable[NotFiniteInput]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that replaces each NaN and Inf in tensors of the chosen inputs by zero."""
    return _changed(chosen, zeroed)


def _changed(chosen: Iterable[NotFiniteInput], change: Callable[[torch.Tensor], torch.Tensor]):
    wanted = {id(value) for one in chosen for value in one.values}
    return lambda value: change(value) if id(value) in wanted else value

