"""The arithmetic modes of a layer: what its matmul multiplies and returns, the option that asks for it, its colour."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from .options import RuledCompute

ModeName = Literal["fp8", "int8", "fp16_acc16", "fp16", "fp16_wide", "fp16_scaled", "bf16", "fp32"]


@dataclass(frozen=True)
class Mode:
    """One arithmetic of a matmul or convolution.

    Args:
        name: as reports, rules and the guard name it.
        label: the same in plain words.
        compute: the compute option that asks for it.
        operand: the dtype both operands are multiplied in.
        result: the dtype the matmul returns; None for the activation dtype.
        colour: RGB, in pictures and on the page.
        sums_in_fp16: products are accumulated in fp16.
    """

    name: ModeName
    label: str
    compute: RuledCompute
    operand: torch.dtype
    result: torch.dtype | None
    colour: tuple[int, int, int]
    sums_in_fp16: bool = False

    @property
    def rule(self) -> str:
        """The settings of a Layer Rules line that ask for this mode."""
        return f"compute={self.compute}" + (" accumulation=fp16" if self.sums_in_fp16 else "")

    @property
    def is_8bit(self) -> bool:
        return self.operand.itemsize == 1

    @property
    def is_16bit(self) -> bool:
        return self.operand.itemsize == 2

    @property
    def is_wide(self) -> bool:
        """True when 16-bit operands give an fp32 result, so that no sum can overflow."""
        return self.is_16bit and self.result == torch.float32


_E4M3, _FP16, _BF16, _FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
FP8 = Mode("fp8", "fp8", "fp8", _E4M3, None, (238, 165, 42))
INT8 = Mode("int8", "int8 with a scale per token", "int8", torch.int8, None, (150, 200, 74))
FP16_ACC16 = Mode("fp16_acc16", "fp16 with fp16 sums", "fp16", _FP16, _FP16, (214, 120, 172), True)
FP16 = Mode("fp16", "fp16", "fp16", _FP16, _FP16, (92, 178, 238))
FP16_WIDE = Mode("fp16_wide", "fp16 with fp32 results", "fp16_safe", _FP16, _FP32, (62, 116, 216))
FP16_SCALED = Mode("fp16_scaled", "scaled fp16 with fp32 results", "fp16_safe", _FP16, _FP32, (146, 112, 224))
BF16 = Mode("bf16", "bf16", "bf16", _BF16, _BF16, (54, 178, 132))
FP32 = Mode("fp32", "fp32", "fp32", _FP32, _FP32, (126, 134, 148))

MODES: dict[str, Mode] = {mode.name: mode for mode in (FP8, INT8, FP16_ACC16, FP16, FP16_WIDE, FP16_SCALED, BF16, FP32)}
"""Mode name -> mode. Each mode is nearer to fp32 than those before: of two escalations of a layer, the later runs."""

MODE_OF: dict[str, ModeName] = {mode.compute: mode.name for mode in reversed(MODES.values()) if not mode.sums_in_fp16}
"""Compute option -> the first mode that the option alone asks for."""


def label_of(name: str) -> str:
    """Return the label of a mode, or the name of a dtype that is no mode."""
    return MODES[name].label if name in MODES else name


def modes_named(names: Iterable[str]) -> list[Mode]:
    """Return the modes with these names. A model can compute in dtypes that are no mode, such as fp64:
    those are left out."""
    return [MODES[name] for name in names if name in MODES]
