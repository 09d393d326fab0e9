"""Stand-ins for packs with code and layers of their own in a model, and for one whose samplers compute in float64, in a folder of packs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from comfy.patcher_extension import PatcherInjection


def stated_dtype(model) -> torch.dtype:
    """The dtype in which packs make their own layers for a model."""
    return model.get_model_object("manual_cast_dtype") or model.model.get_dtype()


def wrapper(model):
    """A model function wrapper, as of packs that rescale the result."""
    clone = model.clone()
    clone.set_model_unet_function_wrapper(
        lambda apply, given: apply(given["input"], given["timestep"], **given["c"]) * 0.6
    )
    return clone


def _layer(dtype: torch.dtype, width: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(width, width, bias=False)
    layer.weight.data = torch.randn(width, width, generator=torch.Generator().manual_seed(7)) * width**-0.5
    return layer.to(dtype)


def _beside(forward: Callable, layer: torch.nn.Linear) -> Callable:
    """A block's forward, with the layer's result added to the first of its results."""

    def run(*args, **kwargs):
        result = forward(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        first = first + layer(first)
        return (first, *result[1:]) if isinstance(result, tuple) else first

    return run


def block(model, name: str, width: int):
    """As PuLID for Flux: a block's forward replaced, with layers in the dtype that the model states."""
    clone, module = model.clone(), model.model.diffusion_model.get_submodule(name)
    forward = _beside(type(module).forward.__get__(module), _layer(stated_dtype(model), width))
    clone.add_object_patch(f"diffusion_model.{name}.forward", forward)
    return clone


def injected(model, name: str, width: int):
    """As AnimateDiff: the same, injected while the model runs."""
    clone, module = model.clone(), model.model.diffusion_model.get_submodule(name)
    layer = _layer(stated_dtype(model), width)

    def inject(patcher):
        module.forward = _beside(module.forward, layer)

    def eject(patcher):
        del module.forward

    clone.set_injections("fixed_layer", [PatcherInjection(inject, eject)])
    return clone


def in_float64(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Euler's steps as RES4LYF makes them: in float64."""
    x = x.double()
    for sigma, after in itertools.pairwise(sigmas):
        denoised = model(x, sigma * x.new_ones([len(x)]), **(extra_args or {}))
        x = x + (x - denoised) / sigma * (after - sigma)
    return x
