"""Writing a file so that it exists whole or not at all."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..base.errors import CheckpointError
from ..base.message import Message
from ..base.text import size_text

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def require_space(path: Path, needed: int) -> None:
    """Raise CheckpointError unless the disk of ``path`` has ``needed`` bytes free."""
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        problem = Message("the disk has {0} free, {1} are needed", size_text(free), size_text(needed))
        raise CheckpointError(path, problem, advice="Free some space, or write to another disk.")


@contextmanager
def os_errors_as(path: Path, verb: str) -> Iterator[None]:
    """Raise an OSError of the block as a CheckpointError: ``path`` cannot be ``verb`` (``read``, ``written``)."""
    try:
        yield
    except OSError as error:
        full = error.errno in _DISK_FULL
        advice = "Free some space." if full else "Check the disk and the folder, or the connection to them."
        problem = Message("cannot be {0} ({1})", verb, error.strerror or error)
        raise CheckpointError(path, problem, advice=advice) from error


@contextmanager
def replacing(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file in the folder of ``path`` that takes its name when the block ends, flushed to the disk.

    An exception removes the file; a killed process leaves ``<name>.<letters>.part`` behind.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not overwrite and path.exists():
            advice = "Give another name, or --force to overwrite it."
            raise CheckpointError(path, "was created by another program and is not overwritten", advice=advice)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
