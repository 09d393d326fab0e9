"""torch's precision flags at each matrix product a model makes, and which of the products have fp32 results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.base import flags
from support.summing import FP16_ACCUMULATION
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


class Product(NamedTuple):
    """``wide``: an operation of ``fp16_safe``, whose result is fp32, which a CPU multiplies in fp32, or is proven; ``states``: the exact state of each flag."""

    wide: bool
    dtype: torch.dtype
    states: dict[str, object]

    @property
    def in_fp16(self) -> bool:
        return self.states[FP16_ACCUMULATION]


class FlagSpy(TorchFunctionMode):
    """Records the Linear products of what runs inside."""

    def __init__(self):
        super().__init__()
        self.seen: list[Product] = []
        self._in_wide = False
        self._real = SafeOperation._multiplied

    def __enter__(self) -> FlagSpy:
        def product(operation, x, weight, *args, **kwargs):
            self._in_wide = operation.kind == "linear" and x.dtype == weight.dtype == torch.float16
            try:
                return self._real(operation, x, weight, *args, **kwargs)
            finally:
                self._in_wide = False

        SafeOperation._multiplied = product
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        SafeOperation._multiplied = self._real
        super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is linear or function is torch.addmm:
            states = {name: flags.state_of(name) for name in flags.SETTINGS}
            self.seen.append(Product(self._in_wide, args[-2 if function is torch.addmm else 0].dtype, states))
        return function(*args, **(kwargs or {}))

    @property
    def wide(self) -> list[bool]:
        """Of each product of ``fp16_safe``, whether fp16 accumulation was on."""
        return [product.in_fp16 for product in self.seen if product.wide]

    @property
    def plain(self) -> list[bool]:
        """The same of the other products with an fp16 result."""
        return [product.in_fp16 for product in self.seen if not product.wide and product.dtype == torch.float16]
