"""The layers of a model in memory, by name, and what they hold."""

import re
from collections.abc import Iterator

import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential
from comfy.quant_ops import QuantizedTensor

from ....precision.base.layer_names import plain_name
from ....precision.base.layers import kind_of
from .attributes import CAST_DTYPE

CALLED_BY_ITEMS = {
    ("comfy.ldm.cosmos.predict2", "t_embedder"),
    *(("comfy.ldm.cosmos.blocks", f"to_{part}") for part in "qkv"),
    ("comfy.ldm.omnigen.omnigen2", "to_out"),
}
"""(where a class of ComfyUI's is, attribute) of each ``Sequential`` whose items its code calls one
by one."""
DIFFUSION_MODEL = "diffusion_model."
"""What names of a model's layers begin with in ComfyUI's ``BaseModel`` and in the keys of
patches."""
CAST_TO_FP32 = "fp32"
OWN_WEIGHT = "weight"
CASTS = {
    "comfy.ldm.wan": (re.compile(r"(\w+_)?patch_embedding(_\w+)?"), CAST_TO_FP32),
    "comfy.ldm.minimax": (
        re.compile(r"(video|audio)_patch_proj|time_embedder(\..+)?|(.+\.)?(video|audio)_out"),
        CAST_TO_FP32,
    ),
    "comfy.ldm.audio": (re.compile(r"timestep_features"), CAST_TO_FP32),
    "comfy.ldm.cogvideo": (re.compile(r"patch_embed\.(text_)?proj"), OWN_WEIGHT),
}
"""Where ComfyUI has a model's class -> names of layers, and what its code gives them: fp32, or
their weight's dtype."""


def modules_of(model) -> dict[str, torch.nn.Module]:
    """Map names to modules of ComfyUI's model, all of them, as they are named when nothing is
    compiled."""
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
    """Map names to the modules a diffusion model is made of: its blocks, and what is outside of
    their lists.

    All of them are called: of a list, whose items ComfyUI calls one by one, they are the items, and
    so on in lists of lists."""
    parts: dict[str, torch.nn.Module] = {}
    for name, child in model.named_children():
        if is_called_by_items(child, model, name):
            parts |= _items(name, child)
        elif any(is_called_by_items(module, child, inner) for inner, module in child.named_children()):
            parts |= {f"{name}.{inner}": module for inner, module in top_level_parts(child).items()}
        else:
            parts[name] = child
    return {plain_name(name): module for name, module in parts.items()}


def is_called_by_items(module: torch.nn.Module, holder: torch.nn.Module, name: str) -> bool:
    """True if a module is never called itself: it has no forward, as a ``ModuleList``, or is called
    item by item, as a UNet's blocks and ``t_embedder`` of Cosmos 2
    (``comfy/ldm/cosmos/predict2.py``)."""
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, TimestepEmbedSequential)):
        return True
    places = (base.__module__ for base in type(holder).__mro__)
    return type(module) is torch.nn.Sequential and any((place, name) in CALLED_BY_ITEMS for place in places)


def _items(name: str, container: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found: dict[str, torch.nn.Module] = {}
    for inner, item in container.named_children():
        inner = f"{name}.{inner}"
        found |= _items(inner, item) if is_called_by_items(item, container, "") else {inner: item}
    return found


def is_quantized(module: torch.nn.Module) -> bool:
    """True if a module's weight is in one of ComfyUI's quantized formats."""
    return isinstance(getattr(module, "weight", None), QuantizedTensor)


def activation_dtype(patcher) -> torch.dtype:
    """Return the dtype of the model's activations: its manual cast dtype, else that of its
    weights."""
    return patcher.get_model_object(CAST_DTYPE) or patcher.model.get_dtype()


def own_cast(model: torch.nn.Module, name: str) -> str:
    """Return ``fp32`` or ``OWN_WEIGHT`` if the code around a layer casts its input to that dtype;
    empty if not."""
    for base in type(model).__mro__:
        names, cast = CASTS.get(base.__module__.rpartition(".")[0], (None, ""))
        if names and names.fullmatch(name):
            return cast
    return ""
