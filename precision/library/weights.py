"""Weights of plain torch modules in a storage dtype, and the way back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..amax import amax
from ..dtypes import FP8_NAMES, FP16_MAX, dtype_named
from ..errors import HalfsafeError
from ..formats.quantize import dequantize, quantize


@dataclass(frozen=True)
class Original:
    """A weight before it was exchanged: ``data`` is the parameter itself, a host copy of a device's, or None."""

    data: torch.Tensor | None
    device: torch.device
    dtype: torch.dtype
    requires_grad: bool


class StoredWeights:
    """The weights of layers in their storage dtypes, and what they were before."""

    def __init__(self, keep: bool):
        self.keep = keep
        self.scales: dict[torch.nn.Module, torch.Tensor] = {}
        self.originals: dict[torch.nn.Module, Original] = {}

    def exchange(self, name: str, layer: torch.nn.Module, storage: str) -> str | None:
        """Store a layer's weight in another dtype, or say why it stays as it is."""
        weight, dtype = layer._parameters["weight"], dtype_named(storage)
        largest = amax(weight).item()
        if not largest < float("inf"):
            raise HalfsafeError(f"{name}.weight holds NaN or Inf.", "Its file is damaged, or an earlier step overflowed.")
        if storage == "fp16" and largest > FP16_MAX:
            return f"values up to {largest:.3g} exceed fp16's {FP16_MAX:.0f}"
        self.originals[layer] = Original(self._kept(weight), weight.device, weight.dtype, weight.requires_grad)
        data = weight.to(dtype)
        if storage in FP8_NAMES:
            quantized = quantize(weight, dtype, largest)
            data, self.scales[layer] = quantized.data, quantized.scale.to(weight.device)
        layer._parameters["weight"] = torch.nn.Parameter(data, requires_grad=False)
        return None

    def _kept(self, weight: torch.nn.Parameter) -> torch.Tensor | None:
        if not self.keep:
            return None
        return weight if weight.device.type == "cpu" else weight.detach().cpu()

    def put_back(self) -> None:
        """Give every layer its original weight where it was kept, else what its storage dtype holds of it."""
        for layer, original in self.originals.items():
            data = original.data
            if data is None:
                data = self.weight(layer, original.dtype).detach()
            if not isinstance(data, torch.nn.Parameter):
                data = torch.nn.Parameter(data.to(original.device), original.requires_grad)
            layer._parameters["weight"] = data
        self.originals.clear()
        self.scales.clear()

    @contextmanager
    def lend(self, module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple]:
        """Give a layer's weight in ``dtype`` and its bias in fp32, both on the input's device."""
        bias = None if module.bias is None else module.bias.to(x.device, torch.float32)
        yield self.weight(module, dtype).to(x.device), bias

    def weight(self, layer: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
        """Return a layer's weight in ``dtype``."""
        weight, scale = layer.weight, self.scales.get(layer)
        return weight.to(dtype) if scale is None else dequantize(weight, scale.to(weight.device), dtype)
