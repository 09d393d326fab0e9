"""Measure the error of one layer in a lower precision: of its weight, and of its output on samples
of real inputs."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..arithmetic.linear import WeightProvider, lent, matmul_flops
from ..base.amax import amax_value, decibels
from ..base.layers import kind_of
from .candidates import Candidate, multiply, parts

ROWS = 64
CROP = (2, 8, 8)


@dataclass
class LayerResult:
    """The figures of one layer. dB values are signal to noise ratios, the worst of its calls; None:
    not measured.

    ``output_db``: of the whole output; ``channel_db``: the mean over output channels, which shows
    an error that larger channels hide. ``size``: parameters. ``flops``: of its matmuls in one run.
    ``sensitive``: the default preset keeps it.
    """

    name: str
    cls: str
    size: int
    status: str
    reason: str = ""
    sensitive: bool = False
    weight_db: float | None = None
    output_db: float | None = None
    channel_db: float | None = None
    flops: int = 0

    @property
    def worst_db(self) -> float | None:
        return None if self.output_db is None else min(self.output_db, self.channel_db)


class MeasuredForward:
    """Run a module's forward with a measurement, on at most ``ROWS`` rows or a small crop of each
    input.

    Needs memory for pieces of ``PART`` elements of the layer's weight, and keeps no input.
    """

    def __init__(self, module: torch.nn.Module, layer: LayerResult, candidate: Candidate, weights: WeightProvider):
        self.module = module
        self.layer = layer
        self.candidate = candidate
        self.weights = weights

    def __call__(self, forward: Callable, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        result = forward(x, *args, **kwargs)
        if x.numel() == 0:
            return result
        layer = self.layer
        layer.flops += matmul_flops(result, self.module, kind_of(self.module))
        with lent(self.weights(self.module, x, x.dtype)) as (weight, bias):
            if layer.weight_db is None:
                layer.weight_db = weight_error(weight, self.candidate)
            output_db, channel_db = output_error(self.module, sample_of(self.module, x), weight, bias, self.candidate)
        layer.output_db = min(output_db, math.inf if layer.output_db is None else layer.output_db)
        layer.channel_db = min(channel_db, math.inf if layer.channel_db is None else layer.channel_db)
        return result


def sample_of(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Take rows spread evenly over a Linear's input, or the middle of a convolution's first item,
    in fp32."""
    if module.weight.dim() == 2:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > ROWS:
            rows = rows[torch.linspace(0, len(rows) - 1, ROWS, device=x.device).long()]
        return rows.float()
    sizes = x.shape[2:]
    for dimension, limit in enumerate(CROP[-len(sizes) :], 2):
        length = min(limit, x.shape[dimension])
        x = x.narrow(dimension, (x.shape[dimension] - length) // 2, length)
    return x[:1].float()


def weight_error(weight: torch.Tensor, candidate: Candidate) -> float:
    """Compute the SNR in dB of a weight as the candidate stores it: inf when exact, -inf when it is
    not finite."""
    largest = amax_value(weight)
    noise, signal = 0.0, 0.0
    for part in parts(weight):
        exact = part.float()
        noise += (candidate.rounded(part, largest).float() - exact).square().sum().item()
        signal += exact.square().sum().item()
    return decibels(noise, signal)


def output_error(module: torch.nn.Module, x: torch.Tensor, weight, bias, candidate: Candidate) -> tuple[float, float]:
    """Compute the SNRs in dB of a layer's output for a sample of its input: of the whole, and the
    mean over channels.

    A channel's error counts as its own size at most. It is compared with the power its products
    would have with random signs where that is larger, as a few outputs near zero are no fault of
    the weights.
    """
    largest, signals, noises, random = amax_value(weight), [], [], []
    for part, part_bias in _pieces(module, weight, bias):
        exact = multiply(module, x, part.float(), part_bias)
        error = candidate.error(module, x, part.float(), part_bias, largest, exact)
        signals.append(_by_channel(module, exact))
        noises.append(_by_channel(module, error))
        squares = x.square().sum(0, keepdim=True) if part.dim() == 2 else x.square()
        random.append(_by_channel(module, multiply(module, squares, part.float().square(), None).sqrt()))
    signal, noise = torch.cat(signals), torch.cat(noises)
    whole = decibels(noise.sum().item(), signal.sum().item())
    if not math.isfinite(whole):
        return whole, whole
    # The quotient of a silent channel is 0 / 0.
    relative = torch.where(noise == 0, 0.0, noise / torch.maximum(signal, torch.cat(random)))
    return whole, decibels(relative.clamp_max(1.0).mean().item(), 1.0)


def _pieces(module: torch.nn.Module, weight: torch.Tensor, bias) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield parts of the weight with their bias; a grouped convolution is one piece."""
    pieces = (weight,) if getattr(module, "groups", 1) > 1 else parts(weight)
    biases = [None] * len(pieces) if bias is None else bias.float().split([len(piece) for piece in pieces])
    yield from zip(pieces, biases, strict=True)


def _by_channel(module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
    channel = -1 if module.weight.dim() == 2 else 1
    return output.square().transpose(0, channel).flatten(1).sum(1)
