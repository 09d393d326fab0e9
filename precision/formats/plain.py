"""Numbers as torch has them, alone or with scales: a weight that no format of ComfyUI describes as
it is.

``PLAIN`` is data that are the values. ``ONE_SCALE``, ``ROW_SCALES`` and ``BLOCK_SCALES`` are fp8
and int8 data of other tools, and 16-bit data with a ``scale_weight``: ``weight_scale`` multiplies
them. ComfyUI reads one scale of fp8 (as ``Fp8``, in which they are written); more are unpacked or
rounded again."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..base.amax import amax_value
from ..base.dtypes import FP8_DTYPES, QUANTIZED_NAMES, name_of
from ..base.message import Message
from ..base.modes import FP8, Mode
from .format import Format

if TYPE_CHECKING:
    from .stored_weight import StoredWeight

EIGHT_BIT = FP8_DTYPES | {torch.int8}
NUMBERS = FP8_DTYPES | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
OF_FNUZ = {"fp8_e4m3fnuz": "fp8_e4m3fn", "fp8_e5m2fnuz": "fp8_e5m2"}
USUAL_BLOCKS = (128, 64, 32, 16, 256, 512, 1)
DROPPED = "the scale is dropped: the weight is wrong by that factor and the image is noise"
AS_E4M3 = "read as e4m3fn: values above 448 become NaN and the image is black"
MANY_SCALES = "a scale per row or block is not supported"
NO_FNUZ = "fnuz weights are not supported"
CLIPPED = "no input scale: where the GPU multiplies in fp8, activations are clipped at 448"
MISREADINGS = (DROPPED, AS_E4M3, MANY_SCALES, NO_FNUZ, CLIPPED)
"""How ComfyUI's own loader misreads numbers and scales, in the order in which they are told."""


class _Plain(Format):
    """Data that are the values."""

    plain = True
    writes = True
    needs: tuple[str, ...] = ()
    dtypes = (*NUMBERS, torch.int8)
    counted_as = ""
    scaling = ""

    def storage_of(self, weight: StoredWeight) -> str:
        return name_of(weight.data.dtype)

    def is_quantized(self, weight: StoredWeight) -> bool:
        return weight.data.dtype in EIGHT_BIT

    def has_values(self, weight: StoredWeight) -> bool:
        return weight.data.dtype in NUMBERS

    def is_held_by(self, storages: Container[str]) -> bool:
        return True

    def is_cast(self, weight: StoredWeight) -> bool:
        return not weight.quantized

    def is_only_linear(self, weight: StoredWeight) -> bool:
        return weight.data.dtype in FP8_DTYPES

    def as_loaded(self, weight: StoredWeight) -> str:
        own = name_of(weight.data.dtype)
        return OF_FNUZ.get(own, "bf16" if own == "int8" else own)

    def lies_in(self, weight: StoredWeight, storage: str) -> bool:
        return storage == weight.storage and storage not in QUANTIZED_NAMES

    def shape(self, weight: StoredWeight) -> tuple[int, ...]:
        return tuple(weight.data.shape)

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        return weight.matrix(weight.data)[part].float()

    def one_scale(self, weight: StoredWeight) -> torch.Tensor | None:
        return torch.tensor(1.0)

    def is_rounded_again(self, weight: StoredWeight) -> bool:
        return super().is_rounded_again(weight) or weight.data.dtype == torch.int8

    def bound(self, weight: StoredWeight) -> float:
        return amax_value(weight.data) if weight.data.dtype in NUMBERS else 0.0

    def largest_of(self, weight: StoredWeight, bound: float) -> float:
        return bound

    def auxiliary(self, weight: StoredWeight) -> dict[str, torch.Tensor]:
        return {}

    def layout(self, weight: StoredWeight) -> str:
        return ""

    def misread(self, weight: StoredWeight, declared: bool, marked: bool) -> Iterator[str]:
        if "fnuz" in weight.storage:
            yield NO_FNUZ


class Scaled(_Plain):
    """Data times ``weight_scale``, fp32."""

    plain = False
    needs = ("weight_scale",)

    def multiplies_in(self, weight: StoredWeight) -> Mode | None:
        return FP8 if weight.data.dtype in FP8_DTYPES and not weight.experts else None

    def is_cast(self, weight: StoredWeight) -> bool:
        return False

    def has_values(self, weight: StoredWeight) -> bool:
        return True

    def lies_in(self, weight: StoredWeight, storage: str) -> bool:
        return False

    def check(self, weight: StoredWeight) -> None:
        """Accept any tensors: the format was chosen by the shape of the scale
        (:func:`scaled_format`)."""

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        data = weight.matrix(weight.data)[part].float()
        scale = self.scale_of(weight, part, data.shape[1])
        return data * scale if weight.data.dtype == torch.float32 else data.mul_(scale)

    def scale_of(self, weight: StoredWeight, part: slice, columns: int) -> torch.Tensor:
        """Return the scale of some rows of the data, in a shape that broadcasts over them."""
        return weight.tensors["weight_scale"]

    def one_scale(self, weight: StoredWeight) -> torch.Tensor | None:
        return None

    def has_many_scales(self, weight: StoredWeight) -> bool:
        return weight.data.dtype in FP8_DTYPES

    def scales_text(self, weight: StoredWeight) -> str:
        return str(weight.tensors["weight_scale"].numel())

    def bound(self, weight: StoredWeight) -> float:
        data = weight.data
        largest = amax_value(data) if weight.is_number else float(torch.iinfo(data.dtype).max + 1)
        return largest * weight.tensors["weight_scale"].max().item()

    def layout(self, weight: StoredWeight) -> str:
        return Message("a scale for each {0}", self.scaling)

    def misread(self, weight: StoredWeight, declared: bool, marked: bool) -> Iterator[str]:
        yield from super().misread(weight, declared, marked)
        if not declared:
            yield DROPPED
        if marked and weight.data.dtype == torch.float8_e5m2:
            yield AS_E4M3
        if declared and self.one_scale(weight) is None:
            yield MANY_SCALES
        if declared and weight.input_scale is None and not weight.full_precision:
            yield CLIPPED

    def fits(self, scale: torch.Tensor, shape: Sequence[int], stated: object) -> bool:
        """True if the scale of a file has the shape of this format, for a weight of this shape."""
        raise NotImplementedError

    def as_read(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the scale of a file in the shape that this format uses."""
        raise NotImplementedError


class _OneScale(Scaled):
    """A scale for the whole weight: 0-dim."""

    scaling = "tensor"

    def one_scale(self, weight: StoredWeight) -> torch.Tensor | None:
        return weight.tensors["weight_scale"]

    def has_many_scales(self, weight: StoredWeight) -> bool:
        return False

    def is_same_in(self, weight: StoredWeight, storage: str) -> bool:
        return storage == weight.storage

    def fits(self, scale: torch.Tensor, shape: Sequence[int], stated: object) -> bool:
        return scale.numel() == 1

    def as_read(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(())


class _RowScales(Scaled):
    """A scale for each row of the data, seen as so many rows: ``(rows, 1)``."""

    scaling = "row"
    by_row = ("weight_scale",)

    def scale_of(self, weight: StoredWeight, part: slice, columns: int) -> torch.Tensor:
        return weight.tensors["weight_scale"][part]

    def matrix_rows(self, weight: StoredWeight) -> int | None:
        return weight.tensors["weight_scale"].shape[0]

    def fits(self, scale: torch.Tensor, shape: Sequence[int], stated: object) -> bool:
        """True for a shape that begins as the weight's and goes on with ones: ``(N,)``, ``(N, 1)``,
        ``(E, N, 1)``."""
        leading = list(scale.shape)
        while leading[-1] == 1:
            leading.pop()
        return leading == list(shape[: len(leading)])

    def as_read(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(-1, 1)


class _BlockScales(Scaled):
    """A scale for each block of a 2-D weight: ``(R, C)`` of them. Blocks of two weights are not
    joined."""

    scaling = "block"
    joins = False

    def scale_of(self, weight: StoredWeight, part: slice, columns: int) -> torch.Tensor:
        scale = weight.tensors["weight_scale"]
        sizes = block_sizes(weight.data.shape, scale.shape, weight.setting("group_size", None))
        assert sizes is not None, "what was read with blocks has blocks that fit"
        scale = scale[torch.arange(part.start, part.stop) // sizes[0]]
        return scale.repeat_interleave(sizes[1], 1)[:, :columns]

    def fits(self, scale: torch.Tensor, shape: Sequence[int], stated: object) -> bool:
        """True for one entry a block, of the ``stated`` length if the file says one: ``(R, C)``,
        ``(R, C, 1)``."""
        counts = scale.shape[:2]
        fits = len(counts) == len(shape) == 2 and scale.numel() == math.prod(counts)
        return fits and block_sizes(shape, counts, stated) is not None

    def as_read(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(scale.shape[:2])


PLAIN = _Plain()
ONE_SCALE, ROW_SCALES, BLOCK_SCALES = _OneScale(), _RowScales(), _BlockScales()


def scaled_format(scale: torch.Tensor, shape: Sequence[int], stated: object = None) -> Scaled | None:
    """Return the format of numbers of ``shape`` with such a scale; None where they do not fit.

    ``stated``: the length of blocks that the file says.
    """
    each = (ONE_SCALE, ROW_SCALES, BLOCK_SCALES)
    return next((format for format in each if format.fits(scale, shape, stated)), None)


def block_sizes(shape: Sequence[int], counts: Sequence[int], stated: object = None) -> tuple[int, int] | None:
    """Return the lengths of blocks that cut a 2-D weight into ``counts`` of them, the last possibly
    short: the ``stated`` length where it fits, and square where a usual length fits both ways
    (DeepSeek, Qwen and vLLM use 128); None where none fit."""
    own = (stated,) if type(stated) is int and stated > 0 else ()
    down, across = (
        [block for block in (*own, *USUAL_BLOCKS, max(size, 1)) if -(-size // block) == count]
        for size, count in zip(shape, counts, strict=True)
    )
    if not down or not across:
        return None
    square = next((block for block in down if block in across), None)
    return (square, square) if square else (down[0], across[0])
