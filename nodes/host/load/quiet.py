"""Silence for a model that ComfyUI builds for its module classes alone."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(below: int = logging.WARNING) -> Iterator[None]:
    """Drop what ComfyUI logs in this thread below a level: it writes to the root logger itself (``logging.info``).

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
