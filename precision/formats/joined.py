"""Weights made of the rows of others, as ComfyUI fuses the q, k and v of a model with diffusers'
names."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from .plain import EIGHT_BIT
from .stored_weight import FULL_PRECISION, StoredWeight, Tensors

FUSED = (
    "Unpacked to bf16, because ComfyUI fuses or reorders these quantized weights, and their format cannot hold the "
    "result exactly: {0}."
)


class RowsOf(NamedTuple):
    """The tensors whose rows make another tensor.

    ``order``: the row of ``names``, counted through, that each row of it is; None for all as they
    follow."""

    names: Sequence[str]
    order: torch.Tensor | None = None


class JoinedWeights(Mapping[str, StoredWeight]):
    """The weights of a file under other names, each joined of its parts at each access.

    ``unpacked``: the names of the weights made so far whose parts were unpacked to bf16.
    """

    def __init__(self, weights: Mapping[str, StoredWeight], origins: Mapping[str, RowsOf]):
        self._weights = weights
        self.origins = origins
        self.unpacked = dict[str, None]()

    def parts(self, name: str) -> list[StoredWeight]:
        """Return the weights of the file that a weight is joined from."""
        return [self._weights[source] for source in self.origins[name].names]

    def __getitem__(self, name: str) -> StoredWeight:
        parts = self.parts(name)
        order = self.origins[name].order
        made = joined_rows(name, parts, order)
        if made is None:
            self.unpacked[name] = None
            made = _joined_rows_in_16_bit(name, parts, order)
        return made

    def __contains__(self, name: object) -> bool:
        return name in self.origins

    def outline(self) -> dict[str, StoredWeight]:
        """Return the weights without data: names, shapes, and the dtype of the first part."""
        made = {}
        for name in self.origins:
            parts = self.parts(name)
            rows = sum(part.shape[0] for part in parts) if parts[0].shape else 0
            shape = (rows, *parts[0].shape[1:]) if parts[0].shape else ()
            made[name] = StoredWeight(name, torch.empty(shape, dtype=parts[0].data.dtype, device="meta"))
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.origins)

    def __len__(self) -> int:
        return len(self.origins)


def joined_rows(name: str, parts: Sequence[StoredWeight], order: torch.Tensor | None = None) -> StoredWeight | None:
    """Join weights by rows in the storage that they have; None where their storage does not hold
    the result exactly.

    int8 with a scale for each row and 4- and 6-bit codes keep their rows' scales; fp8 and nvfp4
    have one scale, which must be the same in all parts; scales of blocks lie in tiles of rows,
    which must be whole.

    Args:
        name: of the result.
        parts: of the same number of columns.
        order: the row of ``parts``, counted through, that each row of the result is; None for all as they follow.
    """
    first = parts[0]
    if len(parts) == 1 and order is None:
        return replace(first, name=name)
    dtypes = {part.data.dtype for part in parts}
    if all(part.plain for part in parts):
        mixed = len(dtypes) > 1 and not dtypes.isdisjoint(EIGHT_BIT)
        return None if mixed else StoredWeight(name, _rows([part.data for part in parts], order), file=first.file)
    if len(dtypes) > 1 or any(part.format != first.format for part in parts):
        return None
    made = _in_format(parts, order) if first.format.joins else None
    if made is None:
        return None
    full = any(part.full_precision for part in parts)
    settings = {key: value for key, value in first.settings.items() if key != FULL_PRECISION}
    return replace(made, name=name, settings=settings | ({FULL_PRECISION: True} if full else {}))


def _joined_rows_in_16_bit(name: str, parts: Sequence[StoredWeight], order: torch.Tensor | None = None) -> StoredWeight:
    """Join weights by rows as :func:`joined_rows`, quantized ones unpacked to bf16 first."""
    plain = [part.data if part.plain and not part.quantized else part.dequantize(torch.bfloat16) for part in parts]
    return StoredWeight(name, _rows(plain, order), file=parts[0].file)


def _rows(tensors: Iterable[torch.Tensor], order: torch.Tensor | None) -> torch.Tensor:
    """Join tensors by rows. Those of a byte are joined as bytes: torch lacks operations on fp8."""
    tensors = list(tensors)
    dtype = tensors[0].dtype
    as_bytes = dtype.itemsize == 1
    rows = torch.cat([tensor.contiguous().view(torch.uint8) if as_bytes else tensor for tensor in tensors])
    rows = rows if order is None else rows[order]
    return rows.view(dtype) if as_bytes else rows


def _in_format(parts: Sequence[StoredWeight], order: torch.Tensor | None) -> StoredWeight | None:
    first = parts[0]
    format = first.format
    own = ("format", FULL_PRECISION)
    settings = [{key: value for key, value in part.settings.items() if key not in own} for part in parts]
    tiled = format.aligned > 1 and (order is not None or any(part.shape[0] % format.aligned for part in parts))
    if tiled or any(each != settings[0] for each in settings) or any(part.experts for part in parts):
        return None
    tensors: Tensors = {}
    for leaf in first.tensors.keys() | {leaf for part in parts for leaf in part.tensors}:
        found = [part.tensors.get(leaf) for part in parts]
        if leaf in format.by_row:
            tensors[leaf] = _rows([_by_row(part, leaf) for part in parts], order)
        elif _are_same(found):
            tensors[leaf] = first.tensors[leaf]
        elif leaf != "input_scale":  # without it the scale of each input is found as it comes
            return None
    outputs = [part.outputs for part in parts]
    inputs = [part.input_scale for part in parts]
    made = replace(
        first,
        data=_rows([part.data for part in parts], order),
        tensors=tensors,
        input_scale=inputs[0] if _are_same(inputs) else None,
        outputs=None if None in outputs else sum(map(int, outputs)),
    )
    try:
        made.check()
    except ValueError:  # a tensor that has the rows elsewhere
        return None
    return made


def _by_row(part: StoredWeight, leaf: str) -> torch.Tensor:
    """Return a tensor that has a row for each row of the weight, or for all of them one."""
    tensor = part.tensors[leaf]
    rows = part.shape[0]
    return tensor.reshape(1, 1).expand(rows, 1) if tensor.numel() == 1 else tensor.reshape(rows, *tensor.shape[1:])


def _are_same(tensors: Sequence[torch.Tensor | None]) -> bool:
    first = tensors[0]
    if first is None or any(tensor is None for tensor in tensors):
        return all(tensor is None for tensor in tensors)
    return all(tensor.shape == first.shape and torch.equal(tensor.float(), first.float()) for tensor in tensors[1:])
