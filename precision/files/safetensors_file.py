"""Safetensors files: reading one file or a sharded set, and atomic streamed writing.

The ``safetensors`` library checks headers. Its ``save_file`` needs all tensors in memory at once.
"""

import json
import mmap
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from ..base.errors import CheckpointError
from ..base.message import Message
from .atomic_write import os_errors_as, replacing, require_space
from .safetensors_header import (
    AGAIN,
    MAX_HEADER,
    QUANTIZATION_KEY,
    Entry,
    TensorSpec,
    contradiction,
    header_bytes,
    layout,
    read_header,
    read_object,
)
from .tensor_file import TensorFile, open_regular

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.(?i:safetensors|sft))")


def open_checkpoint(path: str | os.PathLike) -> TensorFile:
    """Open a safetensors file, the index of a sharded set, or the whole set that a shard belongs to.

    Raises:
        CheckpointError: the file is missing, damaged, truncated, of another kind, or one of its shards is.

    Example:
        >>> from halfsafe.precision.files.safetensors_file import open_checkpoint
        >>> file = open_checkpoint("model.safetensors")
        >>> len(file), file["img_in.proj.weight"].dtype
        (100, torch.float16)
    """
    path = Path(path)
    shards = _index(path) if path.name.endswith(".index.json") else {}
    files = dict.fromkeys(path.with_name(part) for name in shards.values() or [path.name] for part in _set_of(name))
    missing = next((file.name for file in files if not os.path.isfile(file)), None)
    if missing is not None and (shards or len(files) > 1):
        problem = Message("one file of the set is missing: {0}", missing[:200])
        raise CheckpointError(path, problem, advice="Download all parts.")
    whole = _open_files(path, list(files))
    missing = next((name for name in shards if name not in whole.entries), None)
    if missing is not None:
        problem = Message("not in {0}, where the index lists it", shards[missing])
        raise CheckpointError(path, problem, missing, "Download it again.")
    return whole


def _set_of(name: str) -> list[str]:
    """List the names of all parts of the set that a file's name belongs to, by their numbers; else the name alone."""
    shard = _SHARD.fullmatch(name)
    if shard is None or int(shard["count"]) <= 1:
        return [name]
    numbers = range(1, int(shard["count"]) + 1)
    return [f"{shard['stem']}-{number:05d}-of-{shard['count']}{shard['suffix']}" for number in numbers]


def _index(path: Path) -> dict[str, str]:
    """Read the names of tensors, and of the files beside the index that hold them."""
    with open_regular(path) as file, os_errors_as(path, "read"):
        text = file.read(MAX_HEADER)
    try:
        shards = read_object(text).get("weight_map")
    except ValueError as error:
        raise CheckpointError(path, Message("its text is {0}", error), advice=AGAIN) from None
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(path, "an index without a 'weight_map'", advice=AGAIN)
    for name, shard in shards.items():
        if not isinstance(shard, str) or not shard or shard in (".", "..") or re.search(r"[\\/:\0]", shard):
            problem = Message("its file {0} is not a plain file name", f"{shard!r}")
            raise CheckpointError(path, problem, name, "Do not use this index.")
    return shards


def _open_files(path: Path, files: list[Path]) -> TensorFile:
    metadata: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    maps = {}
    for file in files:
        with open_regular(file) as opened, os_errors_as(file, "read"):
            own, part = read_header(file, opened, os.fstat(opened.fileno()).st_size)
            maps[file] = _map_pages(file, opened)
        if QUANTIZATION_KEY in own and QUANTIZATION_KEY in metadata:
            metadata[QUANTIZATION_KEY] = _joined_tables(file, metadata[QUANTIZATION_KEY], own[QUANTIZATION_KEY])
        metadata = own | metadata
        twice = next((name for name in part if name in entries), None)
        if twice is not None:
            problem = Message("also in {0}", entries[twice].file.name)
            raise CheckpointError(file, problem, twice, "Download the set again.")
        entries |= part
    return TensorFile(path, metadata, entries, maps)


def _map_pages(path: Path, file: BinaryIO) -> mmap.mmap:
    """Map an open file; what is written to the pages never reaches it.

    Raises:
        CheckpointError: the system refuses.
    """
    try:
        if sys.platform == "linux":
            # Private and writable counts against the commit limit unless it reserves nothing.
            return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(path, Message("cannot be mapped into memory ({0})", error.strerror)) from error


def _joined_tables(file: Path, before: str, own: str) -> str:
    """Join the table of quantized layers of a shard with that of the shards before it.

    Raises:
        CheckpointError: the two contradict each other.
    """
    if before == own:
        return before
    try:
        whole, table = read_object(before), read_object(own)
        layers = whole["layers"]
        for layer, settings in table["layers"].items():
            known = layers.setdefault(layer, {})
            if key := contradiction(known, settings):
                said = json.dumps(known[key]), json.dumps(settings[key])
                problem = Message("{0} of layer {1} is {2} in another file of the set, here {3}", key, layer, *said)
                raise CheckpointError(file, problem, QUANTIZATION_KEY, "Download all files of one version of the set.")
            layers[layer] = known | settings
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(file, Message("its {0} holds no table of layers", QUANTIZATION_KEY)) from None
    return json.dumps(whole)


def write_safetensors(
    path: str | os.PathLike,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: dict[str, str],
    overwrite: bool = True,
) -> None:
    """Write the announced tensors, a single tensor in memory at a time. ``tensors`` may come in any order.

    Wide dtypes lie first, as safetensors' own writer lays them. Until everything is on the disk an existing file stays
    as it is, and no new one appears under this name. ``overwrite=False`` leaves a file of that name as it is.

    Raises:
        CheckpointError: the disk is too small or full, the folder cannot be written to, or a file is to be left.
        ValueError: ``tensors`` are not those that ``specs`` announce.

    Example:
        >>> from halfsafe.precision.files.safetensors_file import write_safetensors
        >>> from halfsafe.precision.files.safetensors_header import TensorSpec
        >>> weight = torch.ones(2, 3)
        >>> specs = [TensorSpec("a.weight", weight.dtype, (2, 3))]
        >>> write_safetensors("a.safetensors", specs, [("a.weight", weight)], metadata={})
    """
    path = Path(os.path.realpath(path))
    waiting = layout(specs)
    header = header_bytes(waiting, metadata)
    with os_errors_as(path, "written"):
        require_space(path, len(header) + sum(spec.bytes for spec in specs))
        with replacing(path, overwrite) as file:
            file.write(header)
            for name, tensor in tensors:
                spec, start = waiting.pop(name, (None, 0))
                if spec != TensorSpec(name, tensor.dtype, tuple(tensor.shape)):
                    raise ValueError(
                        Message("{0} is {1} {2}, announced was {3}", name, tensor.dtype, tuple(tensor.shape), spec)
                    )
                _write_tensor(file, len(header) + start, tensor)
                del tensor  # before the next one is made
            if waiting:
                raise ValueError(Message("{0} was announced and not written", next(iter(waiting))))


def _write_tensor(file: BinaryIO, position: int, tensor: torch.Tensor) -> None:
    file.seek(position)
    file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
