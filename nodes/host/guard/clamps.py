"""Torch functions that can hide an fp16 overflow (``HIDING``: clamp, tanh, ...), exchanged while a sampler runs."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch.nn import functional

from ....precision.arithmetic.hiding import HIDING, hidden_operand
from ....precision.base.amax import amax
from ....precision.base.patching import SharedScope

WATCHED = tuple(
    (owner, each, name)
    for name, how in HIDING.items()
    if how.is_tested
    for owner in (torch, functional, torch.Tensor)
    for each in (name, f"{name}_")
    if hasattr(owner, each)
)
"""(owner, function, operation) of each function that is exchanged."""
_largest_of = torch.maximum
_watches: ContextVar[tuple["ClampWatch", ...]] = ContextVar("halfsafe_clamp_watches", default=())
"""Those of this thread."""


@functools.lru_cache(maxsize=256)
def _watched(function: Callable, name: str) -> Callable:
    """Wrap a function that hides an overflow of an operand: its watches test the operand first."""

    def run(*args, **kwargs):
        operand = hidden_operand(name, args, kwargs)
        if operand is not None and operand.dtype == torch.float16:
            for watch in _watches.get():
                watch.see(operand)
        return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _functions_exchanged() -> Iterator[None]:
    own = [(owner, each, owner.__dict__.get(each), name) for owner, each, name in WATCHED]
    for owner, each, function, name in own:
        setattr(owner, each, _watched(function or getattr(owner, each), name))
    try:
        yield
    finally:
        for owner, each, function, _ in own:
            if function:
                setattr(owner, each, function)
            else:
                delattr(owner, each)


hiding_is_seen = SharedScope(_functions_exchanged)
"""Entered for a run of a sampler, and by each watch. CPython 3.13 caches no attribute of a class that was changed a
thousand times (``MAX_VERSIONS_PER_CLASS`` in Objects/typeobject.c), to which two changes a call would come."""


class ClampWatch:
    """Record the largest magnitude, inf or NaN, that operations which hide it meet in fp16 on this thread; reads
    nothing back.

    It keeps nothing that a block allocates: its one number is made before the call, on ``device``.
    """

    def __init__(self, device: torch.device):
        self.largest = torch.zeros((), device=device)

    def __enter__(self) -> "ClampWatch":
        hiding_is_seen.__enter__()
        self._outside = _watches.set((*_watches.get(), self))
        return self

    def __exit__(self, *error) -> None:
        _watches.reset(self._outside)
        hiding_is_seen.__exit__(*error)

    def see(self, operand: torch.Tensor) -> None:
        """Keep the largest magnitude of an fp16 tensor."""
        _largest_of(self.largest, amax(operand), out=self.largest)
