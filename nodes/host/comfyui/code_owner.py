"""Find the pack that owns code on a model: ComfyUI, Halfsafe, or another pack."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType

import comfy.model_management

HALFSAFE = Path(__file__).absolute().parents[3]
COMFYUI = Path(inspect.getfile(comfy.model_management)).absolute().parents[1]
PACKS = "custom_nodes"
INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
PYTHON = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
FRAMEWORK = ("torch", "numpy", "einops", "comfy_kitchen", "comfy_aimdo")


def code_owner(code: object) -> str:
    """Return the name of the pack that owns a piece of code; "" for ComfyUI, torch, Python and
    Halfsafe."""
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
