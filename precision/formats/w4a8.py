"""ComfyUI's ``asym_w4a8_int8``: 4- or 6-bit codes for numbers on an int8 grid (comfy-kitchen
``tensor/w4a8_int8.py``).
"""

import math
from dataclasses import dataclass

import torch

from .encoding import Encoding, halves, setting
from .int8 import rotated


@dataclass(frozen=True)
class W4a8(Encoding):
    """Codes of 4 bits (or of 6: their top bits follow in a plane of their own) for numbers on an int8 grid, rotated.

    ``weight_s_rel`` (rows, groups) times a code's value, rounded to int8, times ``weight_s_channel`` (rows,);
    ``weight_codebook`` (16,) gives the values of 4-bit codes, else they are the codes about their middle.
    """

    needs = ("weight_s_rel", "weight_s_channel")
    may_have = ("weight_codebook", "weight_correction")
    signed = ("weight_codebook", "weight_correction")

    def check(self) -> None:
        rows, columns = self.shape
        self._has("weight_s_rel", (rows, columns // self._group_size))
        if self._bits not in (4, 6) or self.data.shape[1] * 8 != columns * self._bits:
            raise ValueError(f"{self.data.shape[1]} bytes a row for {columns} inputs")
        groups = columns // self._group_size
        self._has("weight_s_channel", (rows,))
        if "weight_codebook" in self.tensors:
            self._has("weight_codebook", (16,))
        if "weight_correction" in self.tensors:
            self._has("weight_correction", (groups, rows))
        if self._bits == 6 and len(self.tensors) > 2:
            raise ValueError("a codebook or correction beside 6-bit codes")
        self._group()

    @property
    def _group_size(self) -> int:
        size = setting(self.settings, "group_size", 16)
        if type(size) is not int or not 4 <= size <= 4096 or (16 % size and size % 16):
            raise ValueError(f"a group_size of {size!r}")
        return size

    @property
    def _bits(self) -> int:
        return self.data.shape[1] * 8 // max(self.shape[1], 1)

    @property
    def shape(self) -> tuple[int, ...]:
        scale = self.tensors["weight_s_rel"]
        return (self.data.shape[0], (scale.shape[1] if scale.dim() == 2 else 0) * self._group_size)

    def rows(self, part: slice) -> torch.Tensor:
        columns = self.shape[1]
        numbers = self._values(self._codes(self.data[part], columns)).reshape(
            -1, columns // self._group_size, self._group_size
        )
        numbers = numbers.mul_(self._numbers("weight_s_rel")[part].unsqueeze(2)).round_().clamp_(-127, 127)
        numbers = numbers.mul_(self._numbers("weight_s_channel")[part].reshape(-1, 1, 1))
        if "weight_correction" in self.tensors:
            numbers = numbers.add_(self._numbers("weight_correction").T[part].unsqueeze(2))
        return rotated(numbers.reshape(-1, columns), self._group())

    def _codes(self, data: torch.Tensor, columns: int) -> torch.Tensor:
        codes = halves(data[:, : columns // 2])
        if self._bits == 6:
            top = data[:, columns // 2 :].view(torch.uint8).unsqueeze(2) >> torch.tensor(
                [0, 2, 4, 6], dtype=torch.uint8
            )
            codes = codes | (top & 3).reshape(-1, columns) << 4
        return codes

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if "weight_codebook" in self.tensors:
            return self._numbers("weight_codebook")[codes.int()]
        return codes.float() - (1 << self._bits - 1)

    def bound(self) -> float:
        correction = (
            self._numbers("weight_correction").abs().max().item() if "weight_correction" in self.tensors else 0.0
        )
        return (127 * self._numbers("weight_s_channel").max().item() + correction) * math.sqrt(self._group())
