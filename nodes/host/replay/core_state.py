"""State that ComfyUI itself keeps between calls of a model, collected by name and restored before a
repeat."""

import functools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CellType, FunctionType, MethodType

import torch

from ....precision.base.nested import leaves
from ..comfyui.attributes import POSE_CACHE
from ..comfyui.code_owner import COMFYUI

CORES = ("comfy", "comfy_extras")
DATA = (torch.Tensor, bool, int, float, str, dict, list, type(None))


class CoreState:
    """Python's random numbers, and the state in objects and functions of ComfyUI's nodes in a
    call's options: EasyCache, LazyCache, Self-Attention Guidance.

    :class:`call.Call` restores a ControlNet's lists and the caches of Qwen-Image 2.1 and
    Wan-Animate-2; ``precision/devices/random_start.py`` restores torch's random numbers.
    """

    def __init__(self, options: dict):
        self._random_numbers = random.getstate()
        found = [value for name, value in leaves(options) if type(value) not in DATA and name != POSE_CACHE]
        self._objects = [(each, _copied(vars(each))) for each in found if _is_core_object(each)]
        self._cells = [(cell, _copied(cell.cell_contents)) for each in found for cell in _core_cells(each)]

    def put_back(self) -> None:
        """Restore the state as it was when this object was created."""
        random.setstate(self._random_numbers)
        for each, attributes in self._objects:
            vars(each).clear()
            vars(each).update(_copied(attributes))
        for cell, content in self._cells:
            cell.cell_contents = _copied(content)


def _copied(value):
    """Copy nested dicts and lists; their other values stay the same objects."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if type(value) is list else value


def _is_core_object(value: object) -> bool:
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    return _is_core_file(file) and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module)


@functools.lru_cache(maxsize=1024)
def _is_core_file(name: str) -> bool:
    """True if a file is ComfyUI's. Its server names the modules of ``comfy_extras`` after their
    paths (``load_custom_node`` in nodes.py)."""
    return any(Path(name).absolute().is_relative_to(COMFYUI / folder) for folder in CORES)


def _core_cells(value: object) -> Iterator[CellType]:
    function = value.__func__ if isinstance(value, MethodType) else value
    if not isinstance(function, FunctionType) or not _is_core_file(function.__code__.co_filename):
        return
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that was given no value
            continue
        if type(content) in DATA:
            yield cell
