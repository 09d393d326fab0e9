"""Sort the patches of 8-bit weights: low-rank ones are kept beside the weight, all others are merged into it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import comfy.utils
import torch

from ....precision.arithmetic.linear import kind_of
from ..run.modules import is_quantized
from .adapters import LowRank, low_rank

if TYPE_CHECKING:
    pass

DIFFUSION_MODEL = "diffusion_model."


@dataclass
class Found:
    """What is done with a model's patches of 8-bit weights.

    Attributes:
        modules: key of a weight -> its layer.
        beside: key -> low-rank changes, those of hooks included.
        merged: key -> why the weight is quantized anew.
        kept: the keys whose own patches are beside, and ``hooks`` the same for each hook.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    beside: dict[str, dict[tuple, LowRank]] = field(default_factory=dict)
    merged: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    hooks: set[tuple] = field(default_factory=set)


def sorted_patches(patcher) -> Found:
    found = Found()
    for key, patches in patcher.patches.items():
        if _sort(found, patcher.model, key, patches):
            found.kept.add(key)
    keys = {key for patches in patcher.hook_patches.values() for key in patches}
    for key in keys:
        if _sort(found, patcher.model, key, [patch for patches in patcher.hook_patches.values() for patch in patches.get(key, ())]):
            found.hooks.add(key)
    return found


def _sort(found: Found, model: torch.nn.Module, key: str, patches: list[tuple]) -> bool:
    """Note what is done with the patches of one weight; tell whether they are kept beside it."""
    module = _layer_of(model, key)
    if module is None or not is_8bit_matrix(module):
        return False
    found.modules[key] = module
    changes = {}
    for patch in patches:
        change = low_rank(patch, tuple(module.weight.shape))
        if isinstance(change, str):
            found.merged[key] = change
            return False
        changes[change.key] = change
    found.beside.setdefault(key, {}).update(changes)
    return True


def _layer_of(model: torch.nn.Module, key: str) -> torch.nn.Module | None:
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


def strengths_of(pairs: list[tuple[str, list[tuple]]]) -> dict[tuple, float]:
    strengths: dict[tuple, float] = {}
    for key, patches in pairs:
        for patch in patches:
            slot = key, (id(patch[1]), patch[3] and tuple(patch[3]))
            strengths[slot] = strengths.get(slot, 0.0) + patch[0]
    return strengths
