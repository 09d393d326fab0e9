"""The functions that nodes patched into the blocks of a model, which each call carries in its
options."""

import inspect
from collections.abc import Callable
from typing import TypeGuard

from ....precision.base.message import Message
from ....precision.base.nested import leaves
from .code_owner import code_owner

CALL_PATCHES = ("patches", "patches_replace")


def _is_patch(value: object) -> TypeGuard[Callable]:
    """True for a function among patches. ``forward_timestep_embed_patch`` has pairs of a class and
    a function, and ComfyUI asks for the class (``forward_timestep_embed`` in
    comfy/ldm/modules/diffusionmodules/openaimodel.py)."""
    return callable(value) and not isinstance(value, type)


def patches_in(options: dict) -> dict[str, Callable]:
    """Map names for events to the functions that nodes patched into the model's blocks."""
    found = [value for key in CALL_PATCHES for _, value in leaves(options.get(key, {})) if _is_patch(value)]
    return {patch_name(patch): patch for patch in found}


def patch_name(patch: Callable) -> str:
    """Name a function that a node patched into the model's blocks by its class or function, and by
    its pack."""
    patch = inspect.unwrap(patch)
    owner = code_owner(patch)
    name = getattr(patch, "__qualname__", type(patch).__name__).partition(".")[0]
    return Message("patch {0} of {1}", name, owner) if owner else f"patch {name}"


def with_patches(options: dict, change: Callable[[Callable], Callable]) -> dict:
    """Copy ``transformer_options`` with ``change`` applied to each function that nodes patched into
    the model's blocks."""
    return options | {key: each_changed(options[key], change) for key in CALL_PATCHES if options.get(key)}


def each_changed(value: object, change: Callable[[Callable], Callable]) -> object:
    """Copy nested dicts and lists with ``change`` applied to each function in them."""
    if isinstance(value, dict):
        return {key: each_changed(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_changed(inner, change) for inner in value]
    return change(value) if _is_patch(value) else value
