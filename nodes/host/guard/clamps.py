"""Operations of model code that make a finite value of one past fp16's range, so that a result hides an overflow."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch.nn import functional

from ....precision.base.amax import amax
from ....precision.base.patching import SharedScope

GIVEN = (
    *("nan_to_num", "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum"),
    *("isfinite", "isnan", "isinf", "tanh", "sigmoid", "relu", "rsqrt"),
)
"""Functions and methods of torch that bound what they are given, or ask whether it is finite to put something else in
its place."""
BOUNDING = ("hardtanh", "relu6", "hardsigmoid", "softsign", "softplus", "elu", "selu")
"""Functions of ``torch.nn.functional`` that bound it by themselves."""
WATCHED = (
    *((torch, name) for name in (*GIVEN, "norm")),
    *((functional, name) for name in BOUNDING),
    *((torch.Tensor, name) for given in GIVEN for name in (given, f"{given}_") if hasattr(torch.Tensor, name)),
)
"""(owner, name); ``Tensor.norm`` and ``normalize`` call ``torch.norm``."""
_largest_of = torch.maximum
_watches: ContextVar[tuple["ClampWatch", ...]] = ContextVar("halfsafe_clamp_watches", default=())
"""Those of this thread."""


@functools.lru_cache(maxsize=256)
def _watched(function: Callable, name: str) -> Callable:
    """Wrap a function that hides an overflow: of what it is given, or a norm of its own, by which a division is 0."""

    def run(*args, **kwargs):
        made = function(*args, **kwargs) if name == "norm" else None
        for watch in _watches.get():
            watch.see(made if name == "norm" else args[0] if args else kwargs.get("input"))
        return made if name == "norm" else function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _functions_exchanged() -> Iterator[None]:
    own = [(owner, name, owner.__dict__.get(name)) for owner, name in WATCHED]
    for owner, name, function in own:
        setattr(owner, name, _watched(function or getattr(owner, name), name))
    try:
        yield
    finally:
        for owner, name, function in own:
            if function:
                setattr(owner, name, function)
            else:
                delattr(owner, name)


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

    def see(self, values: object) -> None:
        """Keep the largest magnitude."""
        if isinstance(values, torch.Tensor) and values.dtype == torch.float16:
            _largest_of(self.largest, amax(values), out=self.largest)
