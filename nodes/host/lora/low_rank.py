"""Low-rank changes of a model's 8-bit weights as a model of their own, which ComfyUI loads, offloads and counts."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import comfy.model_patcher
import comfy.ops
import torch

from ....precision.arithmetic.low_rank import add_outer_product, inner_product, joined
from ....precision.arithmetic.patching import Patch
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
    """

    def __init__(self, module: torch.nn.Module, changes: Sequence[LowRank]):
        super().__init__()
        self.changes = tuple(changes)
        self.rank = sum(change.rank for change in changes)
        self.shape = tuple(module.weight.shape)
        self.in_fp32 = False
        self.scale: torch.Tensor | None = None
        self.inner = module.forward

    def build(self, dtype: torch.dtype) -> torch.Tensor:
        """Make the factors; return their scales, without strengths."""
        factors = joined([change.factors(self.shape, dtype) for change in self.changes])
        self.down, self.up = _linear(factors.down), _linear(factors.up)
        return factors.scale

    def around(self, module: torch.nn.Module) -> Patch:
        """Return a patch that runs the module's present forward and adds the changes.

        A graph that was compiled with it holds for as long as that forward is the same.
        """
        forward = module.forward
        if self.inner != forward:
            self.inner = forward
        return module, "forward", self.run

    def run(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Stand in for the layer's forward."""
        return self(x, self.inner(x, *args, **kwargs))

    def forward(self, x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Add the changes' product with ``x`` to the layer's own result.

        They are added in fp32 where that result is proven to fit fp16 without them.
        """
        base = base.float() if x.dtype == torch.float32 and base.dtype == torch.float16 else base
        dtype = torch.float16 if x.dtype == torch.float32 and not self.in_fp32 else x.dtype
        with core_weights(self.down, x, dtype) as (down, _):
            h, size = inner_product(x, down, self.scale)
        with core_weights(self.up, x, dtype) as (up, _):
            return add_outer_product(base, h, size, up)


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
        self._strengths: dict = {}
        self._scales: torch.Tensor | None = None

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
        """Give each change its strength, 0 where none is named.

        The scales stay the same tensor, so that a compiled graph sees new strengths.

        Args:
            strengths: (key of the weight, key of the change) -> strength.
            device: where the model runs.
        """
        self.build()
        moved = self._scales is None or self._scales.device != device
        if not moved and strengths == self._strengths:
            return
        with torch.inference_mode(False), torch.no_grad():
            scales = self._own * self._per_rank(strengths)
            if moved:
                self._share_out(scales.to(device))
            else:
                self._scales.copy_(scales)
        self._strengths = dict(strengths)

    def _per_rank(self, strengths: dict[tuple, float]) -> torch.Tensor:
        """Repeat the strength of each change as often as it has ranks."""
        pairs = [(key, change) for key, layer in self.by_key() for change in layer.changes]
        each = torch.tensor([strengths.get((key, change.key), 0.0) for key, change in pairs], dtype=torch.float32)
        return each.repeat_interleave(torch.tensor([change.rank for _, change in pairs]))

    def _share_out(self, scales: torch.Tensor) -> None:
        """Give each layer its part of the scales, as a view."""
        self._scales = scales
        for layer, scale in zip(self.layers, scales.split([layer.rank for layer in self.layers]), strict=True):
            layer.scale = scale


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
