"""The quantization formats of ComfyUI in which a weight is more than fp8 data and scales: their tensors and their values.

Layouts: ComfyUI ``comfy/ops.py`` (``_load_quantized_module``), ``comfy/quant_ops.py`` (``QUANT_ALGOS``) and comfy-kitchen's
``tensor/*.py``. Every value is computed in fp32, some rows at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ..amax import host_amax
from .encoding import Encoding, from_tiles, halves, setting
from .int8 import dequantize_rows, rotated
from .w4a8 import W4a8

SINCE = {
    "float8_e4m3fn": "0.4.0",
    "float8_e5m2": "0.8.0",
    "nvfp4": "0.8.0",
    "mxfp8": "0.18.0",
    "int8_tensorwise": "0.27.0",
    "convrot_w4a4": "0.28.0",
    "asym_w4a8_int8": "0.31.0",
    "awq_w4a16": "0.38.1",
}
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Int8(Encoding):
    """One int8 number a weight, ``weight_scale`` fp32 of shape () or (rows, 1); rotated where ``convrot`` is set."""

    def check(self) -> None:
        if self.tensors["weight_scale"].numel() > 1:
            self._has("weight_scale", (self.shape[0], 1), (self.shape[0],))
        self.group  # noqa: B018

    @classmethod
    def read(cls, data: torch.Tensor, tensors: dict[str, torch.Tensor], settings: dict) -> "Int8":
        """With ``weight_scale`` in the shape that ComfyUI multiplies by, and ``convrot`` where also its embeddings look."""
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
class Nvfp4(Encoding):
    """Two e2m1 numbers a byte, the high half first; ``weight_scale`` e4m3 for each 16 inputs, ``weight_scale_2`` for all.

    ``pre_quant_scale`` (columns,), which ComfyUI multiplies the layer's inputs by, is part of the weight here.
    """

    needs = ("weight_scale", "weight_scale_2")
    may_have = ("input_scale", "pre_quant_scale")
    signed = ("pre_quant_scale",)
    dtypes = (torch.uint8,)
    per_byte = 2

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
class Mxfp8(Encoding):
    """e4m3 numbers, ``weight_scale`` e8m0 for each 32 inputs."""

    may_have = ("input_scale",)
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
    """Two unsigned numbers a byte, the low half first: ``(number - 8) * weight_scale + weight_zeros``, both (groups, rows)."""

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


@dataclass(frozen=True)
class Experts(Encoding):
    """A bank of experts' weights (``num_experts``), ``(experts, rows, columns)``: each tensor has a first dimension of that size."""

    def __post_init__(self):
        if self.data.dim() != 3 or not self.data.numel():
            raise ValueError(f"a bank of experts of shape {tuple(self.data.shape)}")
        self._experts  # noqa: B018

    @cached_property
    def _experts(self) -> list[Encoding]:
        cls, count = _CLASSES[self.settings["format"]], self.data.shape[0]
        return [cls(self.data[i], {name: _of_expert(t, i, count) for name, t in self.tensors.items()}, self.settings) for i in range(count)]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._experts), *self._experts[0].shape)

    def rows(self, part: slice) -> torch.Tensor:
        each = self.shape[1]
        first, last = part.start // each, (part.stop - 1) // each
        slices = [slice(max(part.start - i * each, 0), min(part.stop - i * each, each)) for i in range(first, last + 1)]
        return torch.cat([self._experts[i].rows(rows) for i, rows in enumerate(slices, first)])

    def bound(self) -> float:
        return max(expert.bound() for expert in self._experts)


_CLASSES = {
    "float8_e4m3fn": Fp8, "float8_e5m2": Fp8, "nvfp4": Nvfp4, "mxfp8": Mxfp8, "int8_tensorwise": Int8,
    "convrot_w4a4": Int4, "asym_w4a8_int8": W4a8, "awq_w4a16": Awq4,
}  # fmt: skip
_AS_BYTES = {
    "nvfp4": ("weight_scale", "float8_e4m3fn"),
    "mxfp8": ("weight_scale", "float8_e8m0fnu"),
    "asym_w4a8_int8": ("weight_s_rel", "float8_e4m3fn"),
}


def leaves_of(format: str) -> tuple[str, ...]:
    """The tensors beside ``<layer>.weight`` that ComfyUI reads for a format, by the last part of their names."""
    return (*_CLASSES[format].needs, *_CLASSES[format].may_have)


def encoding_of(data: torch.Tensor, tensors: Mapping[str, torch.Tensor], settings: dict) -> Encoding:
    """The weight that ``data``, the tensors of :func:`leaves_of` that a file has, and ``comfy_quant`` stand for.

    Raises:
        ValueError: one is missing or does not fit the format; the message says why.
    """
    cls = _CLASSES[settings["format"]]
    missing = next((leaf for leaf in cls.needs if leaf not in tensors), None)
    if missing:
        raise ValueError(f"without its {missing}")
    tensors = {name: _typed(tensor, settings["format"], name) for name, tensor in tensors.items()}
    if "num_experts" in settings:
        return Experts(data, tensors, settings)
    return Int8.read(data, tensors, settings) if cls is Int8 else cls(data, tensors, settings)


def _typed(tensor: torch.Tensor, format: str, leaf: str) -> torch.Tensor:
    """Scales that a file holds as bytes, as ComfyUI reads them."""
    name, dtype = _AS_BYTES.get(format, ("", ""))
    if leaf != name or tensor.dtype != torch.uint8:
        return tensor
    if not hasattr(torch, dtype):
        raise ValueError(f"torch {torch.__version__} has no {dtype}")
    return tensor.view(getattr(torch, dtype))


def _of_expert(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    if tensor.shape[0] != count:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} for {count} experts")
    return tensor[index]
