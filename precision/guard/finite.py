"""Find NaN and Inf in the nested values of a graph; count them and name their batch rows."""

from dataclasses import dataclass

import torch

from ..base.nested import leaves

LISTED = 8


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
