"""Faults at a chosen point of a write: every call to the system that `precision/files/atomic_write.py` makes is one."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
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


@contextmanager
def failing_at(point: int, error: BaseException) -> Iterator[None]:
    """Raise ``error`` at the given point, once."""
    passed = []

    def before():
        passed.append(None)
        if len(passed) == point + 1:
            raise error

    with watched(before):
        yield


def killed_at(point: int, run: Callable[[], object]) -> None:
    """End this process the hard way before the given point."""
    passed = []

    def step():
        passed.append(None)
        if len(passed) == point + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with watched(step):
        run()


def in_a_fork(run: Callable[[], object]) -> int:
    """Run in a copy of this process; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
