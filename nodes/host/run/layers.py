"""The layers of a model in memory: which there are, and how each multiplies."""

from collections.abc import Iterator

import torch

from ....precision.dtypes import name_of
from .compute import compute_of
from .modules import modules_of

_FP8_FORMATS = ("float8_e4m3fn", "float8_e5m2")


def stream_dtype(patcher) -> torch.dtype:
    """The dtype the model's activations have: its manual cast dtype, else that of its weights."""
    return patcher.get_model_object("manual_cast_dtype") or patcher.model.get_dtype()


def compute_name(patcher) -> str:
    """The compute option a model runs with."""
    compute = compute_of(patcher)
    return compute.plan.choice.used if compute else name_of(stream_dtype(patcher))


def settings_of(patcher) -> tuple:
    """What a call's arithmetic depends on beside the weights: the compute plan and the stream's dtype."""
    return compute_of(patcher), name_of(stream_dtype(patcher))


def layers_of(patcher) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, module) of every module with a weight."""
    for name, module in modules_of(patcher.model).items():
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            yield name, module


def modes_of(patcher) -> dict[str, str]:
    """Layer name -> the report's mode, from the model's plan and what its calls have shown."""
    compute, stream = compute_of(patcher), name_of(stream_dtype(patcher))
    planned = compute.modes(patcher.model) if compute else {}
    return {
        name: planned.get(name) or ("fp8" if _multiplies_in_fp8(patcher, name, module) else stream)
        for name, module in layers_of(patcher)
    }


def _multiplies_in_fp8(patcher, name: str, module: torch.nn.Module) -> bool:
    if getattr(module, "quant_format", None) not in _FP8_FORMATS or getattr(module, "comfy_force_cast_weights", False):
        return False
    return not patcher.get_model_object(f"diffusion_model.{name}._full_precision_mm")
