"""LoRAs of a model's 8-bit weights: sorted by whether they are added to results, and as a model of
their own.

ComfyUI loads, offloads and counts that model; patches other than LoRAs are merged into weights by
ComfyUI.
"""

import logging
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.lora
import comfy.model_patcher
import comfy.ops
import torch
import torch.nn.functional as F
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter, WeightAdapterBase
from torch.utils._python_dispatch import _disable_current_modes

from ....precision.arithmetic.products import normalized, rows_in_fp16
from ....precision.base.flags import fp32_accumulation
from ....precision.base.layer_names import plain_name
from ....precision.base.layers import kind_of
from ....precision.base.patching import Patch
from ..comfyui.layer_forward import LayerForward
from ..comfyui.layers import is_quantized
from ..comfyui.weights import core_weights

ALPHA = 2
"""The place of a number among the ``weights`` of an adapter (``comfy/weight_adapter``); matrices
are at the others."""
RANKED = {LoRAAdapter: (1,), LoHaAdapter: (1,), LoKrAdapter: (6, 4)}
"""The places of matrices with as many rows as the rank that divides alpha, the first that is
there."""
MERGED_WITH = {LoRAAdapter: (3, 4, 5), LoHaAdapter: (5, 6, 7), LoKrAdapter: (7, 8)}
"""Indices of the DoRA scale, the reshape data and the convolution factors; an adapter that has one
is merged."""
OTHER = "a patch other than a plain LoRA, LoHa or LoKr"


@dataclass(frozen=True)
class LowRank:
    """A LoRA, LoHa or LoKr of a weight. ``offset``: ``(axis, start, length)`` of the part that
    changes, or None."""

    adapter: WeightAdapterBase
    offset: tuple[int, int, int] | None

    @classmethod
    def of(cls, patch: tuple) -> "LowRank":
        """Return the change of a patch at a strength of 1; equal for patches of one adapter."""
        _, adapter, _, offset, _ = patch
        return cls(adapter, offset and tuple(offset))

    def factors(self) -> dict[int, torch.Tensor]:
        """Return the adapter's matrices by their places."""
        tensors = {place: tensor for place, tensor in enumerate(self.adapter.weights) if place != ALPHA}
        return {place: tensor.flatten(1) for place, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}

    def scale(self) -> float:
        """Return alpha by rank, which multiplies the change."""
        alpha, weights = self.adapter.weights[ALPHA], self.adapter.weights
        ranks = [len(weights[place]) for place in RANKED[type(self.adapter)] if weights[place] is not None]
        return alpha / ranks[0] if ranks and alpha is not None else 1.0

    def product(self, factors: dict[int, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` by other matrices as ComfyUI's adapter multiplies by its own, at a scale
        of 1."""
        return type(self.adapter)(set(), [factors.get(place) for place in range(len(self.adapter.weights))]).h(x, x)


class SortedPatches:
    """A ModelPatcher's patches of 8-bit weights, its own and those of all its hooks, sorted by what
    is done with them; by the weights' keys.

    ``low_rank``: the changes that are added to the layer's result, those of hooks included.
    ``merged``: why ComfyUI merges the patches. ``added``: weights whose own patches are all added;
    ``hooks``: whose patches by hooks are. ``unfit``: how many patches are left out because they do
    not fit the weight.
    """

    def __init__(self, patcher: ModelPatcher):
        named = patcher.model.named_modules()
        self.modules = {f"{plain_name(name)}.weight": module for name, module in named if is_8bit_matrix(module)}
        self.low_rank: dict[str, list[LowRank]] = {}
        self.merged: dict[str, str] = {}
        self.added: set[str] = set()
        self.hooks: set[str] = set()
        self.unfit: dict[str, int] = {}
        hooked = defaultdict(list)
        for by_key in patcher.hook_patches.values():
            for key, patches in by_key.items():
                hooked[key].extend(patches)
        for of_key, added in ((patcher.patches, self.added), (hooked, self.hooks)):
            for key, patches in of_key.items():
                if key in self.modules:
                    self._sort(key, patches, added)

    def _sort(self, key: str, patches: list[tuple], added: set[str]) -> None:
        """Sort the patches of a weight. Its key joins ``added`` if none of them is merged."""
        shape = tuple(self.modules[key].weight.shape)
        fitting = [patch for patch in patches if not is_left_out(patch, shape)]
        if left_out := len(patches) - len(fitting):
            self.unfit[key] = self.unfit.get(key, 0) + left_out
        if reason := next(filter(None, (why_merged(patch, shape) for patch in fitting)), ""):
            self.merged[key] = reason
            return
        added.add(key)
        if fitting:
            self.low_rank[key] = list(dict.fromkeys([*self.low_rank.get(key, ()), *map(LowRank.of, fitting)]))


# A TorchDispatchMode that reads numbers, as to find NaN, raises on meta tensors: that is no misfit
# of a patch.
@_disable_current_modes()
def is_left_out(patch: tuple, shape: Sequence[int]) -> bool:
    """True if ComfyUI leaves out a patch because its shape does not fit that of the weight: it logs
    that alone.

    LoRAs, LoHas, LoKrs, differences and other models' weights are looked at; the rest counts as
    fitting.
    """
    strength, value, strength_model, offset, function = patch
    if isinstance(value, list):
        value = (torch.empty(value[0][0].shape, device="meta"),)
    is_difference = isinstance(value, tuple) and (len(value) == 1 or value[0] == "diff")
    if type(value) not in RANKED and not is_difference:
        return False
    told: list[logging.LogRecord] = []
    root, thread = logging.getLogger(), threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            told.append(record)
        return record.thread != thread

    root.addFilter(keep)
    try:
        weight = torch.empty(tuple(shape), device="meta")
        comfy.lora.calculate_weight([(strength, value, strength_model, offset, function)], weight, "")
    except RuntimeError:  # it fails where the offset lies outside of the weight
        return True
    finally:
        root.removeFilter(keep)
    return any(record.levelno >= logging.WARNING for record in told)


def why_merged(patch: tuple, whole: tuple[int, int]) -> str:
    """Return why ComfyUI has to merge a patch of a weight ``(outputs, inputs)``; "" where it is
    added to the result."""
    _, value, strength_model, _, function = patch
    if strength_model != 1.0:
        return "a merge of models"
    plain = function is None and type(value) in MERGED_WITH and hasattr(value, "h")
    if plain and all(value.weights[place] is None for place in MERGED_WITH[type(value)]):
        return "" if _fits(LowRank.of(patch), list(whole)) else OTHER
    return OTHER


@_disable_current_modes()
def _fits(change: LowRank, shape: list[int]) -> bool:
    """True if a change takes the inputs of a weight of this shape, and gives its outputs."""
    if change.offset:
        shape[change.offset[0]] = change.offset[2]
    factors = {place: tensor.to("meta") for place, tensor in change.factors().items()}
    try:
        return change.product(factors, torch.empty(1, shape[1], device="meta")).shape[-1] == shape[0]
    except RuntimeError:
        return False


def is_8bit_matrix(module: torch.nn.Module) -> bool:
    """True if a module is a linear layer whose weight ComfyUI would round to 8 bits or less."""
    weight = getattr(module, "weight", None)
    if kind_of(module) != "linear" or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return False
    return is_quantized(module) or (weight.is_floating_point() and weight.dtype.itemsize == 1)


class LowRankLayer(torch.nn.Module):
    """The LoRAs of one weight, added to what its layer returns.

    ``in_fp32``: multiply an fp32 input in fp32, instead of in fp16 without overflow. ``strengths``:
    of each LoRA, times its own of ``scales``, on the device. ``held``: all factors in one layer of
    ComfyUI's, which casts and transfers it. ``missed``: a call had an argument that is not known,
    so that the layer ran without its LoRAs. ``ran``: the keys of the layers that were called in the
    last call of the model, outside of compiled graphs; this one's is ``key``.
    """

    strengths: tuple[torch.Tensor, ...]
    missed = False

    def __init__(self, key: str, changes: Sequence[LowRank], dtype: torch.dtype, ran: set[str]):
        super().__init__()
        self.key, self.ran = key, ran
        self.changes, self.in_fp32 = changes, False
        self._found: Callable | None = None
        self._patches: list[Patch] = []
        made = [{place: normalized(factor, dtype) for place, factor in change.factors().items()} for change in changes]
        self.shapes = [(place, factor.shape) for parts in made for place, (factor, _) in parts.items()]
        self.sizes = [shape.numel() for _, shape in self.shapes]
        self.lengths = [len(parts) for parts in made]
        powers = [math.prod(power for _, power in parts.values()) for parts in made]
        self.scales = [power * change.scale() for power, change in zip(powers, changes, strict=True)]
        flat = torch.cat([factor.flatten() for parts in made for factor, _ in parts.values()])
        self.held = comfy.ops.manual_cast.Linear(len(flat), 1, bias=False, device="meta", dtype=dtype)
        self.held.weight = torch.nn.Parameter(flat[None], requires_grad=False)

    def beside(self, module: torch.nn.Module) -> list[Patch]:
        """Return the patches that add this to the results of the module's present forward."""
        # A graph that was compiled with it holds for as long as that forward is the same.
        if self._found != module.forward:
            self._found, self._patches = module.forward, LayerForward.on(module).with_fields(adds=self)
        return self._patches

    def forward(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Add the LoRAs' products with ``x`` to the layer's ``result``; in fp32 where ``x`` is."""
        if not torch.compiler.is_dynamo_compiling():
            self.ran.add(self.key)
        if x.dtype == torch.float32 and not self.in_fp32 and not x.requires_grad:
            x, size = rows_in_fp16(x)
            with fp32_accumulation():
                return self._with_factors(x, result, size)
        return self._with_factors(x, result)

    def _with_factors(self, x: torch.Tensor, result: torch.Tensor, size: torch.Tensor | None = None) -> torch.Tensor:
        weights = core_weights(self._modules["held"], x, x.dtype)
        if isinstance(weights, tuple):
            return self._sum(weights[0], x, result, size)
        with weights as (flat, _):
            return self._sum(flat, x, result, size)

    def _sum(
        self, flat: torch.Tensor, x: torch.Tensor, result: torch.Tensor, size: torch.Tensor | None
    ) -> torch.Tensor:
        parts, start = flat.view(-1).split_with_sizes(self.sizes), 0
        for change, length, strength in zip(self.changes, self.lengths, self.strengths, strict=True):
            factors = {}
            for index in range(start, start + length):
                place, shape = self.shapes[index]
                factors[place] = parts[index].view(shape)
            start += length
            result = _added(result, change, factors, x, strength if size is None else strength * size)
        return result


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
            part.view(-1, up.shape[0]).addmm_(hidden.view(-1, down.shape[0]) * times, up.t())
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


_made: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakValueDictionary] = weakref.WeakKeyDictionary()


class LowRankModel(torch.nn.Module):
    """The LoRAs of a model's weights: ``layers`` by the keys of those. ``dtype``: of the factors,
    16 bit.

    ``by_weight``: the keys of LoRAs that are added to the weight in each call, because they cannot
    be added to results here; ``asked``: those of them whose weight was asked for. ``seen``: sizes
    of the calls that showed which these are, and the keys of the layers that ran in them.
    """

    def __init__(self, changes: Mapping[str, Sequence[LowRank]], dtype: torch.dtype, device: torch.device):
        super().__init__()
        with torch.inference_mode(False), torch.no_grad():
            self.ran: set[str] = set()
            layers = [LowRankLayer(key, of_key, dtype, self.ran) for key, of_key in changes.items()]
            self._numbers = [0.0] * sum(map(len, changes.values()))
            self._strengths = torch.zeros(len(self._numbers), device=device)
        self.layers = torch.nn.ModuleList(layers)
        self.by_key = dict(zip(changes, layers, strict=True))
        self._planned: object = ()
        self._set: Mapping | None = None
        self.by_weight: set[str] = set()
        self.asked: set[str] = set()
        self.seen: dict[tuple, set[str]] = {}
        of_layers = iter(self._strengths.split([len(layer.changes) for layer in layers]))
        for layer in layers:
            layer.strengths = next(of_layers).unbind()

    @classmethod
    def shared(
        cls, patcher: ModelPatcher, changes: Mapping[str, Sequence[LowRank]], dtype: torch.dtype
    ) -> ModelPatcher:
        """Return the ModelPatcher of such a model on the devices of ``patcher``; clones with equal
        LoRAs share it."""
        of_model = _made.setdefault(patcher.model, weakref.WeakValueDictionary())
        key = dtype, patcher.load_device, tuple((key, *of_key) for key, of_key in changes.items())
        shared = of_model.get(key)
        if shared is None:
            model = cls(changes, dtype, patcher.load_device)
            devices = patcher.load_device, patcher.offload_device
            shared = of_model[key] = comfy.model_patcher.CoreModelPatcher(model, *devices)
        return shared

    def plan_for(self, compute: Any, in_fp32: Callable[[Any, str], bool]) -> None:
        """Let each layer multiply as a compute plan has it; asked at each call, and decided once a
        plan."""
        if self._planned is not compute:
            self._planned = compute
            for key, layer in self.by_key.items():
                layer.in_fp32 = in_fp32(compute, key)

    def set_strengths(self, strengths: Mapping[tuple[str, LowRank], float]) -> None:
        """Set the strength of each LoRA, 0 for a LoRA without one, in the tensor that compiled
        graphs read."""
        if strengths is self._set:
            return
        self._set = strengths
        numbers = [
            strengths.get((key, change), 0.0) * scale
            for key, layer in self.by_key.items()
            for change, scale in zip(layer.changes, layer.scales, strict=True)
        ]
        if numbers != self._numbers:
            self._strengths.copy_(torch.tensor(numbers))
            self._numbers = numbers
