"""fp8 codes of scaled 16-bit floats in host memory, by integer arithmetic on their bits: the codes that torch's cast gives.

The bits of a float order sign, exponent, mantissa, in fp8 as in bf16 and fp16. So a code is the upper bits, rounded half to
even, with another exponent bias; a scale of a power of two changes the bias alone. That holds from fp8's smallest normal
number up; codes below it are looked up in torch's own cast of all 65536 values. Against torch's multiplication and cast
this saves a pass, and OpenMP's barriers, at which every part of a tensor waits for the slowest thread of a busy CPU.
"""

import math
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..amax import bits_of, chunks, in_parallel

SOURCES = (torch.bfloat16, torch.float16)
TARGETS = (torch.float8_e4m3fn, torch.float8_e5m2)
CHUNK = 1 << 17
LANES = 8
SIGN = 0x8000


def can_cast(source: torch.Tensor, target: torch.dtype) -> bool:
    """Tell whether :func:`cast_scaled` takes a tensor and a dtype. Not to fnuz, which no weight is quantized to."""
    return source.dtype in SOURCES and target in TARGETS and source.device.type == "cpu"


def cast_scaled(source: torch.Tensor, target: torch.Tensor, exponent: int) -> None:
    """Write ``source * 2**exponent`` into ``target``, in one task for each of torch's threads.

    Args:
        source: bf16 or fp16 in host memory, finite.
        target: a contiguous tensor in one of ``TARGETS``, of as many elements, whose range holds every product.
    """
    cast = _cast(source.dtype, target.dtype, exponent)
    bits, codes = bits_of(source, "u"), bits_of(target, "u")

    def work(share: slice) -> None:
        for part in chunks(share, CHUNK):
            cast.run(bits[part], codes[part])

    in_parallel(work, bits.size)


@dataclass(frozen=True)
class _Cast:
    """A cast between two dtypes with a scale.

    Attributes:
        table: the code of each of the 65536 values.
        dropped: how many bits of the mantissa are rounded away, 4 to 8.
        offset: what rounds and changes the exponent's bias, added modulo 2**16 to bits of which 8 are below the code.
        smallest: twice the bits of the smallest magnitude whose code is a normal number.
    """

    table: np.ndarray
    dropped: int
    offset: np.uint16
    smallest: np.uint16

    def run(self, bits: np.ndarray, codes: np.ndarray) -> None:
        whole = bits.size // LANES * LANES
        np.take(self.table, bits[whole:], out=codes[whole:], mode="wrap")
        self._compute(bits[:whole], codes[:whole])
        self._look_up_small(bits[:whole], codes[:whole])

    def _compute(self, bits: np.ndarray, codes: np.ndarray) -> None:
        """Code of normal numbers: shift to 8 bits below the code, add the sign and the lowest bit kept, the offset; drop 8 bits."""
        result, other = (scratch[: bits.size] for scratch in _scratch())
        unit = 1 << (8 - self.dropped)
        np.multiply(bits, np.uint16(unit), out=result)
        if self.dropped > 4:
            bits = np.right_shift(bits.view(np.int16), 2 * self.dropped - 8, out=other.view(np.int16)).view(np.uint16)
        np.bitwise_and(bits, np.uint16(unit if unit == 1 else unit | SIGN), out=other)
        np.add(result, other, out=result)
        np.add(result, self.offset, out=result)
        np.copyto(codes, np.right_shift(result, np.uint16(8), out=result), casting="unsafe")

    def _look_up_small(self, bits: np.ndarray, codes: np.ndarray) -> None:
        """Look up the few columns of the chunk, seen as ``LANES`` rows, that hold a number below the normal ones; or all."""
        _, doubled = (scratch[: bits.size] for scratch in _scratch())
        lowest = np.add(bits, bits, out=doubled).reshape(LANES, -1).min(0)
        columns = np.flatnonzero(lowest < self.smallest)
        if columns.size > lowest.size // LANES:
            np.take(self.table, bits, out=codes, mode="wrap")
        elif columns.size:
            codes.reshape(LANES, -1)[:, columns] = self.table[bits.reshape(LANES, -1)[:, columns]]


@lru_cache(64)
def _cast(source: torch.dtype, target: torch.dtype, exponent: int) -> _Cast:
    (mantissa, bias), (kept, target_bias) = _layout(source), _layout(target)
    dropped, shift = mantissa - kept, bias - target_bias - exponent
    half = 0x80 - (1 << (8 - dropped))
    offset = np.uint16((half - (shift << (8 + kept))) % (1 << 16))
    return _Cast(_table(source, target, exponent), dropped, offset, np.uint16(max(shift + 1, 1) << (mantissa + 1)))


def _layout(dtype: torch.dtype) -> tuple[int, int]:
    """The bits of a dtype's mantissa and the bias of its exponent."""
    about = torch.finfo(dtype)
    return -int(math.log2(about.eps)), 1 - int(math.log2(about.smallest_normal))


def _table(source: torch.dtype, target: torch.dtype, exponent: int) -> np.ndarray:
    """Torch's cast of all 65536 values, scaled; the product is exact in fp32 wherever the code is not 0."""
    every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16)).view(source)
    return (every.float() * 2.0**exponent).to(target).view(torch.uint8).numpy()


_scratches = threading.local()


def _scratch() -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of ``CHUNK`` elements to compute in, the same each time in a thread."""
    if not hasattr(_scratches, "held"):
        _scratches.held = tuple(np.empty(CHUNK, np.uint16) for _ in range(2))
    return _scratches.held
