"""Matrices of zeros in a row: what a download leaves that was allocated whole and then interrupted."""

import mmap
from collections.abc import Iterator
from typing import NamedTuple

from ..base.message import Message
from .tensor_file import TensorFile

FEWEST = 4
"""Matrices in a row: layers that start at zero, and stay so, are fewer."""
_FIRST, _PART = 64, 1 << 22


class ZeroRun(NamedTuple):
    """Matrices that follow each other in ``file`` and hold only zeros, which begin at the byte ``start``."""

    tensor: str
    file: str
    start: int
    matrices: int

    def __str__(self) -> str:
        zeros = Message(
            "{0} matrices in a row hold only zeros, from byte {1} of {2} on", self.matrices, self.start, self.file
        )
        return Message("{0} (first: {1}). If its download was interrupted, download it again.", zeros, self.tensor)


def zero_runs(file: TensorFile) -> Iterator[ZeroRun]:
    """Find runs of at least ``FEWEST`` matrices of zeros. Of a sound file, 64 bytes of each fourth matrix are read."""
    file.require_whole()
    for path, pages in file.maps.items():
        part = [(name, entry) for name, entry in file.entries.items() if entry.file is path and entry.end > entry.start]
        matrices, end = [(name, entry) for name, entry in part if len(entry.shape) > 1], 0
        for _, entry in matrices[FEWEST - 1 :: FEWEST]:
            if entry.start < end or pages[entry.start : entry.start + _FIRST].strip(b"\0"):
                continue
            start = _start_of_zeros(pages, entry.start, part[0][1].start)
            end = _end_of_zeros(pages, entry.start, part[-1][1].end)
            zeros = [name for name, entry in matrices if start <= entry.start and entry.end <= end]
            if len(zeros) >= FEWEST:
                yield ZeroRun(zeros[0], path.name, start, len(zeros))


def _start_of_zeros(pages: mmap.mmap, at: int, lowest: int) -> int:
    """Return the first of the zero bytes that end at a byte."""
    while at > lowest:
        part = pages[max(lowest, at - _PART) : at]
        others = len(part.rstrip(b"\0"))
        at -= len(part) - others
        if others:
            break
    return at


def _end_of_zeros(pages: mmap.mmap, at: int, highest: int) -> int:
    """Return the end of the zero bytes that begin at a byte."""
    while at < highest:
        part = pages[at : min(at + _PART, highest)]
        others = len(part.lstrip(b"\0"))
        at += len(part) - others
        if others:
            break
    return at
