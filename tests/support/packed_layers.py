"""Linear layers as ComfyUI-GGUF has them: bytes of its own as weight, unpacked by the layer, patches kept on the tensor while the model is loaded.

After ``ops.py`` of city96/ComfyUI-GGUF (``GGMLTensor``, ``GGMLLayer``): what it names and what it gives is so there.
"""

from __future__ import annotations

from types import SimpleNamespace

import comfy.lora
import comfy.ops
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

STEP = 1 / 64


class GGMLTensor(torch.Tensor):
    """One byte a number here, 128 for zero."""

    @staticmethod
    def of(values: torch.Tensor) -> GGMLTensor:
        data = (values / STEP).round().add(128).clamp(0, 255).to(torch.uint8).as_subclass(GGMLTensor)
        data.tensor_type, data.tensor_shape, data.patches = SimpleNamespace(name="Q8_0"), values.shape, []
        return data

    def detach(self) -> GGMLTensor:
        return self

    def to(self, *args, **kwargs) -> GGMLTensor:
        moved = super().to(*args, **kwargs)
        moved.__dict__.update(self.__dict__)
        return moved


class Linear(comfy.ops.manual_cast.Linear):
    def is_ggml_quantized(self) -> bool:
        return isinstance(self.weight, GGMLTensor)

    def get_weight(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        patches = tensor.patches if isinstance(tensor, GGMLTensor) else []
        weight = tensor.as_subclass(torch.Tensor).to(dtype)
        weight = (weight - 128) * STEP if isinstance(tensor, GGMLTensor) else weight
        for each, key in patches:
            weight = comfy.lora.calculate_weight(each, weight, key)
        return weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.get_weight(self.bias, input.dtype)
        return torch.nn.functional.linear(input, self.get_weight(self.weight, input.dtype), bias)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = torch.empty(self.weight.shape, device="meta")
        destination[f"{prefix}temp.weight"] = torch.empty(self.weight.shape, device="meta")


def pack(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Pack the Linear layers inside of blocks; returns their values, by layer."""
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, comfy.ops.disable_weight_init.Linear) and "blocks." in name:
            packed = GGMLTensor.of(module.weight.detach().float())
            module.__class__ = Linear
            module.weight = torch.nn.Parameter(packed, requires_grad=False)
            values[name] = module.get_weight(module.weight, torch.float32)
    assert values, "no layer to pack"
    return values


class HangingPatcher(ModelPatcher):
    """LoRAs are hung on a packed weight instead of added to it, as by ComfyUI-GGUF's ``GGUFModelPatcher``."""

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, **kwargs):
        weight = comfy.utils.get_attr(self.model, key)
        if not hasattr(weight, "patches"):
            return super().patch_weight_to_device(key, device_to, inplace_update, **kwargs)
        weight.patches = [(self.patches[key], key)] if key in self.patches else []

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        for parameter in self.model.parameters() if unpatch_weights else ():
            if hasattr(parameter, "patches"):
                parameter.patches = []
        return super().unpatch_model(device_to, unpatch_weights)
