"""Extend a ModelPatcher that ComfyUI made, without a name of its own that other nodes would have to know."""

import functools
from typing import Any


def extend(patcher: Any, extension: type) -> None:
    """Make a ModelPatcher one of its own class with ``extension`` in front, under the same name; its clones will be the same."""
    patcher.__class__ = _mixed(extension, patcher.__class__)


@functools.cache
def _mixed(extension: type, base: type) -> type:
    return type(base.__name__, (extension, base), {"__module__": base.__module__})
