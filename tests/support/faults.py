"""Faults at a chosen point of a write: every call to the system that `precision/files/atomic_write.py` makes is one."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from halfsafe.precision.files import safetensors_file

POINTS = ("fsync", "replace")


@contextmanager
def watched(step: Callable[[], None]) -> Iterator[None]:
    """Call ``step`` before every step of a write: each tensor, flush, replace."""

    def after_step(function):
        def call(*args, **kwargs):
            step()
            return function(*args, **kwargs)

        return call

    with ExitStack() as undo:
        for owner, name in [(os, name) for name in POINTS if hasattr(os, name)] + [(safetensors_file, "_write_tensor")]:
            undo.enter_context(mock.patch.object(owner, name, after_step(getattr(owner, name))))
        yield


def count(run: Callable[[], object]) -> int:
    """How many points ``run`` passes."""
    passed = []
    with watched(lambda: passed.append(None)):
        run()
    return len(passed)
