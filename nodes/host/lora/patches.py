"""Sort the patches of 8-bit weights: LoRAs are added to the results of their layers, all others merged by ComfyUI."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter, WeightAdapterBase

from ....precision.arithmetic.linear import kind_of
from ....precision.base.layer_names import plain_name
from ..comfyui.layers import is_quantized

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

ALPHA = 2
"""The place of a number among the ``weights`` of an adapter (``comfy/weight_adapter``); matrices are at the others."""
RANKED = {LoRAAdapter: (1,), LoHaAdapter: (1,), LoKrAdapter: (6, 4)}
"""The places of matrices with as many rows as the rank that divides alpha, the first that is there."""
MERGED_WITH = {LoRAAdapter: (3, 4, 5), LoHaAdapter: (5, 6, 7), LoKrAdapter: (7, 8)}
"""The places of a DoRA's scale, and of what resizes a weight or is a convolution's."""


@dataclass(frozen=True)
class LowRank:
    """A LoRA, LoHa or LoKr of a weight. ``offset``: ``(axis, start, length)`` of the part that changes, or None."""

    adapter: WeightAdapterBase
    offset: tuple[int, int, int] | None

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
        """Multiply ``x`` by other matrices as ComfyUI's adapter multiplies by its own, at a scale of 1."""
        return type(self.adapter)(set(), [factors.get(place) for place in range(len(self.adapter.weights))]).h(x, x)


@dataclass
class SortedPatches:
    """What is done with a model's patches of 8-bit weights.

    Attributes:
        modules: key of a weight -> its layer.
        low_rank: key -> the changes that are added to the layer's result, those of hooks included.
        merged: key -> why ComfyUI merges the patches.
        added: the keys of weights whose own patches are all added.
        hooks: the keys of weights whose patches by hooks are.
    """

    modules: dict[str, torch.nn.Module]
    low_rank: dict[str, list[LowRank]] = field(default_factory=dict)
    merged: dict[str, str] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    hooks: set[str] = field(default_factory=set)


def sort_patches(patcher: "ModelPatcher") -> SortedPatches:
    """Sort a ModelPatcher's patches of 8-bit weights, its own and those of all its hooks."""
    named = patcher.model.named_modules()
    result = SortedPatches({f"{plain_name(name)}.weight": module for name, module in named if is_8bit_matrix(module)})
    hooked = defaultdict(list)
    for by_key in patcher.hook_patches.values():
        for key, patches in by_key.items():
            hooked[key].extend(patches)
    for of_key, added in ((patcher.patches, result.added), (hooked, result.hooks)):
        for key, patches in of_key.items():
            if key not in result.modules:
                continue
            shape = tuple(result.modules[key].weight.shape)
            if reason := next(filter(None, (why_merged(patch, shape) for patch in patches)), ""):
                result.merged[key] = reason
            else:
                added.add(key)
                result.low_rank[key] = list(dict.fromkeys([*result.low_rank.get(key, ()), *map(change_of, patches)]))
    return result


def change_of(patch: tuple) -> LowRank:
    """Return the change that a patch makes at a strength of 1; equal for patches of one adapter."""
    _, adapter, _, offset, _ = patch
    return LowRank(adapter, offset and tuple(offset))


def why_merged(patch: tuple, whole: tuple[int, int]) -> str:
    """Say why ComfyUI has to merge a patch of a weight ``(outputs, inputs)``; "" where it is added to the result."""
    _, value, strength_model, _, function = patch
    if strength_model != 1.0:
        return "a merge of models"
    if type(value) not in MERGED_WITH or not hasattr(value, "h"):
        return "a patch other than a LoRA, LoHa or LoKr"
    if function is not None:
        return "a patch that rearranges the weight's rows"
    if any(value.weights[place] is not None for place in MERGED_WITH[type(value)]):
        return "a DoRA, or a LoRA that resizes the weight"
    return "" if _fits(change_of(patch), list(whole)) else "a LoRA for a weight of another shape"


def _fits(change: LowRank, shape: list[int]) -> bool:
    """Tell whether a change takes the inputs of a weight of this shape, and gives its outputs."""
    if change.offset:
        shape[change.offset[0]] = change.offset[2]
    factors = {place: tensor.to("meta") for place, tensor in change.factors().items()}
    try:
        return change.product(factors, torch.empty(1, shape[1], device="meta")).shape[-1] == shape[0]
    except RuntimeError:
        return False


def is_8bit_matrix(module: torch.nn.Module) -> bool:
    """Tell whether a module is a linear layer whose weight ComfyUI would round to 8 bits or less."""
    weight = getattr(module, "weight", None)
    if kind_of(module) != "linear" or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return False
    return is_quantized(module) or (weight.is_floating_point() and weight.dtype.itemsize == 1)
