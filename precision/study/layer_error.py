"""Measure the error of one layer in a lower precision: of its weight, and of its output on samples
of real inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..arithmetic.linear import WeightProvider, lent, matmul_flops
from ..base.layers import kind_of
from .candidates import Candidate

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
                layer.weight_db = self.candidate.weight_error(weight)
            output_db, channel_db = self.candidate.output_error(self.module, self.sample(x), weight, bias)
        layer.output_db = min(output_db, math.inf if layer.output_db is None else layer.output_db)
        layer.channel_db = min(channel_db, math.inf if layer.channel_db is None else layer.channel_db)
        return result

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """Take rows spread evenly over a Linear's input, or the middle of a convolution's first item,
        in fp32."""
        if self.module.weight.dim() == 2:
            rows = x.reshape(-1, x.shape[-1])
            if len(rows) > ROWS:
                rows = rows[torch.linspace(0, len(rows) - 1, ROWS, device=x.device).long()]
            return rows.float()
        sizes = x.shape[2:]
        for dimension, limit in enumerate(CROP[-len(sizes) :], 2):
            length = min(limit, x.shape[dimension])
            x = x.narrow(dimension, (x.shape[dimension] - length) // 2, length)
        return x[:1].float()
