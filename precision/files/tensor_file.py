"""Tensors as views of a model file's mapped pages, whatever the format of the file.

The ``safetensors`` library maps a file anew for torch, within the commit limit: none larger than the memory.
"""

import hashlib
import mmap
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..base.message import Message
from .safetensors_header import Entry

SAMPLE = 4096


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file or of a sharded set, in file order, as views of mapped pages.

    A tensor costs no memory of its own until it is written to; the pages are private, so that never reaches the file.
    """

    def __init__(self, path: Path, metadata: dict[str, str], entries: dict[str, Entry], maps: dict[Path, mmap.mmap]):
        self.path = path
        self.metadata = metadata
        self.entries = entries
        self.maps = maps

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        pages = self.maps[entry.file]
        _require_whole(entry.file, pages)
        dtype = entry.torch_dtype
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        count = (entry.end - entry.start) // dtype.itemsize
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def files(self) -> list[Path]:
        """Every file of the set."""
        return list(self.maps)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.end - entry.start for entry in self.entries.values())

    def fingerprint(self) -> str:
        """Return the SHA-256 of each part's header, and of the first 4096 bytes of each tensor's data.

        The header is all that precedes the first tensor. Files of one architecture have one header; a finetune changes
        some of the first bytes of nearly every tensor.
        """
        digest = hashlib.sha256()
        for path in self.files:
            with open(path, "rb") as part:
                entries = [entry for entry in self.entries.values() if entry.file == path]
                digest.update(part.read(min((entry.start for entry in entries), default=-1)))
                for entry in entries:
                    part.seek(entry.start)
                    digest.update(part.read(min(SAMPLE, entry.end - entry.start)))
        return digest.hexdigest()

    def require_whole(self) -> None:
        """Raise CheckpointError if a file has become shorter since it was opened."""
        for path, pages in self.maps.items():
            _require_whole(path, pages)

    def release(self, name: str) -> None:
        """Let the system drop the pages of a tensor that is no longer needed; reading it again reads the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        entry = self.entries[name]
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = entry.end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self.maps[entry.file].madvise(mmap.MADV_DONTNEED, start, end - start)


def _require_whole(path: Path, pages: mmap.mmap) -> None:
    # The system ends a process that reads a page past the end of its file (SIGBUS), which Python cannot catch.
    if pages.size() < len(pages):
        problem = Message("truncated to {0} bytes while it was read; it had {1}", pages.size(), len(pages))
        raise CheckpointError(path, problem, advice="Try again when no other program writes to it.")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        CheckpointError: there is none, it cannot be read, or it is a folder or a device.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            advice = "Choose the .safetensors or .index.json file in it."
            raise CheckpointError(path, "a folder, not a file", advice=advice)
        if not stat.S_ISREG(mode):
            raise CheckpointError(path, "not a regular file")
        return open(path, "rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(path, Message("cannot be opened ({0})", reason), advice="Check the path.") from None
