"""The quantization formats of ComfyUI in which a weight is more than fp8 data and scales: their tensors and their
values.

Layouts: ComfyUI ``comfy/ops.py`` (``_load_quantized_module``), ``comfy/quant_ops.py`` (``QUANT_ALGOS``) and
comfy-kitchen's ``tensor/*.py``. Every value is computed in fp32, some rows at a time.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from ..amax import host_amax
from .encoding import Encoding, from_tiles, halves, setting
from .int8 import dequantize_rows, rotated

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LOOKED_AT = 256
"""Rows unpacked at a time to see whether a weight's last column is zero."""


@dataclass(frozen=True)
class Int8(Encoding):
    """One int8 number a weight, ``weight_scale`` fp32 of shape () or (rows, 1); rotated where ``convrot`` is set."""

    def check(self) -> None:
        if self.tensors["weight_scale"].numel() > 1:
            self._has("weight_scale", (self.shape[0], 1), (self.shape[0],))
        self.group  # noqa: B018

    @classmethod
    def read(
        cls, data: torch.Tensor, tensors: dict[str, torch.Tensor], settings: dict, outputs: int | None = None
    ) -> "Int8":
        """Read a weight with ``weight_scale`` in the shape that ComfyUI multiplies by,
        and ``convrot`` where also its embeddings look.
        """
        scale = tensors["weight_scale"]
        if scale.dim() == 1 or (scale.numel() == 1 and len(data) > 1):
            tensors = {"weight_scale": scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, 1)}
        weight = cls(data, tensors, settings)
        if weight.group is not None:
            weight = cls(data, tensors, settings | {"convrot": True, "convrot_groupsize": weight.group})
        return weight

    @cached_property
    def group(self) -> int | None:
        """The rotation's group, None where the weight is not rotated."""
        return self._group() if setting(self.settings, "convrot", False) else None

    def rows(self, part: slice) -> torch.Tensor:
        scale = self._numbers("weight_scale").reshape(-1, 1)
        return dequantize_rows(self.data[part], scale if len(scale) == 1 else scale[part], self.group)

    def bound(self) -> float:
        return 128 * self._numbers("weight_scale").max().item() * math.sqrt(self.group or 1)


@dataclass(frozen=True)
class Int4(Encoding):
    """Two signed numbers a byte, the low half first, rotated; ``weight_scale`` fp32 (rows,)."""

    per_byte = 2

    def check(self) -> None:
        self._has("weight_scale", (self.shape[0],), (self.shape[0], 1))
        self._group()

    def rows(self, part: slice) -> torch.Tensor:
        numbers = halves(self.data[part]).float()
        numbers.sub_(16 * (numbers > 7))
        return rotated(numbers.mul_(self._numbers("weight_scale").reshape(-1, 1)[part]), self._group())

    def bound(self) -> float:
        return 8 * self._numbers("weight_scale").max().item() * math.sqrt(self._group())


@dataclass(frozen=True)
class Padded(Encoding):
    """A weight whose rows and columns ComfyUI fills up with zeros to a multiple of :attr:`multiple`.

    The file has no record of the shape before (ComfyUI takes the module's, ``_orig_shape`` in comfy/ops.py). A layer's
    bias tells its rows; what ends in a value other than zero was not padded.

    Attributes:
        outputs: rows of the weight before it was padded, if they are known.
    """

    outputs: int | None = None
    multiple: ClassVar[int] = 1

    @classmethod
    def read(
        cls, data: torch.Tensor, tensors: dict[str, torch.Tensor], settings: dict, outputs: int | None = None
    ) -> "Padded":
        fits = outputs is not None and -(-outputs // cls.multiple) * cls.multiple == len(data)
        return cls(data, tensors, settings, outputs if fits else None)

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = super().shape
        return (rows if self.outputs is None else self.outputs, columns)

    @property
    def doubt(self) -> str:
        rows, columns = self.shape
        open_rows = self.outputs is None and rows % self.multiple == 0 and not self.rows(slice(rows - 1, rows)).any()
        parts = (self.rows(slice(start, min(start + LOOKED_AT, rows))) for start in range(0, rows, LOOKED_AT))
        open_columns = columns % self.multiple == 0 and not any(part[:, -1].any() for part in parts)
        what = " and ".join(name for name, is_open in (("rows", open_rows), ("columns", open_columns)) if is_open)
        return f"its last {what} are zero, which may be padding that the file does not tell from values" if what else ""


@dataclass(frozen=True)
class Nvfp4(Padded):
    """Two e2m1 numbers a byte, the high half first; ``weight_scale`` e4m3 for each 16 inputs, ``weight_scale_2`` for
    all.

    ``pre_quant_scale`` (columns,), which ComfyUI multiplies the layer's inputs by, is part of the weight here.
    """

    needs = ("weight_scale", "weight_scale_2")
    may_have = ("input_scale", "pre_quant_scale")
    signed = ("pre_quant_scale",)
    dtypes = (torch.uint8,)
    per_byte = 2
    multiple = 16

    def check(self) -> None:
        if self.shape[1] % 16:
            raise ValueError(f"{self.shape[1]} inputs, where a multiple of 16 is meant")
        if self.tensors["weight_scale_2"].numel() != 1:
            raise ValueError(f"its weight_scale_2 holds {self.tensors['weight_scale_2'].numel()} values")
        if "pre_quant_scale" in self.tensors:
            self._has("pre_quant_scale", (self.shape[1],))
        self._scales  # noqa: B018

    @cached_property
    def _scales(self) -> torch.Tensor:
        blocks = from_tiles(self._numbers("weight_scale"), self.shape[0], self.shape[1] // 16, "weight_scale")
        return blocks * self._numbers("weight_scale_2").reshape(())

    def rows(self, part: slice) -> torch.Tensor:
        values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
        numbers = values[halves(self.data[part], high_first=True).int()].reshape(-1, self.shape[1] // 16, 16)
        numbers = numbers.mul_(self._scales[part].unsqueeze(2)).reshape(-1, self.shape[1])
        smoothing = self.tensors.get("pre_quant_scale")
        return numbers if smoothing is None else numbers.mul_(smoothing.float())

    def bound(self) -> float:
        smoothing = self._numbers("pre_quant_scale").abs().max().item() if "pre_quant_scale" in self.tensors else 1.0
        return FP4_VALUES[-1] * self._scales.max().item() * smoothing


@dataclass(frozen=True)
class Mxfp8(Padded):
    """e4m3 numbers, ``weight_scale`` e8m0 for each 32 inputs."""

    may_have = ("input_scale",)
    multiple = 32
    dtypes = (torch.float8_e4m3fn,)

    def check(self) -> None:
        if self.shape[1] % 32:
            raise ValueError(f"{self.shape[1]} inputs, where a multiple of 32 is meant")
        self._scales  # noqa: B018

    @cached_property
    def _scales(self) -> torch.Tensor:
        return from_tiles(self._numbers("weight_scale"), self.shape[0], self.shape[1] // 32, "weight_scale")

    def rows(self, part: slice) -> torch.Tensor:
        numbers = self.data[part].float().reshape(-1, self.shape[1] // 32, 32)
        return numbers.mul_(self._scales[part].unsqueeze(2)).reshape(-1, self.shape[1])

    def bound(self) -> float:
        return host_amax(self.data) * self._scales.max().item()


@dataclass(frozen=True)
class Awq4(Encoding):
    """Two unsigned numbers a byte, the low half first: ``(number - 8) * weight_scale + weight_zeros``, both (groups,
    rows).
    """

    needs = ("weight_scale", "weight_zeros")
    signed = ("weight_scale", "weight_zeros")
    per_byte = 2

    def check(self) -> None:
        size = setting(self.settings, "group_size", 64)
        if type(size) is not int or size < 1 or self.shape[1] % size:
            raise ValueError(f"a group_size of {size!r} for {self.shape[1]} inputs")
        for name in self.needs:
            self._has(name, (self.shape[1] // size, self.shape[0]))

    def rows(self, part: slice) -> torch.Tensor:
        scale, zeros = (self._numbers(name).T[part].unsqueeze(2) for name in self.needs)
        numbers = halves(self.data[part]).float().reshape(*scale.shape[:2], -1)
        return numbers.sub_(8).mul_(scale).add_(zeros).reshape(-1, self.shape[1])

    def bound(self) -> float:
        scale, zeros = (self._numbers(name).abs().max().item() for name in self.needs)
        return 8 * scale + zeros


@dataclass(frozen=True)
class Fp8(Encoding):
    """One expert's fp8 weight, ``weight_scale`` for all of it or per row."""

    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)

    def check(self) -> None:
        if self.tensors["weight_scale"].numel() > 1:
            self._has("weight_scale", (self.shape[0], 1), (self.shape[0],))

    def rows(self, part: slice) -> torch.Tensor:
        scale = self._numbers("weight_scale").reshape(-1, 1)
        return self.data[part].float().mul_(scale if len(scale) == 1 else scale[part])

    def bound(self) -> float:
        return host_amax(self.data) * self._numbers("weight_scale").max().item()
