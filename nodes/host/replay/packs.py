"""List the packs whose code runs in a call of the model."""

from collections.abc import Iterator
from types import FunctionType, MethodType

from comfy.patcher_extension import WrappersMP

from ....precision.base.nested import leaves
from ..comfyui.attributes import OVERRIDE
from ..comfyui.code_owner import code_owner
from .call import Call

RUN_AGAIN = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
"""Wrappers that run again in a repeat of a call; all others run outside calls."""
NO_PATCHES = ("wrappers", "callbacks", OVERRIDE)
"""Options that contain no patch of the model. An attention override is a kernel; repeats in a
higher precision and checks run ComfyUI's own kernel instead."""
FUNCTION_WRAPPER = "model_function_wrapper"


def packs_on(call: Call) -> list[str]:
    """List the packs whose code runs in a failed or checked call and may keep state between
    calls."""
    return sorted(set(map(code_owner, _code_on(call))) - {""})


def _code_on(call: Call) -> Iterator[object]:
    wrappers = call.options.get("wrappers", {})
    yield from (wrapper for kind in RUN_AGAIN for group in wrappers.get(kind, {}).values() for wrapper in group)
    patches = {name: value for name, value in call.options.items() if name not in NO_PATCHES}
    yield from (value for _, value in leaves(patches) if callable(value))
    patcher = call.model.current_patcher
    yield from filter(None, [patcher.model_options.get(FUNCTION_WRAPPER)])
    yield from (patch for patch in patcher.object_patches.values() if isinstance(patch, (FunctionType, MethodType)))
    for module in call.model.modules():  # what was put in place of its class's methods, and its hooks
        yield from (value for value in vars(module).values() if isinstance(value, (FunctionType, MethodType)))
        yield from (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
