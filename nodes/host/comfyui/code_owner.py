"""Find the pack that owns code on a model: ComfyUI, Halfsafe, or another pack."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING

import comfy.model_management
from comfy.patcher_extension import WrappersMP

from ....precision.base.nested import leaves
from .attributes import OVERRIDE

if TYPE_CHECKING:
    from ..replay.call import Call

HALFSAFE = Path(__file__).absolute().parents[3]
COMFYUI = Path(inspect.getfile(comfy.model_management)).absolute().parents[1]
PACKS = "custom_nodes"
INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
PYTHON = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
FRAMEWORK = ("torch", "numpy", "einops", "comfy_kitchen", "comfy_aimdo")
RUN_AGAIN = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
"""Wrappers that run again in a repeat of a call; all others run outside calls."""
NO_PATCHES = ("wrappers", "callbacks", OVERRIDE)
"""Options that contain no patch of the model. An attention override is a kernel; repeats in a higher precision and
checks run ComfyUI's own kernel instead."""
FUNCTION_WRAPPER = "model_function_wrapper"


def code_owner(code: object) -> str:
    """Return the name of the pack that owns a piece of code; "" for ComfyUI, torch, Python and Halfsafe."""
    if isinstance(code, functools.partial):
        return code_owner(code.func)
    if isinstance(code, MethodType):
        return code_owner(code.__func__) or code_owner(code.__self__)
    if isinstance(code, FunctionType):  # a decorator may have given it the module's name of what it wraps
        return _owner(code.__code__.co_filename, code.__module__ or "")
    if isinstance(code, BuiltinFunctionType):
        return ""
    module = (code if isinstance(code, type) else type(code)).__module__
    return _owner(getattr(sys.modules.get(module), "__file__", None) or "", module)


@functools.lru_cache(maxsize=1024)
def _owner(filename: str, module: str) -> str:
    file = Path(filename).absolute()
    pack = next((each for each in file.parents if each.parent.name == PACKS), file)
    if pack.parent.name == PACKS and pack != HALFSAFE:
        return pack.stem
    if file.is_relative_to(HALFSAFE) or module == "builtins":
        return ""
    for folder in INSTALLED:
        if file.is_relative_to(folder):
            name = file.relative_to(folder).parts[0].removesuffix(".py")
            return "" if name in FRAMEWORK else name
    if any(file.is_relative_to(folder) for folder in (COMFYUI, *PYTHON)):
        return ""
    return module.partition(".")[0]


def packs_on(call: Call) -> list[str]:
    """List the packs whose code runs in a failed or checked call and may keep state between calls."""
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
