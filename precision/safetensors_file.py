"""Safetensors files: lazily mapped reading of one file or a sharded set, and atomic streamed writing.

Format: 8 bytes little-endian header length, a JSON header, then the tensors back to back
(https://github.com/huggingface/safetensors#format). Nothing is allocated from a size that the file claims.
"""

import json
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from .atomic_write import naming, replacing, require_space
from .errors import CheckpointError
from .file_kinds import describe_other_format
from .strict_json import read_object

MAX_HEADER = 100_000_000
MAX_NAME = 1000
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 62
PIECE = 1 << 24
CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
TORCH_DTYPES = {code: getattr(torch, name) for code, name in CODES.items() if hasattr(torch, name)}
CODE_OF = {dtype: code for code, dtype in TORCH_DTYPES.items()}
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.(safetensors|sft))")
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: absolute byte offsets in ``file``; ``dtype`` is the safetensors code (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile(Mapping[str, torch.Tensor]):
    """The tensors of a file or of a sharded set, in file order, as views of mapped pages.

    A tensor costs no memory of its own until it is written to; the pages are private, so that never reaches the file.
    """

    def __init__(self, path: Path, metadata: dict[str, str], entries: dict[str, Entry], maps: dict[Path, mmap.mmap]):
        self.path = path
        self.metadata = metadata
        self.entries = entries
        self._maps = maps

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        count = (entry.end - entry.start) // dtype.itemsize
        return torch.frombuffer(self._maps[entry.file], dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def files(self) -> list[Path]:
        """Every file of the set."""
        return list(self._maps)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.end - entry.start for entry in self.entries.values())

    def release(self, name: str) -> None:
        """Let the system drop the pages of a tensor that is no longer needed; reading it again reads the file again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        entry = self.entries[name]
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = entry.end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, start, end - start)


def open_checkpoint(path: str | os.PathLike) -> TensorFile:
    """Open a safetensors file, the index of a sharded set, or the whole set that a shard belongs to.

    Raises:
        CheckpointError: the file is missing, damaged, truncated, of another kind, or one of its shards is.
    """
    path = Path(path)
    if path.name.endswith(".index.json"):
        return _open_index(path)
    shard = _SHARD.fullmatch(path.name)
    if shard is None or int(shard["count"]) <= 1:
        return _open_files(path, [path])
    index = path.with_name(f"{shard['stem']}{shard['suffix']}.index.json")
    return _open_index(index) if index.is_file() else _open_siblings(path, shard)


def _open_siblings(path: Path, shard: re.Match) -> TensorFile:
    names = (
        f"{shard['stem']}-{number:05d}-of-{shard['count']}{shard['suffix']}"
        for number in range(1, int(shard["count"]) + 1)
    )
    files = []
    for file in map(path.with_name, names):
        if not file.is_file():
            raise CheckpointError(
                path, f"part of a set whose file {file.name} is missing", advice="Download all parts."
            )
        files.append(file)
    return _open_files(path, files)


def _open_index(path: Path) -> TensorFile:
    with _open_regular(path) as file, _reading(path):
        if os.fstat(file.fileno()).st_size > MAX_HEADER:
            raise CheckpointError(path, "an index of more than 100 MB", advice="Download it again.")
        index = _parse_json(path, file.read())
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(path, "an index without a 'weight_map'", advice="Download it again.")
    for name, shard in shards.items():
        _check_shard(path, name, shard)
    whole = _open_files(path, [path.with_name(shard) for shard in dict.fromkeys(shards.values())])
    missing = next((name for name in shards if name not in whole.entries), None)
    if missing is not None:
        raise CheckpointError(
            path, f"not in {shards[missing]}, where the index places it", missing, "Download it again."
        )
    return whole


def _check_shard(path: Path, name: str, shard: object) -> None:
    if not isinstance(shard, str) or not shard or shard in (".", "..") or re.search(r"[\\/:\0]", shard):
        raise CheckpointError(path, f"its file {shard!r} is not a plain file name", name, "Do not use this index.")
    if not os.path.isfile(path.with_name(shard)):
        raise CheckpointError(path, f"its file {shard[:200]} is missing from the folder", name, "Download all parts.")


def _open_files(path: Path, files: list[Path]) -> TensorFile:
    metadata, entries, maps = {}, {}, {}
    for file in files:
        own, part = _map_file(file, maps)
        metadata = own | metadata
        twice = next((name for name in part if name in entries), None)
        if twice is not None:
            raise CheckpointError(file, f"also in {entries[twice].file.name}", twice, "Download the set again.")
        entries |= part
    return TensorFile(path, metadata, entries, maps)


def _map_file(path: Path, maps: dict[Path, mmap.mmap]) -> tuple[dict[str, str], dict[str, Entry]]:
    with _open_regular(path) as file, _reading(path):
        size = os.fstat(file.fileno()).st_size
        header, start = _read_header(path, file, size)
        metadata = _metadata(path, header.pop("__metadata__", None))
        entries = _entries(path, header, start, size)
        try:
            maps[path] = _map(file)
        except OSError as error:
            raise CheckpointError(path, f"cannot be mapped into memory ({error.strerror})") from error
    return metadata, entries


def _map(file: BinaryIO) -> mmap.mmap:
    if sys.platform == "linux":
        # Private and writable counts against the commit limit unless it reserves nothing.
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _open_regular(path: Path) -> BinaryIO:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise CheckpointError(
                path, "a folder, not a file", advice="Give the .safetensors or .index.json file in it."
            )
        if not stat.S_ISREG(mode):
            raise CheckpointError(path, "not a regular file")
        return open(path, "rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(path, f"cannot be opened ({reason})", advice="Check the path.") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "Check the disk, or the connection to it."
        raise CheckpointError(path, f"cannot be read ({error.strerror or error})", advice=advice) from error


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict, int]:
    head = file.read(512)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 9 or head[8:9] != b"{" or length > MAX_HEADER:
        problem, advice = describe_other_format(head)
        raise CheckpointError(path, problem, advice=advice)
    if length > size - 8:
        raise CheckpointError(
            path,
            f"truncated in its header: {8 + length - size} more bytes of header are missing, and the tensors",
            advice="Download it again.",
        )
    file.seek(8)
    return _parse_json(path, file.read(length)), 8 + length


def _parse_json(path: Path, text: bytes) -> dict:
    try:
        return read_object(text)
    except ValueError as error:
        raise CheckpointError(path, f"its header is {error}", advice="Download it again.") from None


def _metadata(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(path, "its __metadata__ is not a table of texts", advice="Download it again.")
    return value


def _entries(path: Path, header: dict, start: int, size: int) -> dict[str, Entry]:
    entries = [(name, _entry(path, name, value, start)) for name, value in header.items()]
    entries.sort(key=lambda item: (item[1].start, item[1].end))
    end = max((entry.end for _, entry in entries), default=start)
    if end > size:
        raise CheckpointError(
            path, f"truncated: {end - size} of {end} bytes are missing", advice="The download is incomplete: repeat it."
        )
    position = start
    for name, entry in entries:
        if entry.start != position:
            problem = "overlaps another tensor" if entry.start < position else "does not follow the tensor before it"
            raise CheckpointError(path, f"{problem} (offset {entry.start - start})", name, "Download it again.")
        position = entry.end
    if position < size:
        raise CheckpointError(path, f"{size - position} bytes follow the last tensor", advice="Download it again.")
    return dict(entries)


def _entry(path: Path, name: str, value: object, base: int) -> Entry:
    if len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError(path, "its name is too long or cannot be shown", ascii(name[:80])[1:-1], "Download it again.")
    try:
        code, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        valid = isinstance(code, str) and isinstance(shape, list) and all(_is_size(n) for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(path, "its entry in the header is malformed", name, "Download it again.")
    _check_span(path, name, code, shape, start, end)
    return Entry(path, code, tuple(shape), base + start, base + end)


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_span(path: Path, name: str, code: str, shape: list[int], start: int, end: int) -> None:
    if code not in TORCH_DTYPES:
        known = f"torch {torch.__version__} has no such dtype" if code in CODES else "an unknown dtype"
        raise CheckpointError(path, f"stored as {code[:40]!r}, {known}", name, "Update ComfyUI, or use another file.")
    if len(shape) > MAX_DIMENSIONS or prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise CheckpointError(path, "its shape is impossible", name, "Download it again.")
    expected = prod(shape) * TORCH_DTYPES[code].itemsize
    if end - start != expected:
        shown = "x".join(map(str, shape[:8]))
        raise CheckpointError(
            path,
            f"{code} of shape {shown} is {expected} bytes, the file holds {end - start}",
            name,
            "Download it again.",
        )


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: str | os.PathLike,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: dict[str, str],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the tensors that ``specs`` announce, holding one at a time. ``tensors`` may come in any order.

    Wide dtypes lie first, as safetensors' own writer lays them, so that every tensor is aligned. Until everything is
    on the disk an existing file stays as it is, and no new one appears: not after an exception, and on Linux not after
    a kill either. ``progress`` is called with the number of bytes just written.

    Raises:
        CheckpointError: the disk is too small or full, or the folder cannot be written to.
        ValueError: ``tensors`` are not those that ``specs`` announce.
    """
    path = Path(os.path.realpath(path))
    spans = _layout(specs)
    header = _header(spans, metadata)
    with naming(path):
        require_space(path, len(header) + sum(spec.bytes for spec in specs))
    with replacing(path) as file:
        with naming(path):
            file.write(header)
        _write_all(path, file, len(header), spans, tensors, progress)


def _layout(specs: Sequence[TensorSpec]) -> dict[str, tuple[TensorSpec, int]]:
    spans, position = {}, 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        if spec.name in spans:
            raise ValueError(f"{spec.name} is announced twice")
        spans[spec.name] = (spec, position)
        position += spec.bytes
    return spans


def _header(spans: dict[str, tuple[TensorSpec, int]], metadata: dict[str, str]) -> bytes:
    table = {"__metadata__": metadata} if metadata else {}
    for spec, start in spans.values():
        offsets = [start, start + spec.bytes]
        table[spec.name] = {"dtype": CODE_OF[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(
    path: Path, file: BinaryIO, base: int, spans: dict, tensors: Iterable, progress: Callable | None
) -> None:
    waiting = dict(spans)
    for name, tensor in tensors:
        spec, start = waiting.pop(name)
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, tuple(spec.shape)):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced was {spec}")
        with naming(path):
            _write_tensor(file, base + start, tensor, progress)
        del tensor  # before the next one is made
    if waiting:
        raise ValueError(f"{next(iter(waiting))} was announced and not written")


def _write_tensor(file: BinaryIO, position: int, tensor: torch.Tensor, progress: Callable | None) -> None:
    file.seek(position)
    data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        file.write(piece)
        if progress:
            progress(len(piece))
