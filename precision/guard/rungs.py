"""The rungs of the ladder: in which arithmetic a failed call is repeated, and in which order."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ..base.dtypes import name_of
from ..base.message import Message
from ..base.modes import FP16, FP32
from ..plan.compute import SAFE
from ..plan.in_use import PlanInUse
from .verdicts import GOES_ON, SAME_SEED, UNPACKED


@dataclass(frozen=True)
class EncoderStep:
    """The arithmetic of a VAE or text encoder. ``unpacked``: quantized weights are dequantized
    before each product."""

    dtype: torch.dtype
    unpacked: bool = False

    @property
    def name(self) -> str:
        """Name the precision for users."""
        return Message("{0} with dequantized weights", name_of(self.dtype)) if self.unpacked else name_of(self.dtype)


Arithmetic = TypeVar("Arithmetic", PlanInUse, EncoderStep)


@dataclass(frozen=True)
class Rung(Generic[Arithmetic]):
    """One arithmetic to repeat a failed call in.

    Args:
        name: its precision, for users.
        arithmetic: what the call runs in: the plan of a diffusion model, a step of an encoder; None
            for what it failed in.
        is_fp32: everything runs in fp32.
        later: what the user is told about later runs after this rung cured a call.
    """

    name: str
    arithmetic: Arithmetic | None = None
    is_fp32: bool = False
    later: str = ""

    @staticmethod
    def in_fp32(plan: PlanInUse) -> "Rung[PlanInUse]":
        """Return the last rung of a diffusion model."""
        return Rung(FP32.name, plan.fp32(), is_fp32=True, later=SAME_SEED)

    @property
    def as_it_was(self) -> bool:
        """True if the call is repeated in the arithmetic it failed in."""
        return self.arithmetic is None


AS_IT_WAS: Rung = Rung("as it was")


def model_rungs(plan: PlanInUse, falls_back: bool = False) -> list[Rung[PlanInUse]]:
    """List the rungs for a call of a diffusion model that failed under ``plan``, each wider; empty
    after fp32.

    A model whose layers are in fp32 is repeated too: its attention may be a kernel of 16 or 8 bits.

    ``falls_back``: the first one, ``fp16_safe``, is the model's own fallback, which it keeps.
    """
    if plan.whole:
        return []
    safe = Rung(SAFE, plan.safe(), later=Message("{0} {1}", GOES_ON, SAME_SEED) if falls_back else SAME_SEED)
    is_wider = plan.dtype == FP16.name and plan | plan.safe() != plan
    return [safe, Rung.in_fp32(plan)] if falls_back or is_wider else [Rung.in_fp32(plan)]


def encoder_rungs(
    dtype: torch.dtype, has_bf16: bool, quantized: bool = False, casts: bool = False
) -> list[Rung[EncoderStep]]:
    """List the rungs for a VAE or text encoder that runs in ``dtype``, the last one in fp32.

    The first one repeats the call as it was, except in fp16, which overflows again. bf16, which
    loses precision, is tried only if the device has it. ``quantized``: the weights are quantized;
    all further rungs dequantize them. ``casts``: the caller's autocast chose the dtypes of the
    call, and of none of its repeats in ``dtype`` or wider.
    """
    wider = [torch.float32] if dtype != torch.float32 or (casts and not quantized) else []
    if dtype == torch.float16 and has_bf16:
        wider = [torch.bfloat16, *wider]
    rungs: list[Rung[EncoderStep]] = []
    if dtype != torch.float16:
        rungs.append(Rung(name_of(dtype), is_fp32=dtype == torch.float32 and not quantized and not casts))
    if quantized:
        step = EncoderStep(dtype, unpacked=True)
        rungs.append(Rung(step.name, step, is_fp32=dtype == torch.float32, later=UNPACKED))
    for each in wider:
        step = EncoderStep(each, quantized)
        rungs.append(Rung(step.name, step, is_fp32=each == torch.float32))
    return rungs
