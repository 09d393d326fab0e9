"""Operations of model code that make a finite value of one past fp16's range, so that a result hides an overflow."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch

from ....precision.amax import amax
from ....precision.arithmetic.patching import SharedScope

GIVEN = (
    *("nan_to_num", "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum", "fmin", "fmax"),
    *("isfinite", "isnan", "isinf", "isposinf", "isneginf", "tanh", "sigmoid", "relu", "rsqrt", "reciprocal"),
)
"""Functions and methods of torch that bound what they are given, or ask whether it is finite to put something else in
its place."""
BOUNDING = ("hardtanh", "relu6", "hardsigmoid", "softsign", "softplus", "elu", "selu")
RETURNED = ("norm",)
"""Functions of torch, whose result may pass fp16's range where what they are given does not: a division by it is 0."""
_largest = torch.maximum
_of_thread = threading.local()


def _watching_here() -> list["ClampWatch"]:
    return _of_thread.__dict__.setdefault("watches", [])


def _seen_before(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(*args, **kwargs):
        for watch in _watching_here():
            watch.see(args[0] if args else kwargs.get("input"))
        return function(*args, **kwargs)

    return run


def _seen_after(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(*args, **kwargs):
        result = function(*args, **kwargs)
        for watch in _watching_here():
            watch.see(result)
        return result

    return run


def _watched() -> list[tuple[object, str, Callable]]:
    """List (owner, name, function with its watch) for all that is watched, also in place: ``nan_to_num_``."""
    places = [(owner, f"{name}{end}") for owner in (torch, torch.Tensor) for name in GIVEN for end in ("", "_")]
    places += [(torch.nn.functional, name) for name in BOUNDING]
    watched = [(owner, name, _seen_before(getattr(owner, name))) for owner, name in places if hasattr(owner, name)]
    return watched + [(torch, name, _seen_after(getattr(torch, name))) for name in RETURNED]


@contextlib.contextmanager
def _hiding_is_seen() -> Iterator[None]:
    changed = [(owner, name, vars(owner).get(name)) for owner, name, _ in WATCHED]
    for owner, name, function in WATCHED:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, own in changed:
            delattr(owner, name) if own is None else setattr(owner, name, own)


WATCHED = _watched()
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
            _largest(self._largest, amax(values), out=self._largest)

    def sizes(self) -> list[torch.Tensor]:
        """Return the largest magnitude, 0-dim; 0 where nothing was bounded, and nothing where it is off."""
        return [] if self._largest is None else [self._largest]
