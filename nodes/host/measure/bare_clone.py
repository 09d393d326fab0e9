"""A clone of a model to measure: without what hides overflows, and with plans that learn for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..run.accumulation import accumulation_of, with_accumulation
from ..run.compute import compute_of, set_compute
from ..run.execution import COMPILE_KWARGS
from ..run.wrappers import GUARD

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

COMPILE_KEY = "torch.compile"
"""The key of ComfyUI's TorchCompileModel's wrapper on a model (``comfy_api/torch_helpers/torch_compile.py``)."""


def bare_clone(patcher: ModelPatcher) -> ModelPatcher:
    """Clone a model without guards, which would hide overflows, and without torch.compile.

    Its compute plan and accumulation are made anew, so that those of the model learn nothing from what is measured.
    """
    clone, compute, accumulation = patcher.clone(), compute_of(patcher), accumulation_of(patcher)
    if accumulation:
        clone = with_accumulation(clone, accumulation.request)
    if compute:
        set_compute(clone, compute.plan.unwatched)
    for kind, found in clone.wrappers.items():
        for key in [key for key in found if str(key).startswith(GUARD) or key == COMPILE_KEY]:
            clone.remove_wrappers_with_key(kind, key)
    clone.model_options.pop(COMPILE_KWARGS, None)
    return clone
