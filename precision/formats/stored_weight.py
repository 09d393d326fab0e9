"""A weight as a file stores it: data, scale and how far one scale reaches."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..base.amax import amax_value, host_amax
from ..base.dtypes import FP8_DTYPES, name_of
from .format import Encoded, Format

CHUNK = 1 << 20
EIGHT_BIT = FP8_DTYPES | {torch.int8}
NUMBERS = FP8_DTYPES | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
USUAL_BLOCKS = (128, 64, 32, 16, 256, 512, 1)


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a model. ``data * scale`` is the weight, unless ``encoding`` has its values.

    Attributes:
        name: full tensor name, ``blocks.0.ffn.0.weight``.
        scale: fp32 multiplier: 0-dim (``tensor``), ``(rows, 1)`` over ``data`` seen as that many rows (``row``), one
            entry per block of a 2-D weight (``block``), None (``none``).
        granularity: ``none``, ``tensor``, ``row`` or ``block``.
        input_scale: fp32 0-dim activation multiplier, if the file has one.
        full_precision: the file asks for ``full_precision_matrix_mult``.
        encoding: the weight in one of ComfyUI's formats that are more than fp8 data and a scale.
        file: the file that holds it, which of a sharded set is one of several.
    """

    name: str
    data: torch.Tensor
    scale: torch.Tensor | None = None
    granularity: str = "none"
    input_scale: torch.Tensor | None = None
    full_precision: bool = False
    encoding: Encoded | None = None
    file: str = ""

    @property
    def layer(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's own shape; ``data`` may hold two numbers in a byte."""
        return tuple(self.data.shape) if self.encoding is None else self.encoding.shape

    @property
    def storage(self) -> str:
        """The storage name: ``bf16``, ``fp8_e4m3fn``, ``int8``, ``nvfp4``."""
        return name_of(self.data.dtype) if self.encoding is None else self.format.storage

    @property
    def format(self) -> Format:
        """The quantization format of an encoded weight."""
        return self.encoding.format

    @property
    def quantized(self) -> bool:
        """Tell whether it is stored in 8 bits or fewer."""
        return self.encoding is not None or self.data.dtype in EIGHT_BIT

    @property
    def plain(self) -> bool:
        """Tell whether ``data`` are the weight's values."""
        return self.encoding is None and self.granularity == "none"

    @property
    def is_number(self) -> bool:
        """Tell whether the data are floating point numbers; e8m0, bare exponents, are none."""
        return self.data.dtype in NUMBERS

    @property
    def auxiliary(self) -> dict[str, torch.Tensor]:
        """What ComfyUI needs besides the data of an encoded weight, by full name."""
        if self.encoding is None:
            return {}
        tensors = {f"{self.layer}.{leaf}": tensor for leaf, tensor in self.encoding.tensors.items()}
        return tensors | {f"{self.layer}.comfy_quant": comfy_quant_tensor(self.encoding.settings)}

    def moved(self, device: torch.device | str) -> "StoredWeight":
        """Return the same weight on a device."""
        scale = None if self.scale is None else self.scale.to(device)
        encoding = None if self.encoding is None else self.encoding.moved(device)
        return replace(self, data=self.data.to(device), scale=scale, encoding=encoding)

    def parts(self, sample: int | None = None) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the weight in fp32, some rows at a time: slices of :meth:`matrix` and their values. Up to 4 MB each, of
        like size: a BLAS may sum the few rows of a small rest in another order. The rows of a 2-D weight stay whole.

        ``sample``: give at most twice so many parts, spread evenly over the weight.
        """
        rows, columns = self._matrix_shape
        count = -(-rows // max(1, CHUNK // max(columns, 1)))
        for i in range(0, count, max(1, count // sample) if sample else 1):
            part = slice(rows * i // count, rows * (i + 1) // count)
            yield part, self.rows(part)

    def rows(self, rows: slice) -> torch.Tensor:
        """Return some rows of :meth:`matrix`, in fp32."""
        if self.encoding is not None:
            return self.encoding.rows(rows)
        part, scale = self.matrix(self.data)[rows].float(), self.scale
        if scale is None:
            return part
        if self.granularity == "row":
            scale = scale[rows]
        elif self.granularity == "block":
            down, across = block_sizes(self.data.shape, scale.shape)
            scale = scale[torch.arange(rows.start, rows.stop) // down]
            scale = scale.repeat_interleave(across, 1)[:, : part.shape[1]]
        return part * scale if self.data.dtype == torch.float32 else part.mul_(scale)

    @cached_property
    def data_amax(self) -> float:
        """The largest magnitude in the data; of whole numbers, the largest that they may have."""
        if not self.is_number:
            return 0.0 if self.scale is None else float(torch.iinfo(self.data.dtype).max + 1)
        return host_amax(self.data) if self.data.device.type == "cpu" else amax_value(self.data)

    def bound(self) -> float:
        """Return an upper bound on ``|weight|``. Tight where there is one scale."""
        if self.encoding is not None:
            return self.encoding.bound()
        return self.data_amax if self.scale is None else self.data_amax * self.scale.max().item()

    @cached_property
    def amax(self) -> float:
        """The largest magnitude of the weight; reads all values."""
        return max(part.abs().max().item() for _, part in self.parts())

    def exceeds(self, limit: float) -> bool:
        """Tell whether a value of the weight exceeds ``limit``; reads the weight where its bound leaves that open."""
        bound = self.bound()
        if bound <= limit or (self.encoding is None and self.granularity in ("none", "tensor")):
            return bound > limit
        return any(part.abs().max() > limit for _, part in self.parts())

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor of the weight's shape as the 2-D view that :meth:`parts` slices."""
        return tensor.reshape(self._matrix_shape)

    @property
    def _matrix_shape(self) -> tuple[int, int]:
        count = math.prod(self.shape)
        columns = self.shape[-1] if self.shape and count else 1
        rows = self.scale.shape[0] if self.granularity == "row" else count // columns
        return rows, count // rows if rows else 1

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the weight to ``dtype``; beyond the result this takes 16 MB.
        Unscaled data of that dtype is not copied."""
        if self.plain:
            same = self.data.dtype == dtype
            return self.data if same else torch.empty(self.shape, dtype=dtype, device=self.data.device).copy_(self.data)
        result = torch.empty(self.shape, dtype=dtype)
        target = self.matrix(result)
        for rows, part in self.parts():
            target[rows] = part
        return result


def granularity_of(scale: torch.Tensor, shape: Sequence[int]) -> str | None:
    """Say how far one entry of ``scale`` reaches over a weight of ``shape``; None where they do not fit.

    ``row``: the scale's shape is the beginning of the weight's, with ones after it:
    ``(N,)``, ``(N, 1)``, ``(E, N, 1)``.
    """
    if scale.numel() == 1:
        return "tensor"
    leading = list(scale.shape)
    while leading[-1] == 1:
        leading.pop()
    if leading == list(shape[: len(leading)]):
        return "row"
    if scale.dim() == len(shape) == 2 and block_sizes(shape, scale.shape):
        return "block"
    return None


def block_sizes(shape: Sequence[int], counts: Sequence[int]) -> tuple[int, int] | None:
    """Return the lengths of blocks that cut a 2-D weight into ``counts`` of them, the last possibly short: square where
    a usual length fits both ways (DeepSeek, Qwen and vLLM use 128); None where none fit."""
    down, across = (
        [block for block in (*USUAL_BLOCKS, max(size, 1)) if -(-size // block) == count]
        for size, count in zip(shape, counts, strict=True)
    )
    if not down or not across:
        return None
    square = next((block for block in down if block in across), None)
    return (square, square) if square else (down[0], across[0])


def comfy_quant_tensor(settings: dict) -> torch.Tensor:
    """Make ComfyUI's ``<layer>.comfy_quant``: JSON as uint8."""
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
