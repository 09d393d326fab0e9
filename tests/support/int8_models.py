"""A Wan model in ComfyUI's int8 format, quantized by comfy-kitchen itself."""

from __future__ import annotations

from pathlib import Path

import torch
from comfy import ops as comfy_ops
from comfy.quant_ops import QuantizedTensor
from support import dialects

LAYOUT = "TensorWiseINT8Layout"


def int8(path: Path, weights: dialects.Weights, biases: dialects.Weights, convrot: bool = True) -> Path:
    """``int8_tensorwise``, rotated or not, with a scale per row."""
    tensors = {}
    for layer, weight in weights.items():
        group = dialects.group_of(weight)
        held = QuantizedTensor.from_float(weight, LAYOUT, per_channel=True, convrot=convrot, convrot_groupsize=group)
        rotation = {"convrot": True, "convrot_groupsize": group} if convrot else {}
        marker = dialects.comfy_quant_bytes({"format": "int8_tensorwise", **rotation})
        tensors |= {**held.state_dict(f"{layer}.weight"), f"{layer}.comfy_quant": marker}
    return dialects.save(path, tensors, biases, {"format": "pt"})


def dequantized(path: Path, weights: dialects.Weights, biases: dialects.Weights) -> Path:
    """The same weights as plain fp32 numbers."""
    plain = {}
    for layer, weight in weights.items():
        group = dialects.group_of(weight)
        held = QuantizedTensor.from_float(weight, LAYOUT, per_channel=True, convrot=True, convrot_groupsize=group)
        plain[f"{layer}.weight"] = held.to(torch.float32).dequantize()
    return dialects.save(path, plain, biases, {"format": "pt"})


def layers_of(model) -> dict[str, torch.nn.Module]:
    """Name -> module of the layers whose weight is in int8."""
    return {
        name: module
        for name, module in model.model.diffusion_model.named_modules()
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }


class PastForward(torch.nn.Module):
    """A layer that ComfyUI multiplies past its forward, as in the MLP of MiniMax."""

    def __init__(self, fc2):
        super().__init__()
        self.__dict__["fc2"] = fc2

    def forward(self, x):
        fused = getattr(comfy_ops, "linear_input_act", None)
        return fused(self.fc2, x, "gelu_tanh") if fused else self.fc2(x, input_act="gelu_tanh")
