"""Runs of zero bytes: what a download leaves that was allocated whole and then interrupted, in one part or in several.

A model holds zeros too: layers that start at zero, padded rows of an embedding, pruned heads. Those are whole tensors
or whole rows. The ends of a run that a download leaves lie anywhere.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from ..base.message import Message
from .safetensors_header import Entry
from .tensor_file import TensorFile

FEWEST = 4
"""Matrices in a row: layers that start at zero, and stay so, are fewer."""
SHORTEST = 1 << 16
"""Bytes of a run that is told though it holds fewer matrices."""
STRIDE = 1 << 14
FIRST = 64
"""Bytes that are looked at, of which each ``STRIDE`` of data has so many."""
NARROW = 16
"""Columns below which the last dimension is that of a kernel, and a row is all that belongs to an output."""
CHUNK = 1 << 20


class _ZeroRun(NamedTuple):
    """Bytes of ``file`` from ``start`` to before ``end`` that are zeros, in so many ``tensors``."""

    file: str
    start: int
    end: int
    tensor: str
    last: str
    tensors: int

    def __str__(self) -> str:
        zeros = Message("bytes {0} to {1} of {2} hold only zeros", self.start, self.end - 1, self.file)
        where = Message("{0} tensors, from {1} to {2}", self.tensors, self.tensor, self.last)
        return Message("{0} ({1}). If its download was interrupted, download it again.", zeros, where)


def zero_runs(file: TensorFile, places: Mapping[str, Iterable[int]] | None = None) -> Iterator[_ZeroRun]:
    """Find runs of zero bytes that are at least ``FEWEST`` matrices, or at least ``SHORTEST`` bytes that begin or end
    inside of a row.

    ``places``: name of a file -> bytes at which :func:`zero_places` found zeros; without them 64 bytes of each fourth
    matrix are read, which finds whole matrices in a row alone.
    """
    file.require_whole()
    for path, pages in file.maps.items():
        part = [(name, entry) for name, entry in file.entries.items() if entry.file is path and entry.end > entry.start]
        data = np.frombuffer(pages, dtype=np.uint8)
        end = 0
        candidates = _begins(part) if places is None else sorted(places.get(str(path), ()))
        for place in candidates:
            if place < end or data[place : min(place + FIRST, part[-1][1].end)].any():
                continue
            start, end = _run_around(data, place, part[0][1].start, part[-1][1].end)
            held = [(name, entry) for name, entry in part if entry.start < end and entry.end > start]
            whole = [entry for _, entry in held if len(entry.shape) > 1 and start <= entry.start and entry.end <= end]
            cut = end - start >= SHORTEST and any(_cuts(entry, at) for _, entry in held for at in (start, end))
            if cut or len(whole) >= FEWEST:
                yield _ZeroRun(path.name, start, end, held[0][0], held[-1][0], len(held))


def zero_places(data: torch.Tensor, start: int) -> list[int]:
    """List bytes at which ``FIRST`` zeros follow in a tensor's data, which begin at the byte ``start`` of their file.

    Each ``STRIDE`` is looked at, and the end. Tensors of fewer bytes are not.
    """
    if data.nbytes < STRIDE or data.device.type != "cpu" or not data.is_contiguous():
        return []
    codes = data.reshape(-1).view(torch.uint8).numpy()
    count = len(codes) // STRIDE
    # By ufuncs: the methods of an array are Python.
    found = np.logical_or.reduce(codes[: count * STRIDE].reshape(count, STRIDE)[:, :FIRST], axis=1)
    places = [] if np.logical_and.reduce(found) else (start + STRIDE * np.flatnonzero(~found)).tolist()
    last = len(codes) - FIRST
    return places if np.logical_or.reduce(codes[last:]) else [*places, start + last]


def _begins(part: list[tuple[str, Entry]]) -> list[int]:
    return [entry.start for _, entry in part if len(entry.shape) > 1][FEWEST - 1 :: FEWEST]


def _run_around(data: np.ndarray, place: int, low: int, high: int) -> tuple[int, int]:
    """Return where the zeros around a place begin and end."""
    start = place
    while start > low:
        before = data[max(low, start - CHUNK) : start][::-1]
        length = int((before != 0).argmax()) if before.any() else len(before)
        start -= length
        if length < len(before):
            break
    end = place
    while end < high:
        after = data[end : min(high, end + CHUNK)]
        length = int((after != 0).argmax()) if after.any() else len(after)
        end += length
        if length < len(after):
            break
    return start, end


def _cuts(entry: Entry, place: int) -> bool:
    """True if a place is inside of a row of a matrix, and not so near to its ends that numbers there may be zeros."""
    if len(entry.shape) < 2 or not entry.start < place < entry.end:
        return False
    size = entry.torch_dtype.itemsize
    row = size * (entry.shape[-1] if entry.shape[-1] >= NARROW else prod(entry.shape[1:]))
    inside = (place - entry.start) % row
    return min(inside, row - inside) > max(4 * size, min(row // 16, 32 * size))
