"""Model code that can hide an overflow: operations that make a finite number of Inf or NaN.

An operand that passes fp16's range makes Inf or NaN of a whole row of its layer's result, and norms make NaN of that.
It reaches the result of the call, unless one of these operations stands in between:

===================  =====================================  ==========================================================
operation            hides                                  what sees the overflow instead
===================  =====================================  ==========================================================
tanh, sigmoid, relu  Inf of an operand, by a wrong number   a look at one column of the result of each layer of the
softmax, exp, clamp                                         block that ran before (the block, as NaN passes through)
min, max, sort
nan_to_num, a test   Inf and NaN                            the same, and a look at the last layer of each block before
for NaN or Inf
clamp, nan_to_num    an fp16 result that overflowed by      results of those layers are returned in fp32
of fp16              itself
the same saturating  nothing: Inf is what the number        none is needed
of an fp16 result    saturates to
attention            -Inf among its scores                  a look at q, or the norms before it (``attention.py``)
===================  =====================================  ==========================================================

Model code is watched in the calls that calibrate alone, where time does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.layer_names import block_of
from ..base.nested import plain_alias
from .norm_bounds import NormBounds

SATURATING = {
    *("tanh", "sigmoid", "hardsigmoid", "hardtanh", "relu", "relu6", "softmax", "_softmax", "_safe_softmax", "exp"),
    *("clip", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "sort", "topk", "argmax", "sign", "reciprocal"),
}
TESTING = {"nan_to_num", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge"}
REPLACING = {"nan_to_num", "clip", "clamp", "clamp_min", "clamp_max", "minimum", "maximum"}


class Looked(Protocol):
    """Stand for a layer whose result can be looked at in every later call, or be fp32 from now on."""

    def look(self) -> None: ...

    def widen(self) -> None: ...


class HidingCode(TorchDispatchMode):
    """Find the layers whose overflow model code can hide, in a call that calibrates.

    ``paused``: what runs is no model code. ``norms``: what model code bounds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.begin()

    def begin(self) -> None:
        self.paused = 0
        self.norms = NormBounds()
        self._recent: list[tuple[str, Looked]] = []
        self._ends: list[Looked] = []

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Watch no operation inside."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def ran(self, name: str, layer: Looked) -> None:
        """Note a layer that has just run. Of the blocks before the present one only the last layer is remembered."""
        block = block_of(name)
        if block and self._recent and (last := self._recent[-1])[0] not in ("", block):
            self._ends.append(last[1])
            self._recent = [each for each in self._recent if not each[0]]
        self._recent.append((block, layer))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removesuffix("_")
        if not self.paused and (name in SATURATING or name in TESTING):
            x = next((each for each in args if isinstance(each, torch.Tensor)), None)
            if x is not None and x.is_floating_point():
                self._hide(name, x.dtype)
        result = func(*args, **(kwargs or {}))
        self.norms.follow(func, args, kwargs or {}, result)
        return plain_alias(func, result)

    def _hide(self, name: str, dtype: torch.dtype) -> None:
        layers = [layer for _, layer in self._recent]
        for layer in layers + (self._ends if name in TESTING else []):
            layer.look()
        if name in REPLACING and dtype == torch.float16:
            for layer in layers:
                layer.widen()
