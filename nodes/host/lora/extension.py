"""Extend a ModelPatcher that ComfyUI made by methods of ours."""

import functools
from typing import Any


def extend(patcher: Any, extension: type) -> None:
    """Put a class in front of a ModelPatcher's own, under the same name; its later clones have it too."""
    patcher.__class__ = _mixed(extension, patcher.__class__)


@functools.cache
def _mixed(extension: type, base: type) -> type:
    return type(base.__name__, (extension, base), {"__module__": base.__module__})
