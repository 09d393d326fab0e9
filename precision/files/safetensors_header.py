"""The header of a safetensors file: read and checked, or made for the tensors that will be written.

Format: 8 bytes little-endian header length, a JSON header, then the tensors back to back
(https://github.com/huggingface/safetensors#format). Nothing is allocated from a size that the file claims.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError
from .sniff import describe_other_format
from .strict_json import read_object

MAX_HEADER = 100_000_000
MAX_NAME = 1000
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 62
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


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: absolute byte offsets in ``file``; ``dtype`` is the safetensors code (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, str], dict[str, Entry]]:
    """Read the metadata and the tensors, in file order, of a file of ``size`` bytes that is open at its beginning.

    Raises:
        CheckpointError: it is no safetensors file, or damaged, or its tensors do not fill it exactly.
    """
    head = file.read(512)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 9 or head[8:9] != b"{" or length > MAX_HEADER:
        problem, advice = describe_other_format(head)
        raise CheckpointError(path, problem, advice=advice)
    if length > size - 8:
        problem = f"truncated in its header: {8 + length - size} more bytes of header are missing, and the tensors"
        raise CheckpointError(path, problem, advice="Download it again.")
    file.seek(8)
    header = parse_json(path, file.read(length), "header")
    metadata = _metadata(path, header.pop("__metadata__", None))
    return metadata, _entries(path, header, 8 + length, size)


def parse_json(path: Path, text: bytes, part: str) -> dict:
    """Parse the JSON object that a part of a file is, or raise CheckpointError."""
    try:
        return read_object(text)
    except ValueError as error:
        raise CheckpointError(path, f"its {part} is {error}", advice="Download it again.") from None


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
        problem = f"truncated: {end - size} of {end} bytes are missing"
        raise CheckpointError(path, problem, advice="The download is incomplete: repeat it.")
    position = start
    for name, entry in entries:
        if entry.start != position:
            problem = "overlaps another tensor" if entry.start < position else "does not follow the tensor before it"
            raise CheckpointError(path, f"{problem} (offset {entry.start - start})", name, "Download it again.")
        position = entry.end
    if position < size:
        raise CheckpointError(path, f"{size - position} bytes follow the last tensor", advice="Download it again.")
    return dict(entries)


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
    check_name(path, name)
    try:
        code, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        valid = isinstance(code, str) and isinstance(shape, list) and all(_is_size(n) for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(path, "its entry in the header is malformed", name, "Download it again.")
    _check_span(path, name, code, shape, start, end)
    return Entry(path, code, tuple(shape), base + start, base + end)


def check_name(path: Path, name: str) -> None:
    """Raise CheckpointError for a tensor's name that errors and reports could not show."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError(
            path, "its name is too long or cannot be shown", ascii(name[:80])[1:-1], "Download it again."
        )


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
        problem = f"{code} of shape {shown} is {expected} bytes, the file holds {end - start}"
        raise CheckpointError(path, problem, name, "Download it again.")


def layout(specs: Sequence[TensorSpec]) -> dict[str, tuple[TensorSpec, int]]:
    """Map each tensor's name to it and its offset in bytes after the header, wide dtypes first,
    so that every tensor is aligned.

    Raises:
        ValueError: a name occurs twice.
    """
    places, position = {}, 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        if spec.name in places:
            raise ValueError(f"{spec.name} is announced twice")
        places[spec.name] = (spec, position)
        position += spec.bytes
    return places


def header_bytes(places: dict[str, tuple[TensorSpec, int]], metadata: dict[str, str], least: int = 0) -> bytes:
    """Return the file up to its first tensor, whose place is a multiple of 8 and ``least`` or more, for a
    :func:`layout`."""
    table: dict[str, dict] = {"__metadata__": metadata} if metadata else {}
    for spec, start in places.values():
        offsets = [start, start + spec.bytes]
        table[spec.name] = {"dtype": CODE_OF[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(least - 8)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
