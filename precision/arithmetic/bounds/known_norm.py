"""Norms whose result has a bound: what they return is known to fit before anybody looks at it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ...dtypes import FP16_MAX
from ..result_bound import RESULT_MARGIN
from .followed import follow, unfollow
from .known_values import Tag, counted, counting_writes, tag_at
from .modulation import Path
from .value_bounds import ValueBound, after_group_norm, after_norm, modulated

if TYPE_CHECKING:
    from ..calibration import Calibration
    from ..linear import WeightProvider


def is_norm(module: torch.nn.Module) -> bool:
    """Tell whether a module is a GroupNorm, or a LayerNorm or an RMSNorm over the last dimension."""
    if isinstance(module, torch.nn.GroupNorm):
        return True
    if not isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return False
    return len(module.normalized_shape) == 1 and module.normalized_shape[0] > 1


class KnownNorm:
    """Run a norm, and keep the bound of its result where a later operation relies on it.

    Args:
        module: for which :func:`is_norm` holds.
        inner: its forward.
        calibration: the model's.
        weights: provides its weight and bias in the dtypes asked for.

    Attributes:
        bound: of the result for ``size`` numbers that are normalized together.
    """

    def __init__(self, module: torch.nn.Module, inner: Callable, calibration: Calibration, weights: WeightProvider):
        self.module = module
        self.inner = inner
        self.calibration = calibration
        self.weights = weights
        self.bound = ValueBound(math.inf)
        self.size = 0
        self.tag: Tag | None = None
        self.path = Path()
        calibration.values.paths.append(self.path)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.inner(input)
        unfollow(input)
        if self.calibration.calibrating:
            return self._calibrate(input)
        if not self.tag or not self.tag.used:
            return self.inner(input)
        with self._parameters(input) as parameters, counting_writes():
            result = self._normalized(input, *parameters)
        return self._noted(result)

    def _calibrate(self, x: torch.Tensor) -> torch.Tensor:
        with self._parameters(x) as parameters:
            result = counted(self._normalized(x, *parameters))
            self.size = self._size(x)
            self.bound = self._bound(x, *parameters) if self.size > 1 else ValueBound(math.inf)
        fits = result.dtype != torch.float16 or self.bound.largest <= FP16_MAX / RESULT_MARGIN
        self.tag = None
        if not fits or self.size < 2:  # a group of one is its rounding, and no factor takes its bound to a larger one's
            return result
        result = self._noted(result)
        self.tag = tag_at(result)
        return result

    def _noted(self, result: torch.Tensor) -> torch.Tensor:
        values = self.calibration.values
        tag = values.note(result, self._bound_of(self._size(result)))
        if tag is None or values.uniform:
            return result
        tag.path = self.path
        followed = values.calibrating or self.path.steps or (self.tag and self.tag.carried)
        return follow(result, values) if followed else result

    @property
    def _is_centred(self) -> bool:
        return isinstance(self.module, torch.nn.LayerNorm)

    def _size(self, x: torch.Tensor) -> int:
        """Count the numbers that are normalized together."""
        return x.shape[-1] if self._groups is None else x.shape[1:].numel() // self._groups

    @property
    def _groups(self) -> int | None:
        return getattr(self.module, "num_groups", None)

    def _bound(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> ValueBound:
        if self._groups is None:
            return after_norm(x.shape[-1], self._is_centred, weight, bias)
        return after_group_norm(self._groups, x.shape[1:], weight, bias)

    def _bound_of(self, size: int) -> ValueBound:
        """Return the bound for as many numbers: each of its terms grows with their root at most."""
        if size <= self.size:
            return self.bound
        return modulated(self.bound, math.sqrt((size - 1) / (self.size - 1)), 0.0, 1)

    def _parameters(self, x: torch.Tensor) -> AbstractContextManager[tuple]:
        if self.module.weight is None:
            return nullcontext((None, None))
        return self.weights(self.module, x, x.dtype, x.dtype)

    def _normalized(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        if self._groups is not None:
            return F.group_norm(x, self._groups, weight, bias, self.module.eps)
        if self._is_centred:
            return F.layer_norm(x, self.module.normalized_shape, weight, bias, self.module.eps)
        return F.rms_norm(x, self.module.normalized_shape, weight, self.module.eps)
