"""Patches of modules that hold for one call: set, and put back whatever happens."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ABSENT = object()
Patch = tuple[torch.nn.Module, str, Any]


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Set ``(module, attribute, value)`` on the module instances; restore or delete them in reverse order at the end.

    Goes past ``nn.Module.__setattr__``: this runs around every model call, for every layer.
    """
    done: list[Patch] = []
    try:
        for module, name, value in patches:
            done.append((module, name, module.__dict__.get(name, _ABSENT)))
            module.__dict__[name] = value
        yield
    finally:
        for module, name, value in reversed(done):
            if value is _ABSENT:
                del module.__dict__[name]
            else:
                module.__dict__[name] = value
