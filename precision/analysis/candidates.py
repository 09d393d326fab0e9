"""What a layer would do in a lower precision, imitated on any device: weights stored in fp8, or fp16 and bf16 arithmetic."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..amax import amax_value
from ..dtypes import FP8_NAMES, dtype_named
from ..formats.quantize import dequantize, quantize

CANDIDATES = ("fp8_e4m3fn", "fp8_e5m2", "fp16", "fp16_acc16", "bf16")
PART = 1 << 22
SUM_LENGTH = 16


@dataclass(frozen=True)
class Candidate:
    """One of ``CANDIDATES``. fp8: the weight is stored so. The others: operands and result of the product are rounded.

    ``fp16_acc16`` also rounds the sums to fp16, as often as a tensor core does; only matrix products sum in fp16, so a
    convolution is as with ``fp16``.
    """

    name: str

    @property
    def stores(self) -> bool:
        """Whether it is about how the weight is kept, and not about arithmetic."""
        return self.name in FP8_NAMES

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.name == "fp16_acc16" else dtype_named(self.name)

    @property
    def sums_in_fp16(self) -> bool:
        return self.name == "fp16_acc16"

    def rounded(self, weight: torch.Tensor, amax: float) -> torch.Tensor:
        """A weight, or a part of one whose :func:`amax_value` is ``amax``, as this candidate holds it, in its own dtype."""
        if not self.stores:
            return weight.to(self.dtype).to(weight.dtype)
        held = quantize(weight, self.dtype, amax)
        return dequantize(held.data, held.scale.to(weight.device), weight.dtype)

    @torch.no_grad()
    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A new tensor with the weight as this candidate holds it; beyond the result it needs a few dozen MB."""
        amax, result = amax_value(weight), torch.empty_like(weight)
        for part, out in zip(parts(weight), parts(result), strict=True):
            out.copy_(self.rounded(part, amax))
        return result

    def error(self, module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias, amax: float, exact: torch.Tensor):
        """What this candidate adds to ``exact``, a layer's fp32 output for ``x``; not finite where it overflows."""
        held = self.rounded(weight, amax)
        if self.stores:
            return multiply(module, x, held - weight, None)
        x = x.to(self.dtype)
        if self.sums_in_fp16 and weight.dim() == 2:
            return with_fp16_sums(x, held, bias).float() - exact
        return multiply(module, x.float(), held, bias).to(self.dtype).float() - exact


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Slices along the first dimension of about ``PART`` elements."""
    rows = max(1, PART // max(1, tensor[0].numel())) if tensor.numel() else 1
    return tensor.split(rows)


def multiply(module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
    """A Linear's or convolution's product with the weights of its outputs, or of some where it has no groups."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    return module._conv_forward(x, weight, bias)


def with_fp16_sums(x: torch.Tensor, weight: torch.Tensor, bias, length: int = SUM_LENGTH) -> torch.Tensor:
    """``x`` (..., K) times ``weight`` (N, K) with sums rounded to fp16 after every ``length`` products, as tensor cores do.

    Returns fp16; a sum past 65504 is inf.
    """
    x, weight = x.float(), weight.float()
    total = torch.zeros(*x.shape[:-1], len(weight), dtype=torch.float16, device=x.device)
    for operand, row in zip(x.split(length, -1), weight.split(length, -1), strict=True):
        total = torch.add(F.linear(operand, row), total).to(torch.float16)
    return total if bias is None else (total.float() + bias.float()).to(torch.float16)
