"""Low-rank changes of a model's 8-bit weights as a model of their own, which ComfyUI loads, offloads and counts."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import comfy.model_patcher
import comfy.ops
import torch

from ....precision.arithmetic.flags import fp32_accumulation
from ....precision.arithmetic.linear import SafeOperation, has_wide_output
from ....precision.arithmetic.low_rank import (
    add_outer_product,
    fitting_factor,
    inner_product,
    joined,
    row_sizes,
    scaled_down,
)
from ....precision.arithmetic.patching import Patch
from ....precision.arithmetic.planned import steps_of
from ..run.modules import core_weights
from .adapters import LowRank
from .extension import extend

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

Changes = Mapping[str, Sequence[LowRank]]
"""Key of a weight -> its low-rank changes, no two of them with the same key."""


class LowRankLayer(torch.nn.Module):
    """The low-rank changes of one weight.

    ``in_fp32``: multiply an fp32 input in fp32, instead of in fp16 without overflow.
    ``down`` and ``up`` are ComfyUI's own layers, which cast and transfer their weights where they are used.
    ``reach``: of the change (``Beside``) at strengths of 1, or those it has where they are larger.
    ``largest``: of the fp16 inputs it is fitted to. ``scale``: what ``down``'s results are multiplied by;
    ``factor`` and ``fitted_scale`` the same in two parts, of which the second fits fp16.
    """

    def __init__(self, module: torch.nn.Module, changes: Sequence[LowRank]):
        super().__init__()
        self.changes = tuple(changes)
        self.rank = sum(change.rank for change in changes)
        self.shape = tuple(module.weight.shape)
        self.in_fp32 = False
        self.gains: list[float] = []
        self.gain = self.reach = 0.0
        self.largest = self.factor = 1.0
        self.inner = module.forward

    def build(self, dtype: torch.dtype) -> torch.Tensor:
        """Make the factors; return their scales, without strengths."""
        parts = [change.factors(self.shape, dtype) for change in self.changes]
        factors, self.gains = joined(parts), [part.gain for part in parts]
        self.down, self.up = _linear(factors.down), _linear(factors.up)
        return factors.scale

    def set_gain(self, strengths: Sequence[float]) -> None:
        """Bound the change at these strengths of the changes."""
        of_each = list(zip(map(abs, strengths), self.gains, strict=True))
        self.gain = sum(strength * gain for strength, gain in of_each if strength)
        self.reach = sum(max(strength, 1.0) * gain for strength, gain in of_each)
        self.factor = fitting_factor(self.largest * self.gain)

    def hold(self, scale: torch.Tensor, fitted_scale: torch.Tensor, factor: torch.Tensor) -> None:
        """Take views of the model's numbers."""
        self.scale, self.fitted_scale, self.factor_of_graphs = scale, fitted_scale, factor

    def fit(self, largest: float) -> None:
        """Be ready for fp16 operands no larger than that."""
        self.largest = max(1.0, largest)  # 1 is the largest of rows that are brought to it
        self.factor = fitting_factor(self.largest * self.gain)
        self.fitted_scale.copy_(self.scale / self.factor)
        self.factor_of_graphs.fill_(self.factor)

    def around(self, module: torch.nn.Module) -> Patch:
        """Return a patch that adds the changes to what the module's present forward gives: inside of the operation that
        multiplies where that can do so, else around the forward.

        A graph that was compiled with it holds for as long as that forward is the same.
        """
        forward = module.forward
        operation = steps_of(forward)[-1]
        if isinstance(operation, SafeOperation):
            self.largest = max(1.0, operation.stand_beside(self))
            return operation, "beside", self
        if self.inner != forward:
            self.inner = forward
        self.largest = 1.0
        return module, "forward", self.run

    def run(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Stand in for the layer's forward."""
        return self(x, self.inner(x, *args, **kwargs))

    def forward(self, x: torch.Tensor, base: torch.Tensor, times: float | torch.Tensor | None = None) -> torch.Tensor:
        """Add the changes' product with ``x`` to the layer's own result ``base``, in place where that is possible.

        See ``precision/arithmetic/low_rank.py``. ``times``: see ``Beside``.
        """
        if times is not None:
            return self._added(x, base, self.fitted_scale, self._factor() * times, wide=True)
        dtype = torch.float16 if x.dtype == torch.float32 and not self.in_fp32 else x.dtype
        if dtype != torch.float16:
            return self._added(x, base, self.scale)
        both_half = x.dtype == base.dtype == torch.float16
        if both_half and has_wide_output(x.device, "linear") and not torch.compiler.is_compiling():
            with fp32_accumulation():
                return self._added(x, base, self.scale, wide=True)
        base = base.float() if x.dtype == torch.float32 and base.dtype == torch.float16 else base
        size = row_sizes(x)
        return self._added(scaled_down(x, size), base, self.fitted_scale, self._factor(), size)

    def _added(self, x, base, scale, factor=1.0, size=None, wide=False) -> torch.Tensor:
        with core_weights(self.down, x, x.dtype) as (down, _):
            h = inner_product(x, down, scale, wide)
        with core_weights(self.up, x, x.dtype) as (up, _):
            return add_outer_product(base, h, up, factor, size)

    def _factor(self) -> float | torch.Tensor:
        return self.factor_of_graphs if torch.compiler.is_compiling() else self.factor


def _linear(weight: torch.Tensor) -> torch.nn.Module:
    outputs, inputs = weight.shape
    module = comfy.ops.manual_cast.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


class LowRankModel(torch.nn.Module):
    """The low-rank changes of a model's weights: ``layers``, in the order of ``keys``. Built when it is first loaded.

    Args:
        modules: key of a weight -> the layer it is in.
        changes: key of a weight -> its changes.
        dtype: of the factors, 16 bit.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module], changes: Changes, dtype: torch.dtype):
        super().__init__()
        self.keys = tuple(changes)
        self.layers = torch.nn.ModuleList(LowRankLayer(modules[key], changes[key]) for key in self.keys)
        self.dtype = dtype
        self._own: torch.Tensor | None = None
        self._state: tuple | None = None
        self._numbers: torch.Tensor | None = None

    def by_key(self) -> Iterator[tuple[str, LowRankLayer]]:
        """Yield (key of a weight, its layer of changes) of each."""
        return zip(self.keys, self.layers, strict=True)

    def nbytes(self) -> int:
        """Return the size of the factors in bytes, built or not."""
        return sum(layer.rank * sum(layer.shape) for layer in self.layers) * self.dtype.itemsize

    def build(self) -> None:
        """Make all factors, once."""
        if self._own is None:
            with torch.inference_mode(False), torch.no_grad():
                self._own = torch.cat([layer.build(self.dtype) for layer in self.layers]).cpu()

    def set_strengths(self, strengths: dict[tuple, float], device: torch.device) -> None:
        """Give each change its strength, 0 where none is named, and each layer what fits its inputs (``largest``).

        The numbers stay the same tensor, so that a compiled graph sees new ones.

        Args:
            strengths: (key of the weight, key of the change) -> strength.
            device: where the model runs.
        """
        self.build()
        state = strengths, [layer.largest for layer in self.layers], device
        if state == self._state:
            return
        of_layers = [
            [strengths.get((key, change.key), 0.0) for change in layer.changes] for key, layer in self.by_key()
        ]
        for layer, own in zip(self.layers, of_layers, strict=True):
            layer.set_gain(own)
        with torch.inference_mode(False), torch.no_grad():
            self._set_numbers(self._own * self._per_rank(of_layers), device)
        self._state = dict(strengths), *state[1:]

    def _per_rank(self, of_layers: list[list[float]]) -> torch.Tensor:
        """Repeat the strength of each change as often as it has ranks."""
        ranks = [change.rank for layer in self.layers for change in layer.changes]
        return _repeated([strength for own in of_layers for strength in own], ranks)

    def _set_numbers(self, scales: torch.Tensor, device: torch.device) -> None:
        """Set all layers' scales, those that fit fp16 and their factors: one transfer."""
        factors = torch.tensor([layer.factor for layer in self.layers], dtype=torch.float32)
        ranks = [layer.rank for layer in self.layers]
        fitted = scales / _repeated([layer.factor for layer in self.layers], ranks)
        numbers = torch.cat([scales, fitted, factors])
        if self._numbers is not None and self._numbers.device == device:
            self._numbers.copy_(numbers)
            return
        self._numbers = numbers.to(device)
        *of_ranks, factors = self._numbers.split([len(scales), len(scales), len(ranks)])
        parts = (tensor.split(ranks) for tensor in of_ranks)
        for layer, *views in zip(self.layers, *parts, factors.unbind(), strict=True):
            layer.hold(*views)


def _repeated(numbers: Sequence[float], times: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.full((count,), number) for number, count in zip(numbers, times, strict=True)])


class _BuiltWhenLoaded:
    """Extend a LowRankModel's ModelPatcher: the factors are made when they are first loaded."""

    if TYPE_CHECKING:
        model: LowRankModel

    def load(self, *args, **kwargs):
        self.model.build()
        return super().load(*args, **kwargs)


_made: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakValueDictionary] = weakref.WeakKeyDictionary()


def low_rank_patcher(
    patcher: "ModelPatcher", modules: Mapping[str, torch.nn.Module], changes: Changes, dtype: torch.dtype
) -> "ModelPatcher":
    """Return the ModelPatcher of a LowRankModel on the devices of ``patcher``; clones with equal changes share it."""
    known = _made.setdefault(patcher.model, weakref.WeakValueDictionary())
    key = (dtype, patcher.load_device, tuple((key, change.key) for key, found in changes.items() for change in found))
    found = known.get(key)
    if found is None:
        model = LowRankModel(modules, changes, dtype)
        devices = patcher.load_device, patcher.offload_device
        found = comfy.model_patcher.CoreModelPatcher(model, *devices, size=model.nbytes())
        extend(found, _BuiltWhenLoaded)
        known[key] = found
    return found
