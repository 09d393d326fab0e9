"""Weights of GGUF files: the values that the library ``gguf`` unpacks, some rows at a time.

No ComfyUI holds them as they are: they are unpacked to 16 bit, or quantized anew.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType

import torch

from ..amax import host_amax

AT_ONCE = 1 << 17
"""Values that one call of the library unpacks: it goes over them many times,
so that they should stay in the processor's cache."""

LARGEST_FACTOR = 4096
"""No type multiplies one of its fp16 numbers by more: Q6_K does by an 8-bit scale and a 6-bit number, 128 * 32."""


@dataclass(frozen=True)
class GgufWeight:
    """A weight of ``shape`` in blocks of one of GGML's types.

    Attributes:
        type: the library's name of the type: ``Q4_K``.
        data: the bytes of all blocks, in the order of the values; a block may reach over the weight's rows.

    Raises:
        ValueError: when made: the bytes do not fit the shape, or the library does not unpack the type.
    """

    type: str
    shape: tuple[int, ...]
    data: torch.Tensor

    def __post_init__(self):
        block, size = _block(self.type)
        if math.prod(self.shape) * size != self.data.numel() * block:
            raise ValueError(f"{self.data.numel()} bytes for a weight of shape {self.shape}")
        if not _is_unpacked(self.type):
            raise ValueError(f"gguf {version('gguf')} does not unpack this type")

    def rows(self, part: slice) -> torch.Tensor:
        """Return some rows of the weight, seen as a matrix of its last dimension, in fp32."""
        columns = self.shape[-1] if self.shape else 1
        return self._values(part.start * columns, part.stop * columns).view(-1, columns)

    def bound(self) -> float:
        """Return an upper bound on the magnitude of the weight, hundreds of times too large for most types;
        NaN or Inf if it holds one."""
        return self._bound

    @functools.cached_property
    def _bound(self) -> float:
        scales = scale_offsets(self.type)
        if not scales:
            return max((host_amax(self._values(*run)) for run in _runs(0, math.prod(self.shape))), default=0.0)
        blocks = self.data.view(-1, _block(self.type)[1])
        return LARGEST_FACTOR * sum(host_amax(blocks[:, at : at + 2].contiguous().view(torch.float16)) for at in scales)

    def _values(self, first: int, last: int) -> torch.Tensor:
        block = _block(self.type)[0]
        begin = first // block
        result = torch.empty((-(-last // block) - begin) * block)
        for start, end in _runs(begin * block, begin * block + len(result)):
            result[start - begin * block : end - begin * block] = self._unpacked(start // block, end // block)
        return result[first - begin * block : last - begin * block]

    def _unpacked(self, first: int, last: int) -> torch.Tensor:
        size = _block(self.type)[1]
        return _unpack(self.data[first * size : last * size], self.type)


def _runs(first: int, last: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + AT_ONCE, last)) for start in range(first, last, AT_ONCE))


def _gguf() -> ModuleType:
    import gguf

    return gguf


def _block(kind: str) -> tuple[int, int]:
    """Count the values and the bytes of a block."""
    gguf = _gguf()
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def _unpack(data: torch.Tensor, kind: str) -> torch.Tensor:
    """Unpack blocks, given to the library as one row: it goes through 16 rows at a time,
    and would through 16 blocks."""
    import numpy as np

    gguf = _gguf()
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data.numpy().reshape(1, -1), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values.reshape(-1))


@functools.cache
def _is_unpacked(kind: str) -> bool:
    """Tell whether the library can unpack a type; it knows some by name and size alone."""
    try:
        _unpack(_zeros(kind), kind)
    except NotImplementedError:
        return False
    return True


@functools.cache
def scale_offsets(kind: str) -> tuple[int, ...]:
    """Find where a block of a type has fp16 numbers: a NaN there makes values NaN.
    Empty where its scales are no fp16 numbers."""
    return tuple(at for at in range(_block(kind)[1] - 1) if _unpack(_with_nan(kind, at), kind).isnan().any())


def _zeros(kind: str) -> torch.Tensor:
    return torch.zeros(_block(kind)[1], dtype=torch.uint8)


def _with_nan(kind: str, at: int) -> torch.Tensor:
    block = _zeros(kind)
    block[at : at + 2] = torch.tensor([math.nan], dtype=torch.float16).view(torch.uint8)
    return block
