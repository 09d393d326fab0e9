"""What every quantization format of ComfyUI has: data, scales, settings, a shape, and rows of values."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .int8 import is_rotation_group


class NonFiniteScale(ValueError):
    """The tensor ``leaf`` holds NaN, Inf, or a negative number where none can be."""

    def __init__(self, leaf: str):
        super().__init__("a scale that is NaN, infinite or negative")
        self.leaf = leaf


@dataclass(frozen=True)
class Encoding:
    """A weight of ``shape`` (rows, columns) in one of ComfyUI's formats.

    Attributes:
        data: ``<layer>.weight``.
        tensors: what belongs to it, by the last part of the name: ``weight_scale``.
        settings: ``<layer>.comfy_quant``, with its ``format``.
        signed: the tensors that may be negative.

    Raises:
        ValueError: when made: the tensors do not fit the format; the message says why.
    """

    data: torch.Tensor
    tensors: dict[str, torch.Tensor]
    settings: dict

    needs: ClassVar[tuple[str, ...]] = ("weight_scale",)
    may_have: ClassVar[tuple[str, ...]] = ()
    signed: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int8,)
    per_byte: ClassVar[int] = 1

    def __post_init__(self):
        if self.data.dim() != 2 or not self.data.numel():
            raise ValueError(f"a weight of shape {tuple(self.data.shape)}, where two dimensions are meant")
        if self.data.dtype not in self.dtypes:
            raise ValueError(f"stored in {_name(self.data.dtype)}, where {_name(self.dtypes[0])} is meant")
        for name in self.tensors:
            values = self._numbers(name)
            if not torch.isfinite(values).all() or (name not in self.signed and values.min() < 0):
                raise NonFiniteScale(name)
        self.check()

    def check(self) -> None:
        """Raise ValueError unless the tensors' shapes fit :attr:`shape`."""

    @classmethod
    def read(
        cls, data: torch.Tensor, tensors: dict[str, torch.Tensor], settings: dict, outputs: int | None = None
    ) -> "Encoding":
        """Make the weight of the tensors as a file has them.

        Args:
            outputs: of the layer, if the file tells them.
        """
        return cls(data, tensors, settings)

    @property
    def format(self) -> str:
        """The format's name, a key of ``registry.FORMATS``."""
        return self.settings["format"]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.data.shape[0], self.data.shape[1] * self.per_byte)

    @property
    def doubt(self) -> str:
        """Say what leaves the weight's own shape open; "" where :attr:`shape` is certain."""
        return ""

    def rows(self, part: slice) -> torch.Tensor:
        """Dequantize some rows of the weight to fp32, ``(n, columns)``."""
        raise NotImplementedError

    def bound(self) -> float:
        """Return an upper bound on the magnitude of the weight; NaN if it holds a NaN."""
        raise NotImplementedError

    def moved(self, device: torch.device | str) -> "Encoding":
        """Return the same on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, data=self.data.to(device), tensors=tensors)

    def _numbers(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        if not tensor.dtype.is_floating_point or not tensor.numel():
            raise ValueError(f"its {name} holds {tensor.numel()} values in {_name(tensor.dtype)}")
        return tensor.float()

    def _has(self, name: str, *shapes: tuple[int, ...]) -> None:
        if tuple(self.tensors[name].shape) not in shapes:
            meant = " or ".join(map(str, shapes))
            raise ValueError(f"its {name} has the shape {tuple(self.tensors[name].shape)}, where {meant} is meant")

    def _group(self) -> int:
        size = setting(self.settings, "convrot_groupsize", 256)
        if not isinstance(size, int) or not is_rotation_group(size) or self.shape[-1] % size:
            raise ValueError(f"a convrot_groupsize of {size!r} for {self.shape[-1]} inputs")
        return size


def setting(settings: dict, key: str, default: object) -> object:
    """Return a value of ``comfy_quant``, which has it at the top or under ``params``, as ComfyUI reads it."""
    params = settings.get("params")
    return settings.get(key, params.get(key, default) if isinstance(params, dict) else default)


def halves(data: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Split rows of bytes ``(n, b)`` into rows of their halves ``(n, 2 b)``, each 0 to 15."""
    bytes_ = data.contiguous().view(torch.uint8)
    low, high = bytes_ & 15, bytes_ >> 4
    return torch.stack((high, low) if high_first else (low, high), 2).reshape(len(data), -1)


def from_tiles(scales: torch.Tensor, rows: int, columns: int, name: str) -> torch.Tensor:
    """Return block scales ``(rows, columns)`` from cuBLAS' layout: tiles of 128 x 4, each as 32 rows of 4 x 4.

    https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    down, across = -(-rows // 128), -(-columns // 4)
    if scales.numel() != down * 128 * across * 4:
        raise ValueError(f"its {name} of shape {tuple(scales.shape)} is not padded to {down * 128} x {across * 4}")
    tiles = scales.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:rows, :columns].contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
