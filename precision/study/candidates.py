"""Emulate a layer in a lower precision on any device: weights stored in fp8 or int8, or fp16 and
bf16 arithmetic."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..base.amax import amax_value, decibels, floats
from ..base.dtypes import FP8_NAMES, QUANTIZED_NAMES, dtype_named
from ..base.modes import BF16, FP16, FP16_ACC16, INT8, MODES
from ..formats.fp8 import quantize
from ..formats.int8 import dequantize_rows, quantize_rows, rotation_group

CANDIDATES = (*FP8_NAMES, FP16.name, FP16_ACC16.name, BF16.name, INT8.name)
PART = 1 << 22
SUM_LENGTH = 16


@dataclass(frozen=True)
class Candidate:
    """One of ``CANDIDATES``. fp8, int8: round the stored weight. The others: round operands and
    result of the matmul.

    With fp16 accumulation partial sums are rounded to fp16 too, as often as a tensor core does. A
    convolution never accumulates in fp16. ``products``: of int8: the layer multiplies in int8, its
    input rotated and quantized with a scale per token; int32 sums are exact, so that a product of
    the rounded operands differs by rounding alone.
    """

    name: str
    products: bool = True

    @property
    def stores(self) -> bool:
        """True for a storage dtype, False for an arithmetic mode."""
        return self.name in QUANTIZED_NAMES

    @property
    def rounds_inputs(self) -> bool:
        """True where the input of the matmul is quantized too."""
        return self.name == INT8.name and self.products

    @property
    def dtype(self) -> torch.dtype:
        return dtype_named(self.name) if self.stores else MODES[self.name].operand

    @property
    def sums_in_fp16(self) -> bool:
        return not self.stores and MODES[self.name].sums_in_fp16

    def rounded(self, weight: torch.Tensor, amax: float) -> torch.Tensor:
        """Round a weight, or some of its rows, to this candidate's storage; the dtype stays.

        ``amax``: :func:`amax_value` of the whole weight.
        """
        if not self.stores:
            return weight.to(self.dtype).to(weight.dtype)
        if self.name == INT8.name:
            return _in_int8(weight)
        data, scale = quantize(weight, self.dtype, amax)
        return (floats(data) * scale.to(weight.device)).to(weight.dtype)

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """Round a layer's input ``(..., K)`` to int8 where this candidate does; the dtype stays."""
        return _in_int8(x.reshape(-1, x.shape[-1])).view(x.shape) if self.rounds_inputs else x

    @torch.no_grad()
    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a rounded copy of the weight; beyond the copy this needs a few dozen MiB."""
        amax, result = amax_value(weight), torch.empty_like(weight)
        for part, out in zip(_parts(weight), _parts(result), strict=True):
            out.copy_(self.rounded(part, amax))
        return result

    def error(
        self, module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias, amax: float, exact: torch.Tensor
    ):
        """Return the error added to ``exact``, a layer's fp32 output for ``x``; not finite on
        overflow."""
        rounded = self.rounded(weight, amax)
        if self.stores:
            return _multiply(module, self.input(x), rounded, bias) - exact
        x = x.to(self.dtype)
        if self.sums_in_fp16 and weight.dim() == 2:
            return with_fp16_sums(x, rounded, bias).float() - exact
        return _multiply(module, x.float(), rounded, bias).to(self.dtype).float() - exact

    def weight_error(self, weight: torch.Tensor) -> float:
        """Compute the SNR in dB of a weight as this candidate stores it: inf when exact, -inf when it is
        not finite."""
        largest = amax_value(weight)
        noise, signal = 0.0, 0.0
        for part in _parts(weight):
            exact = part.float()
            noise += (self.rounded(part, largest).float() - exact).square().sum().item()
            signal += exact.square().sum().item()
        return decibels(noise, signal)

    def output_error(self, module: torch.nn.Module, x: torch.Tensor, weight, bias) -> tuple[float, float]:
        """Compute the SNRs in dB of a layer's output for a sample of its input: of the whole, and the
        mean over channels.

        A channel's error counts as its own size at most. It is compared with the power its products
        would have with random signs where that is larger, as a few outputs near zero are no fault of
        the weights.
        """
        largest, signals, noises, random = amax_value(weight), [], [], []
        for part, part_bias in _pieces(module, weight, bias):
            exact = _multiply(module, x, part.float(), part_bias)
            error = self.error(module, x, part.float(), part_bias, largest, exact)
            signals.append(_by_channel(module, exact))
            noises.append(_by_channel(module, error))
            squares = x.square().sum(0, keepdim=True) if part.dim() == 2 else x.square()
            random.append(_by_channel(module, _multiply(module, squares, part.float().square(), None).sqrt()))
        signal, noise = torch.cat(signals), torch.cat(noises)
        whole = decibels(noise.sum().item(), signal.sum().item())
        if not math.isfinite(whole):
            return whole, whole
        # The quotient of a silent channel is 0 / 0.
        relative = torch.where(noise == 0, 0.0, noise / torch.maximum(signal, torch.cat(random)))
        return whole, decibels(relative.clamp_max(1.0).mean().item(), 1.0)


def _pieces(module: torch.nn.Module, weight: torch.Tensor, bias) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield parts of the weight with their bias; a grouped convolution is one piece."""
    pieces = (weight,) if getattr(module, "groups", 1) > 1 else _parts(weight)
    biases = [None] * len(pieces) if bias is None else bias.float().split([len(piece) for piece in pieces])
    yield from zip(pieces, biases, strict=True)


def _by_channel(module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
    channel = -1 if module.weight.dim() == 2 else 1
    return output.square().transpose(0, channel).flatten(1).sum(1)


def _in_int8(rows: torch.Tensor) -> torch.Tensor:
    group = rotation_group(rows.shape[1])
    codes, scale = quantize_rows(rows, group)
    return dequantize_rows(codes, scale, group).to(rows.dtype)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split along the first dimension into slices of about ``PART`` elements."""
    rows = max(1, PART // max(1, tensor[0].numel())) if tensor.numel() else 1
    return tensor.split(rows)


def _multiply(module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
    """Multiply as a Linear or convolution does, with all of its weight or, without groups, with
    some of its rows."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    return module._conv_forward(x, weight, bias)


def with_fp16_sums(x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
    """Multiply ``x`` (..., K) by ``weight`` (N, K), rounding sums to fp16 every ``SUM_LENGTH``
    products.

    So do tensor cores. Returns fp16; a sum above 65504 is inf.
    """
    x, weight = x.float(), weight.float()
    total = torch.zeros(*x.shape[:-1], len(weight), dtype=torch.float16, device=x.device)
    for operand, row in zip(x.split(SUM_LENGTH, -1), weight.split(SUM_LENGTH, -1), strict=True):
        total = torch.add(F.linear(operand, row), total).to(torch.float16)
    return total if bias is None else (total.float() + bias.float()).to(torch.float16)
