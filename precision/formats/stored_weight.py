"""A weight as a file stores it: data, scale and how far one scale reaches."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..dtypes import FP8_DTYPES
from ..errors import HalfsafeError

CHUNK = 1 << 20
EIGHT_BIT = FP8_DTYPES | {torch.int8}
NUMBERS = FP8_DTYPES | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
USUAL_BLOCK = 128


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a model. ``data * scale`` is the weight, unless ``granularity`` is ``native``.

    Attributes:
        name: full tensor name, ``blocks.0.ffn.0.weight``.
        scale: fp32 multiplier: 0-dim (``tensor``), ``(rows, 1)`` over ``data`` seen as that many rows (``row``), one
            entry per block of a 2-D weight (``block``), None (``none``, ``native``).
        granularity: ``none``, ``tensor``, ``row``, ``block``, or ``native``: a format that ComfyUI itself unpacks.
        input_scale: fp32 0-dim activation multiplier, if the file has one.
        full_precision: the file asks for ``full_precision_matrix_mult``.
        companions: native: the tensors that belong to it, by full name.
    """

    name: str
    data: torch.Tensor
    scale: torch.Tensor | None = None
    granularity: str = "none"
    input_scale: torch.Tensor | None = None
    full_precision: bool = False
    companions: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def eight_bit(self) -> bool:
        return self.data.dtype in EIGHT_BIT

    @property
    def is_number(self) -> bool:
        """Whether the data are floating point numbers; e8m0, bare exponents, are none."""
        return self.data.dtype in NUMBERS

    def parts(self, sample: int | None = None) -> Iterator[tuple[slice, torch.Tensor]]:
        """The weight in fp32, some rows at a time: slices of :meth:`matrix` and their values. 4 MB each.

        ``sample``: give at most twice so many parts, spread evenly over the weight.

        Raises:
            HalfsafeError: the format is one that only ComfyUI unpacks.
        """
        if self.granularity == "native":
            raise HalfsafeError(f"'{self.name}' is in a format that only ComfyUI's own kernels unpack.")
        matrix = self.matrix(self.data)
        rows, columns = matrix.shape
        step = max(1, CHUNK // max(columns, 1))
        skip = max(1, rows // (step * sample)) if sample else 1
        for start in range(0, rows, step * skip):
            part = slice(start, min(start + step, rows))
            yield part, self._times_scale(matrix[part].float(), part)

    def bound(self, largest: float) -> float:
        """What no value of the weight passes, for data up to ``largest`` in magnitude; reached unless there are many scales."""
        return largest if self.scale is None else largest * self.scale.max().item()

    def passes(self, limit: float, bound: float) -> bool:
        """Whether a value passes ``limit``, for a :meth:`bound`; reads the weight only where that leaves it open."""
        if bound <= limit or self.granularity in ("none", "tensor"):
            return bound > limit
        return any(part.abs().max() > limit for _, part in self.parts())

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the weight's shape as the 2-D view that :meth:`parts` slices."""
        if tensor.numel() == 0:
            return tensor.reshape(0, 1)
        if self.granularity == "row":
            return tensor.reshape(self.scale.shape[0], -1)
        if self.granularity == "block":
            return tensor
        return tensor.reshape(-1, 1)

    def _times_scale(self, part: torch.Tensor, rows: slice) -> torch.Tensor:
        if self.granularity == "none":
            return part
        scale = self.scale
        if self.granularity == "row":
            scale = scale[rows]
        elif self.granularity == "block":
            down, across = map(block_size, self.data.shape, scale.shape)
            scale = scale[torch.arange(rows.start, rows.stop) // down]
            scale = scale.repeat_interleave(across, 1)[:, : part.shape[1]]
        return part * scale if self.data.dtype == torch.float32 else part.mul_(scale)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``; beyond the result this takes 16 MB. Unscaled data of that dtype is not copied.

        Raises:
            HalfsafeError: the format is one that only ComfyUI unpacks.
        """
        if self.granularity == "none":
            return self.data.to(dtype)
        result = torch.empty(self.data.shape, dtype=dtype)
        target = self.matrix(result)
        for rows, part in self.parts():
            target[rows] = part
        return result


def granularity_of(scale: torch.Tensor, shape: Sequence[int]) -> str | None:
    """How far one entry of ``scale`` reaches over a weight of ``shape``; None where they do not fit.

    ``row``: the scale's shape is the beginning of the weight's, with ones after it: ``(N,)``, ``(N, 1)``, ``(E, N, 1)``.
    """
    if scale.numel() == 1:
        return "tensor"
    leading = list(scale.shape)
    while leading[-1] == 1:
        leading.pop()
    if leading == list(shape[: len(leading)]):
        return "row"
    if scale.dim() == len(shape) == 2 and all(map(block_size, shape, scale.shape)):
        return "block"
    return None


def block_size(size: int, count: int) -> int | None:
    """The block length that cuts ``size`` into ``count`` blocks, the last possibly short; None where there is none.

    128 where that fits (DeepSeek, Qwen, vLLM), else the exact divisor, else the next power of two.
    """
    if not 0 < count <= size:
        return None
    if count == 1:
        return size
    power = 1 << math.ceil(math.log2(size / count))
    candidates = [USUAL_BLOCK, *([size // count] if size % count == 0 else []), power]
    return next((block for block in candidates if math.ceil(size / block) == count), None)
