"""LoRAs of a model's 8-bit weights as a model of their own, which ComfyUI loads, offloads and counts."""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import comfy.model_patcher
import comfy.ops
import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter import LoRAAdapter

from ....precision.arithmetic.products import normalized, rows_in_fp16
from ....precision.base.flags import fp32_accumulation
from ....precision.base.patching import Patch
from ..comfyui.weights import core_weights
from .patches import LowRank


class LowRankLayer(torch.nn.Module):
    """The LoRAs of one weight, added to what its layer returns.

    ``in_fp32``: multiply an fp32 input in fp32, instead of in fp16 without overflow. ``strengths``: of each LoRA, times
    its own of ``scales``, on the device. ``held``: all factors in one layer of ComfyUI's, which casts and transfers it.
    """

    strengths: torch.Tensor

    def __init__(self, changes: Sequence[LowRank], dtype: torch.dtype):
        super().__init__()
        self.changes, self.in_fp32 = changes, False
        self.inner = None
        made = [{place: normalized(factor, dtype) for place, factor in change.factors().items()} for change in changes]
        self.shapes = [{place: factor.shape for place, (factor, _) in parts.items()} for parts in made]
        powers = [math.prod(power for _, power in parts.values()) for parts in made]
        self.scales = [power * change.scale() for power, change in zip(powers, changes, strict=True)]
        flat = torch.cat([factor.flatten() for parts in made for factor, _ in parts.values()])
        self.held = comfy.ops.manual_cast.Linear(len(flat), 1, bias=False, device="meta", dtype=dtype)
        self.held.weight = torch.nn.Parameter(flat[None], requires_grad=False)

    def around(self, module: torch.nn.Module) -> Patch:
        """Return a patch that puts this layer around the module's present forward."""
        # A graph that was compiled with it holds for as long as that forward is the same.
        if self.inner != module.forward:
            self.inner = module.forward
        return module, "forward", self.run

    def run(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Stand in for the layer's forward."""
        return self(x, self.inner(x, *args, **kwargs))

    def forward(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Add the LoRAs' products with ``x`` to the layer's ``result``; in fp32 where ``x`` is."""
        size, sums = None, cast(AbstractContextManager, nullcontext())
        if x.dtype == torch.float32 and not self.in_fp32 and not x.requires_grad:
            (x, size), sums = rows_in_fp16(x), fp32_accumulation()
        with core_weights(self.held, x, x.dtype) as (held, _), sums:
            for change, factors, strength in zip(self.changes, self._factors(held), self.strengths, strict=True):
                result = _added(result, change, factors, x, strength if size is None else strength * size)
        return result

    def _factors(self, held: torch.Tensor) -> Iterator[dict[int, torch.Tensor]]:
        parts = iter(held.view(-1).split([shape.numel() for shapes in self.shapes for shape in shapes.values()]))
        for shapes in self.shapes:
            yield {place: next(parts).view(shape) for place, shape in shapes.items()}


def _added(
    result: torch.Tensor, change: LowRank, factors: dict[int, torch.Tensor], x: torch.Tensor, times: torch.Tensor
) -> torch.Tensor:
    """Add ``times`` the product of a LoRA with ``x``, in place where that is one kernel."""
    axis, start, length = change.offset or (0, 0, result.shape[-1])
    x = x.narrow(-1, start, length) if axis == 1 else x
    part = result.narrow(-1, start, length) if axis == 0 else result
    if isinstance(change.adapter, LoRAAdapter):
        up, down = factors.values()
        hidden = F.linear(x, down)
        if not times.dim() and x.dtype == result.dtype and result.is_contiguous():
            part.view(-1, len(up)).addmm_(hidden.view(-1, len(down)) * times, up.t())
            return result
        product = F.linear(hidden, up)
    else:
        product = change.product(factors, x)
    total = torch.addcmul(part, product, times)
    if total.shape == result.shape:
        return total
    result = result.to(total.dtype)
    result[..., start : start + length] = total
    return result


class LowRankModel(torch.nn.Module):
    """The LoRAs of a model's weights: ``layers`` by the keys of those. ``dtype``: of the factors, 16 bit."""

    def __init__(self, changes: Mapping[str, Sequence[LowRank]], dtype: torch.dtype, device: torch.device):
        super().__init__()
        with torch.inference_mode(False), torch.no_grad():
            layers = [LowRankLayer(of_key, dtype) for of_key in changes.values()]
            self._numbers = [0.0] * sum(map(len, changes.values()))
            self._strengths = torch.zeros(len(self._numbers), device=device)
        self.layers = torch.nn.ModuleList(layers)
        self.by_key = dict(zip(changes, layers, strict=True))
        of_layers = self._strengths.split([len(layer.changes) for layer in layers])
        for layer, strengths in zip(layers, of_layers, strict=True):
            layer.strengths = strengths

    def set_strengths(self, strengths: Mapping[tuple[str, LowRank], float]) -> None:
        """Give each LoRA its strength, 0 where none is named; the tensor stays, so that a compiled graph sees it."""
        numbers = [
            strengths.get((key, change), 0.0) * scale
            for key, layer in self.by_key.items()
            for change, scale in zip(layer.changes, layer.scales, strict=True)
        ]
        if numbers != self._numbers:
            self._strengths.copy_(torch.tensor(numbers))
            self._numbers = numbers


_made: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakValueDictionary] = weakref.WeakKeyDictionary()


def low_rank_patcher(
    patcher: ModelPatcher, changes: Mapping[str, Sequence[LowRank]], dtype: torch.dtype
) -> ModelPatcher:
    """Return the ModelPatcher of a LowRankModel on the devices of ``patcher``; clones with equal LoRAs share it."""
    of_model = _made.setdefault(patcher.model, weakref.WeakValueDictionary())
    key = dtype, patcher.load_device, tuple((key, *of_key) for key, of_key in changes.items())
    shared = of_model.get(key)
    if shared is None:
        model = LowRankModel(changes, dtype, patcher.load_device)
        shared = comfy.model_patcher.CoreModelPatcher(model, patcher.load_device, patcher.offload_device)
        of_model[key] = shared
    return shared
