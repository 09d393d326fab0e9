"""Merge patches into 8-bit weights in fp32, rounded to nearest, and measure what that costs.

What was measured is kept by model and by the uuid of a patcher's patches, which all of its clones share.
"""

import uuid
import weakref
from typing import TYPE_CHECKING

import comfy.lora
import comfy.model_management
import torch

from ....precision.arithmetic.merging import MergingError, merging_error
from ....precision.arithmetic.patching import SharedScope, patched
from ..core import set_weight_by_class
from ..run.modules import dequantized

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

COPIES = 6
"""How many fp32 copies of a weight a measurement holds at most: three, and what ComfyUI makes to add and to round."""
STATES = 8
"""Of how many states of a model's patches the errors are kept."""

merging_in_fp32 = SharedScope(
    lambda: patched([(comfy.model_management, "lora_compute_dtype", lambda device: torch.float32)])
)
"""Have ComfyUI merge patches in fp32; on a GPU it merges in fp16 (``lora_compute_dtype``)."""

_measured: weakref.WeakKeyDictionary[torch.nn.Module, dict[uuid.UUID, dict[str, MergingError]]] = (
    weakref.WeakKeyDictionary()
)


def errors_of(patcher: "ModelPatcher") -> dict[str, MergingError]:
    """Return what merging a patcher's patches costs, as far as it was measured: key of a weight -> error."""
    by_state = _measured.setdefault(patcher.model, {})
    if patcher.patches_uuid not in by_state and len(by_state) >= STATES:
        by_state.pop(next(iter(by_state)))
    return by_state.setdefault(patcher.patches_uuid, {})


def error_of(patcher: "ModelPatcher", key: str, module: torch.nn.Module) -> MergingError:
    """Return what merging a patcher's patches into a quantized layer's weight costs; measured once."""
    known = errors_of(patcher)
    if key not in known:
        known[key] = _measure(patcher, key, module)
    return known[key]


def _measure(patcher: "ModelPatcher", key: str, module: torch.nn.Module) -> MergingError:
    weight, device = unpatched(patcher, key, module).detach(), patcher.load_device
    if comfy.model_management.get_free_memory(device) < COPIES * torch.float32.itemsize * weight.numel():
        device = torch.device("cpu")
    base = _as_fp32(weight.to(device))
    exact = comfy.lora.calculate_weight(patcher.patches[key], base.clone(), key)
    return merging_error(base, exact, _as_fp32(rounded_to_nearest(module, exact.clone(), return_weight=True)))


def unpatched(patcher: "ModelPatcher", key: str, module: torch.nn.Module) -> torch.Tensor:
    """Return a weight before any patch: ComfyUI keeps it where it merged LoRAs, else where a hook changed it."""
    merged, hooked = patcher.backup.get(key), patcher.hook_backup.get(key)
    return merged.weight if merged else hooked[0] if hooked else module.weight


def rounded_to_nearest(module: torch.nn.Module, weight: torch.Tensor, **options):
    """Set a quantized layer's weight by ComfyUI's own method, its scale made anew. Seed 0 is no stochastic rounding."""
    # ComfyUI divides fp8 weights by their amax (``requantize_from_float`` with ``recalculate`` in comfy/quant_ops.py):
    # a weight of zeros, as of the difference of two models, would become NaN.
    if not weight.any():
        weight = weight.clone().fill_(torch.finfo(torch.float32).tiny)  # 0 in fp16, which ComfyUI makes no NaN of
    return set_weight_by_class(module, weight, **{**options, "seed": 0})


def _as_fp32(weight: torch.Tensor) -> torch.Tensor:
    return dequantized(weight.to(torch.float32))
