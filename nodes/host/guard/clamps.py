"""Torch functions that can hide an fp16 overflow (clamp, tanh, isfinite, ...), wrapped while a sampler runs."""

import contextlib
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch.nn import functional

from ....precision.arithmetic.hiding import HIDING, hidden_operands
from ....precision.base.amax import amax
from ....precision.base.patching import SharedScope

_TESTED = tuple(name for name, how in HIDING.items() if how.is_tested)
WATCHED = tuple(
    (owner, each, name)
    for name in _TESTED
    for owner, each in ((torch, name), (functional, name), (torch.Tensor, name), (torch.Tensor, f"{name}_"))
    # Those of ``functional`` that torch has too call torch's or the method.
    if hasattr(owner, each) and not (owner is functional and hasattr(torch, name))
)
"""(owner, function, operation) of each function that is exchanged."""
_largest_of = torch.maximum
SITES = 64
"""How many places of hiding operations in model code are told apart in a call."""
_watches: ContextVar[tuple["ClampWatch", ...]] = ContextVar("halfsafe_clamp_watches", default=())
"""Those of this thread."""


def _watched(function: Callable, name: str) -> Callable:
    """Wrap a function that can hide an overflow: the watches of the thread test its operand first."""

    places = HIDING[name].places
    place = places[0] if len(places) == 1 else None

    def run(*args, **kwargs):
        if watches := _watches.get():
            # The operand is nearly always at its place: a look-up there takes no call of a function.
            is_there = place is not None and len(args) > place
            operands = (args[place],) if is_there else hidden_operands(name, args, kwargs)
            for operand in operands:
                if isinstance(operand, torch.Tensor):
                    for watch in watches:
                        if operand.dtype == torch.float16 or watch.also:
                            frame = sys._getframe(1)
                            watch.see(operand, (frame.f_code, frame.f_lasti))
        return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _functions_exchanged() -> Iterator[None]:
    own = [vars(owner).get(each) for owner, each, _ in WATCHED]
    for owner, each, name in WATCHED:
        setattr(owner, each, _watched(getattr(owner, each), name))
    try:
        yield
    finally:
        for (owner, each, _), function in zip(WATCHED, own, strict=True):
            if function is None:
                delattr(owner, each)
            else:
                setattr(owner, each, function)


hiding_is_seen = SharedScope(_functions_exchanged)
"""Entered for a run of a sampler, and by each watch. CPython 3.13 caches no attribute of a class that was changed a
thousand times (``MAX_VERSIONS_PER_CLASS`` in Objects/typeobject.c), to which two changes a call would come."""


class ClampWatch:
    """Record the amax, Inf or NaN of the fp16 operands of hiding operations on this thread, without a synchronization.

    The record is a number on ``device`` for each place in the code, allocated before the call, so blocks allocate as
    they do without it.

    Args:
        passed: places that are not watched: what they hide is NaN or Inf in fp32 too.
        also: places that are watched in every dtype.
    """

    def __init__(self, device: torch.device, passed: Collection = (), also: Collection = ()):
        self.largest = torch.zeros(SITES, dtype=torch.float32, device=device)
        self.also = also
        self._passed = passed
        self._numbers: dict[object, torch.Tensor] = {}
        self._places = self.largest.unbind()

    def __enter__(self) -> "ClampWatch":
        hiding_is_seen.__enter__()
        self._outside = _watches.set((*_watches.get(), self))
        return self

    def __exit__(self, *error) -> None:
        _watches.reset(self._outside)
        hiding_is_seen.__exit__(*error)

    @torch.no_grad()  # an operand of Train LoRA requires a gradient
    def see(self, operand: torch.Tensor, site: object) -> None:
        """Update the record of a place with the amax of a tensor."""
        if site in self._passed:
            return
        if operand.dtype != torch.float16:
            if site not in self.also or not operand.is_floating_point():
                return
            operand = operand.float()
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = self._places[min(len(self._numbers), SITES - 1)]
        _largest_of(number, amax(operand), out=number)

    @property
    def reached(self) -> frozenset:
        """The places that the call reached, except those passed over."""
        return frozenset(self._numbers)

    def hidden(self, largest: Sequence[float]) -> frozenset:
        """Return the places that met Inf or NaN. ``largest``: the numbers of the record, read back."""
        met = zip(self._numbers, [*largest] + [largest[-1]] * len(self._numbers), strict=False)
        return frozenset(site for site, number in met if not math.isfinite(number))
