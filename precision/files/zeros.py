"""Matrices of zeros in a row: what a download leaves that was allocated whole and then interrupted."""

import mmap
from collections.abc import Iterator
from typing import NamedTuple

from ..base.message import Message
from .safetensors_header import Entry
from .tensor_file import TensorFile

FEWEST = 4
"""Matrices in a row: layers that start at zero, and stay so, are fewer."""
FIRST = 64


class ZeroRun(NamedTuple):
    """Matrices that follow each other in ``file`` and hold only zeros. The first one begins at the byte ``start``."""

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
        matrices = [place for place, (_, entry) in enumerate(part) if len(entry.shape) > 1]
        end = 0
        for place in matrices[FEWEST - 1 :: FEWEST]:
            if place < end or not _is_zero(pages, part[place][1]):
                continue
            start = place
            end = place + 1
            while start > 0 and _is_zero(pages, part[start - 1][1]):
                start -= 1
            while end < len(part) and _is_zero(pages, part[end][1]):
                end += 1
            zeros = [part[place] for place in matrices if place in range(start, end)]
            if len(zeros) >= FEWEST:
                name, entry = zeros[0]
                yield ZeroRun(name, path.name, entry.start, len(zeros))


def _is_zero(pages: mmap.mmap, entry: Entry) -> bool:
    begins = pages[entry.start : min(entry.start + FIRST, entry.end)]
    return not (begins.strip(b"\0") or pages[entry.start : entry.end].strip(b"\0"))
