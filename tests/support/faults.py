"""Faults at a chosen point of a write: every call to the system that `precision/files/atomic_write.py` makes is one."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from halfsafe.precision.files import safetensors_file

POINTS = ("fsync", "replace")


@contextmanager
def watched(before: Callable[[], None], after: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Call ``before`` and ``after`` around every step of a write: each tensor, flush, replace."""

    def around(function):
        def call(*args, **kwargs):
            before()
            result = function(*args, **kwargs)
            after()
            return result

        return call

    patches = [mock.patch.object(os, name, around(getattr(os, name))) for name in POINTS if hasattr(os, name)]
    patches.append(mock.patch.object(safetensors_file, "_write_tensor", around(safetensors_file._write_tensor)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


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
    """End this process the hard way: before step ``point / 2``, or after it where ``point`` is odd."""
    passed = {"before": 0, "after": 0}

    def step(side: str):
        passed[side] += 1
        if passed[side] == point // 2 + 1 and side == ("after" if point % 2 else "before"):
            os.kill(os.getpid(), signal.SIGKILL)

    with watched(lambda: step("before"), lambda: step("after")):
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
