"""Patches of modules that hold for one call, and scopes that threads share: set, and put back whatever happens."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_ABSENT = ...  # copied and pickled as itself
Patch = tuple[object, str, Any]
Watch = Callable[..., Any]
"""``watch(forward, *args, **kwargs)`` runs the forward of a module, and returns its result."""
PutsWatch = Callable[[torch.nn.Module, Watch], list[Patch]]


def watched_forward(module: torch.nn.Module, watch: Watch, method: str = "forward") -> list[Patch]:
    """Return the patches by which a module's calls, or those of another ``method`` in place of its
    forward, run through ``watch``."""
    forward = getattr(module, method)

    # No ``partial``: torch.compile makes a graph anew for each object on a module that is not a function.
    def run(*args: Any, **kwargs: Any) -> Any:
        return watch(forward, *args, **kwargs)

    return [(module, method, run)]


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Set ``(module, attribute, value)`` on modules, or other objects, for as long as the context lasts.

    Goes past ``nn.Module.__setattr__``, and over the patches once: this runs around every model call, for every layer.
    """
    before = []
    try:
        for module, name, value in patches:
            place = module.__dict__
            before.append((place, name, place.get(name, _ABSENT)))
            place[name] = value
        yield
    finally:
        for place, name, value in reversed(before):
            if value is _ABSENT:
                place.pop(name, None)
            else:
                place[name] = value


class SharedScope:
    """Hold a setting of the whole process while any thread is inside: the first to enter sets it, the last to leave
    restores it.

    Args:
        make: gives the context manager that sets and restores, once for each time that nobody was inside.
    """

    def __init__(self, make: Callable[[], AbstractContextManager]):
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._setting = self._make()
                self._setting.__enter__()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._setting.__exit__(None, None, None)


class Turns:
    """Let one thread at a time work on an object, and threads on other objects side by side.

    What :func:`patched` sets on an object is put back as it was found, so threads that overlapped would each leave the
    other's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: weakref.WeakKeyDictionary[object, AbstractContextManager] = weakref.WeakKeyDictionary()

    def of(self, thing: object) -> AbstractContextManager:
        """Return the context of a turn on an object; a thread in it may enter it again."""
        with self._lock:
            return self._locks.setdefault(thing, threading.RLock())


# torch's stance is one for the process, and each ``set_stance`` puts back what it found: threads that overlap would
# leave the other's.
_disabled = SharedScope(lambda: torch.compiler.set_stance("force_eager"))


def compile_disabled() -> AbstractContextManager[object]:
    """Run compiled code as plain torch inside, on every thread. Changes nothing before torch 2.6."""
    # torch has ``set_stance`` from 2.6 on. It imports torch._dynamo, which takes seconds; whoever compiled has it.
    can = hasattr(torch.compiler, "set_stance") and "torch._dynamo" in sys.modules
    return _disabled if can else nullcontext()
