"""What the core asks for a layer's weights, for torch's own layers."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_weights(module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple]:
    """The weight in ``dtype`` and the bias, if there is one, in fp32."""
    yield module.weight.to(dtype), None if module.bias is None else module.bias.float()
