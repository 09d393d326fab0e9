"""Writing a file so that it exists whole or not at all."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointError
from ..text import size_text

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be deleted and needs no lock
    fcntl = None

_PART = (".halfsafe-", ".part")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_UNNAMED_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}


def require_space(path: Path, needed: int) -> None:
    """Raise CheckpointError unless the disk that ``path`` is on has ``needed`` bytes free."""
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        problem = f"the disk has {size_text(free)} free, {size_text(needed)} are needed"
        raise CheckpointError(path, problem, advice="Free some space, or write to another disk.")


@contextmanager
def os_errors_as(path: Path, verb: str) -> Iterator[None]:
    """Raise an OSError of the block as a CheckpointError: ``path`` cannot be ``verb`` (``read``, ``written``)."""
    try:
        yield
    except OSError as error:
        advice = (
            "Free some space."
            if error.errno in _DISK_FULL
            else "Check the disk and the folder, or the connection to them."
        )
        raise CheckpointError(path, f"cannot be {verb} ({error.strerror or error})", advice=advice) from error


def _refuse_taken(path: Path) -> CheckpointError:
    advice = "Give another name, or --force to overwrite it."
    return CheckpointError(path, "appeared while it was being written, and is left as it is", advice=advice)


@contextmanager
def replacing(path: Path, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open a file to write to that becomes ``path`` when the block ends, flushed to the disk;
    after an exception it is gone.

    On Linux it has no name until then, so that nothing is left of it after a kill either.

    Raises:
        CheckpointError: the folder or the disk refuses it, or ``path`` exists and is not to be overwritten.
    """
    with os_errors_as(path, "written"):
        sweep(path.parent)
        descriptor, part = _open_part(path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            with os_errors_as(path, "written"):
                file.flush()
                os.fsync(descriptor)
                part = part or _link(descriptor, path, overwrite)
        with os_errors_as(path, "written"):
            if part != path:
                (os.replace if overwrite else _move_to_free_name)(part, path)
            part = None
            _sync_folder(path.parent)
    finally:
        if part is not None:
            with suppress(FileNotFoundError):
                part.unlink()


def _open_part(folder: Path) -> tuple[int, Path | None]:
    """Open a new file without a name where the system has such files, else a temporary one and its path.
    Both locked."""
    descriptor = _open_unnamed(folder)
    part = None
    if descriptor is None:
        part = _part_name(folder)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    if fcntl:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor, part


def _open_unnamed(folder: Path) -> int | None:
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError as error:
        if error.errno in _NO_UNNAMED_FILES and folder.is_dir():
            return None
        raise


def _link(descriptor: int, path: Path, overwrite: bool) -> Path:
    """Give an unnamed file a name: ``path`` itself where that is free, else one that is then moved over it."""
    source = f"/proc/self/fd/{descriptor}"
    try:
        os.link(source, path, src_dir_fd=descriptor, follow_symlinks=True)
        return path
    except FileExistsError:
        if not overwrite:
            raise _refuse_taken(path) from None
        part = _part_name(path.parent)
        os.link(source, part, src_dir_fd=descriptor, follow_symlinks=True)
        return part


def _move_to_free_name(part: Path, path: Path) -> None:
    """Rename a file to a name that nothing has, in one step where the system has one."""
    try:
        if os.name == "nt":
            os.rename(part, path)  # which overwrites nothing there
            return
        try:
            os.link(part, path)
            part.unlink()
        except FileExistsError:
            raise
        except OSError:  # a disk without links (FAT, some network shares): take the name, then the place
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.replace(part, path)
    except FileExistsError:
        raise _refuse_taken(path) from None


def _part_name(folder: Path) -> Path:
    return folder / secrets.token_hex(8).join(_PART)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sweep(folder: Path) -> None:
    """Delete temporary files in ``folder`` that no running process writes to."""
    for part in folder.glob("*".join(_PART)):
        with suppress(OSError):
            if fcntl:
                with open(part, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    part.unlink()
            else:
                part.unlink()
