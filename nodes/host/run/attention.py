"""ComfyUI's attention override: what stands in front of a model's attention function, and of an earlier override."""

import functools
from collections.abc import Callable

import comfy.ldm.modules.attention
import torch

OVERRIDE = "optimized_attention_override"
UNFUSED = ("attention_basic", "attention_split", "attention_sub_quad")


def overridden(options: dict, run: Callable) -> dict:
    """``transformer_options`` whose attentions are ``run(function, attention, *args, **kwargs)``.

    ``function`` is ComfyUI's own; ``attention`` is what would run in its place otherwise: itself, or an earlier override.
    """
    previous = options.get(OVERRIDE)

    def override(function, *args, **kwargs):
        attention = function if previous is None else functools.partial(previous, function)
        return run(function, attention, *args, **kwargs)

    return {**options, OVERRIDE: override}


def is_fused(function: Callable) -> bool:
    """Whether an attention keeps its scores in fp32 registers."""
    return function.__name__ not in UNFUSED


def full_precision_attention(function: Callable) -> Callable:
    """An attention that takes fp32 and keeps its precision: itself, or ComfyUI's default for a kernel of 16 bit or less."""
    if function.__name__ in (*UNFUSED, "attention_pytorch"):
        return function
    return comfy.ldm.modules.attention.attention_pytorch


def in_one_dtype(attention: Callable, q, k, v, *args, **kwargs) -> torch.Tensor:
    """Attention in the widest dtype of its operands, where only some come from a widened stream."""
    widest = max((q.dtype, k.dtype, v.dtype), key=lambda dtype: dtype.itemsize)
    return attention(q.to(widest), k.to(widest), v.to(widest), *args, **kwargs)
