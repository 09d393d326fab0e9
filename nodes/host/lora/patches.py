"""Sort the patches of 8-bit weights: low-rank ones are kept unmerged while they are smaller than the weight, all others
are merged into it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import comfy.utils
import torch

from ....precision.arithmetic.compiling import plain_name
from ....precision.arithmetic.linear import kind_of
from ....precision.arithmetic.merging import MergingError, outweighs
from ..facts.layers import DIFFUSION_MODEL, is_quantized
from .adapters import LowRank, key_of, low_rank
from .merging import error_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


@dataclass
class SortedPatches:
    """What is done with a model's patches of 8-bit weights.

    Attributes:
        modules: key of a weight -> its layer.
        low_rank: key -> the low-rank changes by their keys, those of hooks included.
        merged: key -> why the weight is quantized anew.
        outweighing: key -> the rank of low-rank patches that is too high to be kept unmerged, and what merging costs.
        kept: the keys of weights whose own patches are all kept unmerged.
        hooks: the keys of weights whose patches by hooks are.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    low_rank: dict[str, dict[tuple, LowRank]] = field(default_factory=dict)
    merged: dict[str, str] = field(default_factory=dict)
    outweighing: dict[str, tuple[int, MergingError]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    hooks: set[str] = field(default_factory=set)


def sort_patches(patcher: "ModelPatcher") -> SortedPatches:
    """Sort a ModelPatcher's patches of 8-bit weights, its own and those of all its hooks.

    Those of hooks are never merged for their rank: their strengths change while the model runs.
    """
    result = SortedPatches()
    for key, patches in patcher.patches.items():
        changes = _low_rank_changes(result, patcher.model, key, patches)
        if changes and not _is_merged_for_its_rank(result, patcher, key, changes):
            result.kept.add(key)
            result.low_rank[key] = changes
    for key, patches in _hook_patches(patcher).items():
        if changes := _low_rank_changes(result, patcher.model, key, patches):
            result.hooks.add(key)
            result.low_rank.setdefault(key, {}).update(changes)
    return result


def _hook_patches(patcher: "ModelPatcher") -> dict[str, list[tuple]]:
    joined: dict[str, list[tuple]] = {}
    for by_key in patcher.hook_patches.values():
        for key, patches in by_key.items():
            joined.setdefault(key, []).extend(patches)
    return joined


def _low_rank_changes(
    result: SortedPatches, model: torch.nn.Module, key: str, patches: list[tuple]
) -> dict[tuple, LowRank]:
    """Return the patches of one 8-bit weight as low-rank changes; none, and note why, where one of them is not."""
    module = _layer_of(model, key)
    if module is None or not is_8bit_matrix(module):
        return {}
    result.modules[key] = module
    changes = {}
    for patch in patches:
        change = low_rank(patch, tuple(module.weight.shape))
        if isinstance(change, str):
            result.merged[key] = change
            return {}
        changes[change.key] = change
    return changes


def _is_merged_for_its_rank(
    result: SortedPatches, patcher: "ModelPatcher", key: str, changes: dict[tuple, LowRank]
) -> bool:
    """Tell whether changes outweigh their weight and merging leaves most of them, and note both.

    An fp8 weight without a scale takes no merged one: it would pass its range.
    """
    module, rank = result.modules[key], sum(change.rank for change in changes.values())
    if not is_quantized(module) or not outweighs(rank, tuple(module.weight.shape)):
        return False
    result.outweighing[key] = rank, error_of(patcher, key, module)
    if not result.outweighing[key][1].keeps_change:
        return False
    result.merged[key] = f"LoRAs of summed rank {rank}"
    return True


def _layer_of(model: torch.nn.Module, key: str) -> torch.nn.Module | None:
    """Return the layer whose weight a key names; None for a bias, or a layer that the model does not have."""
    layer, _, name = key.rpartition(".")
    try:
        return comfy.utils.get_attr(model, layer) if name == "weight" else None
    except AttributeError:
        return None


def is_8bit_matrix(module: torch.nn.Module) -> bool:
    """Tell whether a module is a linear layer whose weight ComfyUI would round to 8 bits or less."""
    weight = getattr(module, "weight", None)
    if kind_of(module) != "linear" or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return False
    return is_quantized(module) or (weight.is_floating_point() and weight.dtype.itemsize == 1)


def strengths_of(pairs: Iterable[tuple[str, list[tuple]]]) -> dict[tuple, float]:
    """Add up the strengths of equal patches: (key of the weight, key of the patch) -> strength."""
    strengths: dict[tuple, float] = {}
    for key, patches in pairs:
        for strength, value, _, offset, _ in patches:
            own = key, key_of(value, offset)
            strengths[own] = strengths.get(own, 0.0) + strength
    return strengths


def layer_name(key: str) -> str:
    """Return the name that plans and reports give the layer whose weight has this key."""
    return plain_name(key.removeprefix(DIFFUSION_MODEL)).removesuffix(".weight")
