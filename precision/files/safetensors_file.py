"""Safetensors files: reading one file or a sharded set, and atomic streamed writing.

The ``safetensors`` library checks headers. Its ``save_file`` needs all tensors in memory at once.
"""

import mmap
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from ..base.errors import CheckpointError
from .atomic_write import os_errors_as, replacing, require_space
from .safetensors_header import AGAIN, MAX_HEADER, Entry, TensorSpec, header_bytes, layout, read_header, read_object
from .tensor_file import TensorFile, map_pages, open_regular

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.(?i:safetensors|sft))")


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
    endings = dict.fromkeys((shard["suffix"], shard["suffix"].lower()))
    indexes = [path.with_name(f"{shard['stem']}{ending}.index.json") for ending in endings]
    index = next(filter(os.path.isfile, indexes), None)
    return _open_siblings(path, shard) if index is None else _open_index(index, path.name)


def _set_of(shard: re.Match) -> list[str]:
    """List the names of all parts of the set that a part's name belongs to."""
    numbers = range(1, int(shard["count"]) + 1)
    return [f"{shard['stem']}-{number:05d}-of-{shard['count']}{shard['suffix']}" for number in numbers]


def _open_siblings(path: Path, shard: re.Match) -> TensorFile:
    files = [path.with_name(name) for name in _set_of(shard)]
    missing = next((file.name for file in files if not os.path.isfile(file)), None)
    if missing is not None:
        raise CheckpointError(path, f"part of a set whose file {missing} is missing", advice="Download all parts.")
    return _open_files(path, files)


def _open_index(path: Path, part: str = "") -> TensorFile:
    """Open the set of an index; ``part`` is the name of the file that was asked for, if it was one of its parts."""
    with open_regular(path) as file, os_errors_as(path, "read"):
        if os.fstat(file.fileno()).st_size > MAX_HEADER:
            raise CheckpointError(path, "an index of more than 100 MB", advice=AGAIN)
        text = file.read()
    try:
        index = read_object(text)
    except ValueError as error:
        raise CheckpointError(path, f"its text is {error}", advice=AGAIN) from None
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(path, "an index without a 'weight_map'", advice=AGAIN)
    for name, shard in shards.items():
        _check_shard(path, name, shard)
    _require_all_parts(path, {*shards.values(), *filter(None, [part])}, set(shards.values()))
    whole = _open_files(path, [path.with_name(shard) for shard in dict.fromkeys(shards.values())])
    missing = next((name for name in shards if name not in whole.entries), None)
    if missing is not None:
        raise CheckpointError(
            path, f"not in {shards[missing]}, where the index places it", missing, "Download it again."
        )
    return whole


def _require_all_parts(path: Path, names: set[str], named: set[str]) -> None:
    sets = {(shard["stem"], shard["count"]): shard for shard in map(_SHARD.fullmatch, names) if shard}
    missing = next((name for shard in sets.values() for name in _set_of(shard) if name not in named), None)
    if missing is not None:
        advice = "Download the index again, or delete it: without one the parts are found by their numbers."
        raise CheckpointError(path, f"leaves out {missing}, a part of its set", advice=advice)


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
    with open_regular(path) as file, os_errors_as(path, "read"):
        metadata, entries = read_header(path, file, os.fstat(file.fileno()).st_size)
        maps[path] = map_pages(path, file)
    return metadata, entries


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
        CheckpointError: the disk is too small or full, the folder cannot be written to, or there is a file to be left.
        ValueError: ``tensors`` are not those that ``specs`` announce.
    """
    path = _real_path(path)
    places = layout(specs)
    header = header_bytes(places, metadata)
    with os_errors_as(path, "written"):
        require_space(path, len(header) + sum(spec.bytes for spec in specs))
    with replacing(path, overwrite) as file:
        with os_errors_as(path, "written"):
            file.write(header)
        _write_all(path, file, len(header), places, tensors)


def _real_path(path: str | os.PathLike) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be written ({error})", advice="Check the path.") from None


def _write_all(path: Path, file: BinaryIO, base: int, places: dict, tensors: Iterable) -> None:
    waiting = dict(places)
    for name, tensor in tensors:
        spec, start = waiting.pop(name, (None, 0))
        if spec != TensorSpec(name, tensor.dtype, tuple(tensor.shape)):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced was {spec}")
        with os_errors_as(path, "written"):
            _write_tensor(file, base + start, tensor)
        del tensor  # before the next one is made
    if waiting:
        raise ValueError(f"{next(iter(waiting))} was announced and not written")


def _write_tensor(file: BinaryIO, position: int, tensor: torch.Tensor) -> None:
    file.seek(position)
    file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
