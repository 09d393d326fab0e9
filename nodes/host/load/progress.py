"""What ComfyUI shows and logs meanwhile: its progress bar with its interrupt, and silence."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import comfy.model_management
import comfy.utils

from ....precision.formats.checkpoint import StoredWeight


def byte_progress(weights: Iterable[StoredWeight]) -> Callable[[int], None]:
    """Return a function to call with the bytes of these weights just dealt with."""
    return advancing(comfy.utils.ProgressBar(max(1, sum(weight.data.nbytes for weight in weights))))


def advancing(bar: comfy.utils.ProgressBar) -> Callable:
    """Return a function that moves the bar on and raises ComfyUI's interrupt."""

    def advance(done: int = 1) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(done)

    return advance


@contextmanager
def quiet(below: int = logging.WARNING) -> Iterator[None]:
    """Drop ComfyUI's log of this thread below a level: ComfyUI writes to the root logger itself (``logging.info``).

    What other loggers write, and other threads, passes: the root logger's filters see no record of theirs.
    """
    thread, root = threading.get_ident(), logging.getLogger()

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno >= below or record.thread != thread

    root.addFilter(passes)
    try:
        yield
    finally:
        root.removeFilter(passes)
