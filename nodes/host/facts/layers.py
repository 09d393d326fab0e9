"""The layers of a model in memory, by name, and what they hold."""

from collections.abc import Iterator

import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential
from comfy.quant_ops import QuantizedTensor

from ....precision.arithmetic.compiling import plain_name
from ....precision.arithmetic.linear import kind_of
from ..core import CAST_DTYPE


def modules_of(model) -> dict[str, torch.nn.Module]:
    """Map names to modules of ComfyUI's model, all of them, as they are named when nothing is compiled."""
    return {plain_name(name): module for name, module in model.diffusion_model.named_modules()}


def matrix_layers(model) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name, module) of the layers that multiply, in model order."""
    for name, module in modules_of(model).items():
        if kind_of(module) and isinstance(getattr(module, "weight", None), torch.Tensor) and module.weight.dim() > 1:
            yield name, module


def layers_of(patcher) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name, module) of every module with a weight."""
    for name, module in modules_of(patcher.model).items():
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            yield name, module


def top_level_parts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Map names to the modules a diffusion model is made of: its blocks, and what is outside of their lists.

    A UNet's blocks are lists themselves, whose items ComfyUI calls one by one.
    """
    parts: dict[str, torch.nn.Module] = {}
    for name, child in model.named_children():
        if isinstance(child, (torch.nn.ModuleList, TimestepEmbedSequential)):
            parts |= {f"{name}.{inner}": module for inner, module in _items(child)}
        elif any(isinstance(module, torch.nn.ModuleList) for module in child.children()):
            parts |= {f"{name}.{inner}": module for inner, module in top_level_parts(child).items()}
        else:
            parts[name] = child
    return {plain_name(name): module for name, module in parts.items()}


def _items(container: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, item in container.named_children():
        if isinstance(item, TimestepEmbedSequential):
            yield from ((f"{name}.{inner}", module) for inner, module in item.named_children())
        else:
            yield name, item


def is_quantized(module: torch.nn.Module) -> bool:
    """Tell whether a module's weight is in one of ComfyUI's quantized formats."""
    return isinstance(getattr(module, "weight", None), QuantizedTensor)


def activation_dtype(patcher) -> torch.dtype:
    """Return the dtype of the model's activations: its manual cast dtype, else that of its weights."""
    return patcher.get_model_object(CAST_DTYPE) or patcher.model.get_dtype()
