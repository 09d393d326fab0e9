"""What the core asks for a layer's weights, for torch's own layers."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_weights(module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype, bias_dtype=torch.float32) -> Iterator[tuple]:
    """The weight in ``dtype`` and the bias, if there is one, in ``bias_dtype``."""
    yield module.weight.to(dtype), None if module.bias is None else module.bias.to(bias_dtype or torch.float32)
