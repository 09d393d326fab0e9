"""Operations of model code that make a finite value of one past fp16's range, so that a result hides an overflow."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch

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
_largest_of = torch.maximum
_of_thread = threading.local()


def _watching_here() -> list["ClampWatch"]:
    return _of_thread.__dict__.setdefault("watches", [])


@functools.lru_cache(maxsize=128)
def _given(function: Callable) -> Callable:
    """Wrap a function that hides an overflow of what it is given."""

    def run(*args, **kwargs):
        for watch in _watching_here():
            watch.see(args[0] if args else kwargs.get("input"))
        return function(*args, **kwargs)

    return run


@functools.lru_cache(maxsize=128)
def _returned(function: Callable) -> Callable:
    """Wrap a function whose result overflows where what it is given does not: a division by it gives 0."""

    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        for watch in _watching_here():
            watch.see(result)
        return result

    return run


WATCHED = (
    *((torch, name, _given) for name in GIVEN),
    (torch, "norm", _returned),
    *((torch.nn.functional, name, _given) for name in BOUNDING),
    *((torch.Tensor, name, _given) for name in GIVEN),
    *((torch.Tensor, f"{name}_", _given) for name in GIVEN if hasattr(torch.Tensor, f"{name}_")),
)
"""(owner, name, how it is watched); ``Tensor.norm`` and ``normalize`` call ``torch.norm``."""
SPACES = {owner: vars(owner) for owner in (torch, torch.nn.functional, torch.Tensor)}


@contextlib.contextmanager
def _hiding_is_seen() -> Iterator[None]:
    own = [(owner, name, name in SPACES[owner] and SPACES[owner][name]) for owner, name, _ in WATCHED]
    for (owner, name, watched), (_, _, function) in zip(WATCHED, own, strict=True):
        setattr(owner, name, watched(function or getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in own:
            if not function:
                delattr(owner, name)
            else:
                setattr(owner, name, function)


_seen = SharedScope(_hiding_is_seen)


class ClampWatch:
    """Record the largest magnitude, inf or NaN, that operations which hide it meet in fp16 on this thread; reads
    nothing back.

    It keeps nothing that a block allocates: its one number is made before the call, on ``device``.
    """

    def __init__(self, on: bool, device: torch.device):
        self.on = on
        self._largest = torch.zeros((), device=device) if on else None

    def __enter__(self) -> "ClampWatch":
        if self.on:
            _seen.__enter__()
            _watching_here().append(self)
        return self

    def __exit__(self, *error) -> None:
        if self.on:
            _watching_here().remove(self)
            _seen.__exit__(*error)

    def see(self, values: object) -> None:
        """Keep the largest magnitude."""
        if isinstance(values, torch.Tensor) and values.dtype == torch.float16:
            _largest_of(self._largest, amax(values), out=self._largest)

    def sizes(self) -> list[torch.Tensor]:
        """Return the largest magnitude, 0-dim; 0 where nothing was bounded, and nothing where it is off."""
        return [] if self._largest is None else [self._largest]
