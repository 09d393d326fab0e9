"""Keep low-rank patches of a loaded model out of its 8-bit weights, and add them to its layers' results."""

import contextlib
import functools
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import comfy.model_base
import torch
from comfy.patcher_extension import CallbacksMP, PatcherInjection, WrappersMP

from ....precision.arithmetic.patching import exchange, patched
from ..run.conditions import adapts_text, conditions_through
from ..run.modules import calling_layers
from ..run.wrappers import LOW_RANK, LOW_RANK_OF_TEXT, set_wrapper
from .control_lora import weights_as_numbers
from .extension import extend
from .patcher import UnmergedLowRank
from .patches import is_8bit_matrix

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

INJECTED = "halfsafe_low_rank"


def keep_low_rank_unmerged(patcher: "ModelPatcher") -> None:
    """Make a patcher and all of its later clones add low-rank patches of 8-bit weights unmerged.

    ``patcher``: a clone, or of a model just loaded.
    """
    if isinstance(patcher, UnmergedLowRank) or not any(is_8bit_matrix(module) for module in patcher.model.modules()):
        return
    extend(patcher, UnmergedLowRank)
    if patcher.patches or patcher.hook_patches:
        # They are merged into the weights where a clone of ComfyUI's class is loaded, which has the same uuid.
        patcher.patches_uuid = uuid.uuid4()
    patcher.add_callback_with_key(CallbacksMP.ON_CLONE, LOW_RANK, _keep_in_clone)
    if isinstance(patcher.model, comfy.model_base.BaseModel):
        set_wrapper(patcher, LOW_RANK, _add_to_layers)
        set_wrapper(patcher, LOW_RANK_OF_TEXT, _around_sampling, WrappersMP.OUTER_SAMPLE)
    else:
        patcher.set_injections(LOW_RANK, [PatcherInjection(_inject, _eject)])


def _keep_in_clone(patcher: "ModelPatcher", clone: "ModelPatcher") -> None:
    """Extend a clone of ComfyUI's own class, as a static clone of a dynamic model is."""
    if not isinstance(clone, UnmergedLowRank):
        extend(clone, UnmergedLowRank)


def _add_to_layers(executor, x, *args, **kwargs):
    """Wrap a model's call (ComfyUI's APPLY_MODEL): layers with low-rank changes add them to their results in it."""
    return _with_changes(executor.class_obj.current_patcher, x.device, functools.partial(executor, x, *args, **kwargs))


def _around_sampling(executor, *args, **kwargs):
    """Wrap sampling (ComfyUI's OUTER_SAMPLE): add the changes where layers run before the model's calls, on the text.

    See ``run/conditions.py``. The weights that a ControlLora copies have them too.
    """
    patcher = executor.class_obj.model_patcher
    with contextlib.ExitStack() as held:
        if isinstance(patcher, UnmergedLowRank):
            held.enter_context(weights_as_numbers(patcher))
        if adapts_text(patcher.model):
            add = functools.partial(_with_changes, patcher, patcher.load_device)
            held.enter_context(conditions_through(patcher.model, add))
        return executor(*args, **kwargs)


def _with_changes(extended: "ModelPatcher", device: torch.device, call: Callable):
    """Call while layers with low-rank changes add them to their results."""
    forwards = extended.forwards(device) if isinstance(extended, UnmergedLowRank) else []
    if not forwards:
        return call()
    with patched(forwards), calling_layers(extended.sorted_patches().modules.values()):
        return call()


def _inject(extended: UnmergedLowRank) -> None:
    """Put the forwards on layers for as long as the patcher is loaded."""
    # ComfyUI calls text encoders past all wrappers (``encode_from_tokens`` in comfy/sd.py).
    exchange(extended.forwards(extended.load_device), vars(extended.model).setdefault(INJECTED, []))


def _eject(patcher: "ModelPatcher") -> None:
    """Take off what was injected, also by another clone of the model."""
    # A clone of an injected patcher counts as injected too (``clone`` in comfy/model_patcher.py).
    for owner, name, _ in vars(patcher.model).pop(INJECTED, []):
        owner.__dict__.pop(name, None)
