"""Compiled models run as plain torch for a while: to read numbers back, or to watch every operation."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside: list = []  # the one stance, once for each that is inside


@contextmanager
def eager(on: bool = True) -> Iterator[None]:
    """No compiled code runs inside; where ``on`` is false nothing changes.

    torch's stance is one for the process, and each ``set_stance`` puts back what it found: two threads that overlap would
    leave the other's. So it is set by the first to come in and put back by the last to go.
    """
    set_stance = getattr(torch.compiler, "set_stance", None)
    if not on or set_stance is None:
        yield
        return
    with _lock:
        _inside.append(_inside[0] if _inside else set_stance("force_eager"))
        if len(_inside) == 1:
            _inside[0].__enter__()
    try:
        yield
    finally:
        with _lock:
            stance = _inside.pop()
            if not _inside:
                stance.__exit__(None, None, None)
