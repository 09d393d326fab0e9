"""What the core asks for a layer's weights, for torch's own layers."""

import contextlib
from collections.abc import Iterator

import torch
from halfsafe.precision.arithmetic.planned import LayerHost
from halfsafe.precision.base.dtypes import dtype_named


@contextlib.contextmanager
def plain_weights(module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype, bias_dtype=torch.float32) -> Iterator[tuple]:
    """The weight in ``dtype`` and the bias, if there is one, in ``bias_dtype``."""
    yield module.weight.to(dtype), None if module.bias is None else module.bias.to(bias_dtype or torch.float32)


class PlainLayers(LayerHost):
    """Layers that do no more than multiply."""

    def weights(self, layer):
        return plain_weights

    def own_forward(self, layer, mode):
        return PlainProduct(layer).__call__, dtype_named(mode)


class PlainProduct:
    """A Linear layer's product in the dtype of its input."""

    def __init__(self, layer: torch.nn.Linear):
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with plain_weights(self.layer, x, x.dtype, x.dtype) as (weight, bias):
            return torch.nn.functional.linear(x, weight, bias)

    def __repr__(self) -> str:
        return "Linear.forward"
