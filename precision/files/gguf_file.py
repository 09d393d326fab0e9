"""GGUF files: the header as the library ``gguf`` reads it, the tensors mapped as they lie in the file.

Numbers of types, sizes of blocks and the layout of the header are the library's (https://pypi.org/project/gguf). What a
diffusion model adds to them is ComfyUI-GGUF's (city96, ``loader.py`` and ``tools/convert.py``): tensors have ComfyUI's
own names, and one that was reshaped for its blocks has its shape in the field ``comfy.gguf.orig_shape.<name>``.
"""

import functools
import importlib
import mmap
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import CheckpointError
from .atomic_write import os_errors_as
from .safetensors_header import MAX_DIMENSIONS, MAX_ELEMENTS, TORCH_DTYPES, Entry, check_name
from .sniff import describe_other_format
from .tensor_file import TensorFile, map_pages, open_regular

MAGIC = b"GGUF"
SUFFIX = ".gguf"
ARCHITECTURE = "general.architecture"
SHAPE_KEY = "comfy.gguf.orig_shape."
AGAIN = "Download it again."
_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")
_JOIN = "Join the parts into one file with llama-gguf-split --merge."
_SAFETENSORS = ("a safetensors file", "Give it a name that ends in .safetensors.")
_TRUNCATED = "truncated in its header"
_MOST_READS = 1 << 22
# AttributeError: gguf 0.13 with numpy 2 has no ``newbyteorder`` for a big-endian file.
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError)


@dataclass(frozen=True)
class Packed:
    """What the bytes of a quantized tensor stand for: the library's name of the type (``Q4_K``),
    and the weight's shape."""

    type: str
    shape: tuple[int, ...]


class GgufFile(TensorFile):
    """The tensors of a GGUF file. Those of :attr:`packed`, which are quantized, are rows of bytes."""

    def __init__(
        self,
        path: Path,
        metadata: dict[str, str],
        entries: dict[str, Entry],
        maps: dict[Path, mmap.mmap],
        packed: dict[str, Packed],
    ):
        super().__init__(path, metadata, entries, maps)
        self.packed = packed

    def dtype_name(self, name: str) -> str:
        return self.packed[name].type if name in self.packed else super().dtype_name(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.packed[name].shape if name in self.packed else super().shape(name)


def library(path: str | os.PathLike) -> ModuleType:
    """Import the library ``gguf``, which nothing but an opened GGUF file needs.

    Raises:
        CheckpointError: it is not installed; the message has the line that installs it.
    """
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        problem = f"a GGUF file, which the Python package gguf reads; that cannot be imported ({error})"
        raise CheckpointError(
            path, problem, advice=f"Install it and start again: {sys.executable} -m pip install gguf"
        ) from None


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file of a diffusion model.

    Raises:
        CheckpointError: the file is missing, damaged, truncated, a part of one, big-endian, not of a diffusion model,
            or the library that reads it is.
    """
    with open_regular(path) as file, os_errors_as(path, "read"):
        head = file.read(512)
        if not head.startswith(MAGIC):
            is_safetensors = head[8:9] == b"{"
            problem, advice = _SAFETENSORS if is_safetensors else describe_other_format(head)
            raise CheckpointError(path, f"named {SUFFIX}, but {problem}", advice=advice)
        reader = _read(path)
        maps = {path: map_pages(path, file)}
    metadata = _texts(reader)
    _refuse_others(path, metadata, reader)
    entries, packed = {}, {}
    linear = _written_as_convolutions(metadata, reader)
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
        shape = _shape(path, reader, tensor)
        entries[tensor.name], quantized = _entry(path, tensor, shape[:2] if tensor.name in linear else shape)
        if quantized:
            packed[tensor.name] = quantized
    _check_overlaps(path, entries)
    return GgufFile(path, metadata, entries, maps, packed)


def _read(path: Path) -> Any:
    if _PART.search(path.name):
        raise CheckpointError(path, "a part of a split GGUF file", advice=_JOIN)
    reader = _checked_reader(library(path))
    try:
        return reader(path)
    except _UNREADABLE as error:
        problem = f"its header cannot be read by gguf {version('gguf')} ({error})"
        raise CheckpointError(
            path, problem, advice=f"{AGAIN[:-1]}, or update the library: {sys.executable} -m pip install --upgrade gguf"
        ) from None


@functools.cache
def _checked_reader(gguf: Any) -> type:
    """Make the library's reader, which trusts every size in a file, check them before it follows one."""

    class Reader(gguf.GGUFReader):
        def __init__(self, path: Path):
            self.path, self.reads = path, 0
            super().__init__(path, "r")

        def _get(self, offset: int, dtype: Any, count: int = 1, *args, **kwargs) -> Any:
            self.reads += 1
            # By itself a truncated file fails in numpy ...
            if int(offset) + int(count) * _bytes_of(dtype) > len(self.data):
                raise CheckpointError(self.path, _TRUNCATED, advice=AGAIN)
            # ... and a false length of an array of metadata, which the library walks item by item, may keep it busy for
            # hours (``GGUFReader._get_field_parts``).
            if self.reads > _MOST_READS:
                raise CheckpointError(self.path, f"its metadata has more than {_MOST_READS} items", advice=AGAIN)
            return super()._get(offset, dtype, count, *args, **kwargs)

        def _build_tensors(self, start: int, fields: list) -> None:
            ends = {field.name: int(start) + _check(self.path, gguf, field) for field in fields}
            _check_ends(self.path, ends, len(self.data))
            super()._build_tensors(start, fields)

    return Reader


def _check_ends(path: Path, ends: dict[str, int], size: int) -> None:
    missing = max(ends.values(), default=0) - size
    if missing > 0:
        name = next(name for name, end in ends.items() if end > size)
        problem = f"truncated: {missing} bytes of the file are missing"
        raise CheckpointError(path, problem, name, "The download is incomplete: repeat it.")


def _bytes_of(dtype: Any) -> int:
    import numpy as np

    return np.dtype(dtype).itemsize


def _check(path: Path, gguf: ModuleType, field: Any) -> int:
    """Return the offset at which a tensor ends, counted from the first one, once its name,
    type and shape are plausible."""
    _, _, _, dimensions, kind, offset = field.parts
    check_name(path, field.name)
    try:
        quantization = gguf.GGMLQuantizationType(int(kind[0]))
    except ValueError:
        problem = f"stored in type {int(kind[0])} of GGML, which gguf {version('gguf')} does not know"
        raise CheckpointError(
            path, problem, field.name, f"Update the library: {sys.executable} -m pip install --upgrade gguf"
        ) from None
    shape = [int(size) for size in reversed(dimensions)]
    if len(shape) > MAX_DIMENSIONS or prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise CheckpointError(path, "its shape is impossible", field.name, AGAIN)
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    if (shape[-1] if shape else 1) % block:
        problem = (
            f"{quantization.name} with rows of {shape[-1] if shape else 1} values, which are no multiple of its {block}"
        )
        raise CheckpointError(path, problem, field.name, AGAIN)
    return int(offset[0]) + prod(shape) // block * size


def _texts(reader: Any) -> dict[str, str]:
    """Collect the fields of metadata that hold one text each."""
    texts = (
        (name, field) for name, field in reader.fields.items() if [kind.name for kind in field.types] == ["STRING"]
    )
    return {name: bytes(field.parts[-1]).decode(errors="replace") for name, field in texts}


def _refuse_others(path: Path, metadata: dict[str, str], reader: Any) -> None:
    gguf = library(path)
    if reader.byte_order != "I":
        raise CheckpointError(
            path, "a big-endian GGUF file", advice="Convert it with gguf_convert_endian.py of llama.cpp."
        )
    parts = reader.fields.get(gguf.Keys.Split.LLM_KV_SPLIT_COUNT)
    if parts is not None and int(parts.parts[-1][0]) > 1:
        raise CheckpointError(path, f"one of {int(parts.parts[-1][0])} parts of a split GGUF file", advice=_JOIN)
    architecture = metadata.get(ARCHITECTURE, "")
    if architecture in gguf.MODEL_ARCH_NAMES.values():
        problem = f"a language model or text encoder (architecture {architecture}), not a diffusion model"
        raise CheckpointError(path, problem, advice="Load it with CLIPLoader (GGUF) of ComfyUI-GGUF.")


def _shape(path: Path, reader: Any, tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor's weight, which GGML writes last dimension first,
    or notes where the tensor was reshaped."""
    field = reader.fields.get(SHAPE_KEY + tensor.name)
    if field is None:
        return tuple(int(size) for size in reversed(tensor.shape))
    shape = tuple(int(field.parts[index][0]) for index in field.data)
    if min(shape, default=1) < 0 or prod(shape) != tensor.n_elements:
        problem = f"of {tensor.n_elements} values, but its metadata says it was of shape {_text(shape)}"
        raise CheckpointError(path, problem, tensor.name, AGAIN)
    return shape


def _written_as_convolutions(metadata: dict[str, str], reader: Any) -> set[str]:
    """Find the linear layers of an SDXL that stable-diffusion.cpp wrote,
    with two dimensions of one more (ComfyUI-GGUF ``loader.py``)."""
    names = {tensor.name: tensor for tensor in reader.tensors}
    if ARCHITECTURE in metadata or not any(name.endswith("label_emb.0.0.weight") for name in names):
        return set()
    projections = (name for name in names if name.endswith((".proj_in.weight", ".proj_out.weight")))
    return {name for name in projections if all(int(size) == 1 for size in names[name].shape[:-2])}


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape[:8]))


def _entry(path: Path, tensor: Any, shape: tuple[int, ...]) -> tuple[Entry, Packed | None]:
    """Return where a tensor lies. GGUF's plain types have the names of those of safetensors; others are bytes."""
    kind, start = tensor.tensor_type.name, int(tensor.data_offset)
    end = start + int(tensor.n_bytes)
    if kind in TORCH_DTYPES:
        return Entry(path, kind, shape, start, end), None
    return Entry(path, "U8", (end - start,), start, end), Packed(kind, shape)


def _check_overlaps(path: Path, entries: dict[str, Entry]) -> None:
    position = 0
    for name, entry in entries.items():
        if entry.start < position:
            raise CheckpointError(path, f"overlaps another tensor (offset {entry.start})", name, AGAIN)
        position = entry.end
