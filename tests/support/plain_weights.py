"""What the core asks for a layer's weights, for torch's own layers."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_weights(
    module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype, bias_dtype=torch.float32
) -> Iterator[tuple]:
    """The weight in ``dtype`` and the bias, if there is one, in ``bias_dtype``; None: fp32, or as stored in fp16."""
    bias = module.bias
    if bias is not None and (bias_dtype or bias.dtype != torch.float16):
        bias = bias.to(bias_dtype or torch.float32)
    yield module.weight.to(dtype), bias
