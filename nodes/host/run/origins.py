"""Tell whose a piece of Python code is: a framework's, ComfyUI's, or a pack's, and there which node's."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import GeneratorType
from typing import NamedTuple

import comfy.model_management
import nodes

OURS = __name__.partition(".nodes.")[0]
COMFYUI = Path(comfy.model_management.__file__).parents[1]
PACKS = COMFYUI / "custom_nodes"
LIBRARIES = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
FRAMEWORK = frozenset({"torch", "numpy", "comfy", *sys.stdlib_module_names})


class Code(NamedTuple):
    """A function or class by its module and qualified name; "" for the module itself."""

    module: str
    name: str = ""


@functools.cache
def is_of_framework(module: str) -> bool:
    """Tell whether a module is Python's, torch's, numpy's, ours, or ComfyUI's other than its models' code and its
    extra nodes."""
    root = module.partition(".")[0]
    if module.startswith(("comfy.ldm.", "comfy_extras.")):
        return False
    if root in FRAMEWORK or module.startswith(OURS):
        return True
    file = _file_of(module)
    return file is not None and file.is_relative_to(COMFYUI) and not _is_outside_of_core(file)


@functools.cache
def is_of_pack(module: str) -> bool:
    """Tell whether a module's own data may be state of a call: that of packs and of ComfyUI's extra nodes."""
    file = _file_of(module)
    in_library = file is not None and any(file.is_relative_to(folder) for folder in LIBRARIES)
    return not (in_library or module.startswith("comfy.ldm.") or is_of_framework(module))


@functools.cache
def keeper_of(module: str) -> str:
    """Name the pack of a module: its folder in ``custom_nodes``, else the first part of the module's name."""
    parts = Path(_file_of(module) or "").parts
    packs = [index for index, part in enumerate(parts) if part == PACKS.name]
    return parts[packs[-1] + 1] if packs and len(parts) > packs[-1] + 1 else module.rpartition("/")[2].partition(".")[0]


def pack_and_node(iterator: Iterator, keeper: Code | None) -> str:
    """Name the pack an iterator is of and its node where that can be told; "" for one that is no pack's.

    ``keeper``: the code of a pack that keeps it. Without any, a generator is of the code that it runs.
    """
    made_by = Code("")
    if isinstance(iterator, GeneratorType):
        made_by = Code(_module_of(iterator.gi_code.co_filename), iterator.__qualname__)
    candidates = [code for code in (keeper, made_by) if code and code.module and is_of_pack(code.module)]
    if not candidates:
        return ""
    titles = [title for code in candidates if (title := _node_of(code))]
    return f"{keeper_of(candidates[0].module)}{f', node {titles[0]!r}' if titles else ''}"


def _node_of(code: Code) -> str:
    """Return the title of the node in whose class code stands; "" for other code."""
    outermost = code.name.partition(".")[0]
    ids = (
        identifier
        for identifier, node in tuple(nodes.NODE_CLASS_MAPPINGS.items())
        if (node.__module__, node.__qualname__) == (code.module, outermost)
    )
    found = next(ids, "")
    return nodes.NODE_DISPLAY_NAME_MAPPINGS.get(found) or found


def _module_of(filename: str) -> str:
    """Return the name of the imported module of a file; "" for none."""
    named = (name for name, module in tuple(sys.modules.items()) if getattr(module, "__file__", None) == filename)
    return next(named, "")


def _is_outside_of_core(file: Path) -> bool:
    return file.is_relative_to(PACKS) or any(file.is_relative_to(folder) for folder in LIBRARIES)


def _file_of(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None
