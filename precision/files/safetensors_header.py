"""The header of a safetensors file: read once the ``safetensors`` library has checked it, or made for a new file.

Format: 8 bytes little-endian header length, a JSON header, then the tensors back to back
(https://github.com/huggingface/safetensors#format). Nothing is allocated from a size that the file claims.
"""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..base.errors import CheckpointError
from ..base.message import Message, joined

MAX_HEADER = 100_000_000
MAX_NAME = 1000
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 62
PRINTABLE = frozenset([*range(32, 127), *b"\t\r\n"])
QUANTIZATION_KEY = "_quantization_metadata"
"""The metadata with ComfyUI's table of quantized layers: ``{"layers": {layer: settings}}`` as JSON."""
AGAIN = "Download it again."
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
_CONVERT = "Load it with ComfyUI's own loader and save it as .safetensors, or use a .safetensors version."

_STARTS = (
    (b"version https://git-lfs", "a git-LFS pointer, not the model itself", "Run 'git lfs pull', or download it."),
    (b"GGUF", "a GGUF file", "Load it with ComfyUI-GGUF and connect its MODEL to any Halfsafe node."),
    (b"PK\x03\x04", "a zip archive, the format of PyTorch's .ckpt, .pt and .pth files", _CONVERT),
    (b"\x80\x02", "a Python pickle, the format of old .ckpt and .pt files", _CONVERT),
    (b"\x1f\x8b", "a gzip archive", "Unpack it."),
    (b"\x89HDF", "an HDF5 file", "Use a .safetensors version."),
)
"""How files of other kinds begin, what they are, and what to do."""


class Entry(NamedTuple):
    """Where a tensor lies: absolute byte offsets in ``file``; ``dtype`` is the safetensors code (``BF16``)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


class TensorSpec(NamedTuple):
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
        problem, advice = _describe_other_format(head)
        raise CheckpointError(path, problem, advice=advice)
    if length > size - 8:
        problem = Message(
            "truncated in its header: {0} bytes of the header and all tensors are missing", 8 + length - size
        )
        raise CheckpointError(path, problem, advice=AGAIN)
    file.seek(8)
    text = file.read(length)
    try:
        with safe_open(path, framework="np"):
            header = json.loads(text)
    except SafetensorError as error:
        raise _refusal(path, text, size - 8 - length, error) from None
    metadata = header.pop("__metadata__", None) or {}
    entries = [(name, _entry(path, name, value, 8 + length)) for name, value in header.items()]
    return metadata, dict(sorted(entries, key=lambda item: (item[1].start, item[1].end)))


def _describe_other_format(head: bytes) -> tuple[str, str]:
    """Return problem and advice for a file that begins with ``head`` and has no plausible safetensors header."""
    for start, problem, advice in _STARTS:
        if head.startswith(start):
            return problem, advice
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"<":
        advice = joined([AGAIN, "The site may ask you to log in or to accept a licence."])
        return "a web page (HTML), not a model", advice
    if len(text) > 3 and all(byte in PRINTABLE for byte in text[:64]):
        shown = text[:60].decode("ascii").splitlines()[0]
        advice = joined([AGAIN, "The site may have answered with an error."])
        return Message("a text file that begins {0}, not a model", f"{shown!r}"), advice
    if len(head) < 9:
        return Message("only {0} bytes long", len(head)) if head else "empty, 0 bytes", AGAIN
    length = int.from_bytes(head[:8], "little")
    impossible = "not a safetensors file (a header of {0} bytes is impossible, or does not begin with '{1}')"
    return Message(impossible, length, "{"), AGAIN


def _refusal(path: Path, text: bytes, data: int, error: SafetensorError) -> CheckpointError:
    """Explain why the library refuses a header, by the tensor at fault where one can be told."""
    end = 0
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, value in header.items():
            end = max(end, _entry(path, name, value, 0).end)
    except CheckpointError as found:
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        end = 0
    if end > data:
        return CheckpointError(path, Message("truncated: {0} of {1} bytes are missing", end - data, end), advice=AGAIN)
    return CheckpointError(path, f"damaged ({ascii(str(error)[:300])[1:-1]})", advice=AGAIN)


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
    if len(name) > MAX_NAME or not name.isprintable():
        raise CheckpointError(path, "its name is too long or cannot be shown", ascii(name[:80])[1:-1], AGAIN)
    code = value["dtype"]
    shape = value["shape"]
    start, end = value["data_offsets"]
    if code not in TORCH_DTYPES:
        problem = Message("torch {0} has no such dtype", torch.__version__) if code in CODES else "an unknown dtype"
        problem = Message("stored as {0}, {1}", f"{code[:40]!r}", problem)
        raise CheckpointError(path, problem, name, "Update ComfyUI, or use another file.")
    if len(shape) > MAX_DIMENSIONS or prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise CheckpointError(path, "its shape is impossible", name, AGAIN)
    expected = prod(shape) * TORCH_DTYPES[code].itemsize
    if end - start != expected:
        shown = "x".join(map(str, shape[:8]))
        problem = Message("{0} of shape {1} is {2} bytes, the file holds {3}", code, shown, expected, end - start)
        raise CheckpointError(path, problem, name, AGAIN)
    return Entry(path, code, tuple(shape), base + start, base + end)


def layout(specs: Sequence[TensorSpec]) -> dict[str, tuple[TensorSpec, int]]:
    """Map each tensor's name to its spec and its offset in bytes after the header.

    Wide dtypes lie first, so every tensor is aligned.

    Raises:
        ValueError: a name occurs twice.
    """
    places = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        if spec.name in places:
            raise ValueError(Message("{0} is announced twice", spec.name))
        places[spec.name] = (spec, position)
        position += spec.bytes
    return places


def header_bytes(places: dict[str, tuple[TensorSpec, int]], metadata: dict[str, str]) -> bytes:
    """Return the file up to its first tensor, whose place is a multiple of 8, for a :func:`layout`."""
    table: dict[str, dict] = {"__metadata__": metadata} if metadata else {}
    for spec, start in places.values():
        offsets = [start, start + spec.bytes]
        table[spec.name] = {"dtype": CODE_OF[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def contradiction(one: dict, other: dict) -> str | None:
    """Return the first key to which two objects give different values; None where both can be true."""
    return next((key for key in one if key in other and other[key] != one[key]), None)


def read_object(text: str | bytes) -> dict:
    """Parse a JSON object in UTF-8 with no lone surrogates.

    Raises:
        ValueError: ``text`` is no such object; the message says why, in ASCII.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair, which no file can hold
    except (ValueError, RecursionError) as error:
        raise ValueError(Message("not valid JSON ({0})", ascii(str(error))[1:-1])) from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
