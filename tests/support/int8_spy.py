"""Counts torch's int8 products, by the operation itself: ``torch._int_mm``, which comfy-kitchen's eager int8 product calls."""

from __future__ import annotations

from unittest import mock

import torch


class Int8Products:
    """The products of int8 by int8 made inside of ``with``. ``rows``: the rows (tokens) of each."""

    def __init__(self):
        self.rows: list[int] = []
        self._product = torch._int_mm

    def __enter__(self) -> Int8Products:
        self._patch = mock.patch.object(torch, "_int_mm", self._counted)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def __len__(self) -> int:
        return len(self.rows)

    def _counted(self, a: torch.Tensor, b: torch.Tensor, **options) -> torch.Tensor:
        assert (a.dtype, b.dtype) == (torch.int8, torch.int8)
        result = self._product(a, b, **options)
        assert result.dtype == torch.int32
        self.rows.append(len(a))
        return result
