"""Stand-ins for packs that keep something between steps, each in the way of a real one, in a folder of packs.

``PACKS``: name -> what gives a model with that pack on it. Each begins anew with a sampler's run, as the real ones do.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
from comfy.patcher_extension import WrappersMP

STEPS = 3
"""Of so many calls a cache makes one."""


def is_first(options: dict) -> bool:
    return bool(options["sigmas"][0] >= options["sample_sigmas"][0])


class Kept:
    """What a cache keeps: how often it was asked, and what the model added to its input when it ran last."""

    def __init__(self):
        self.count, self.added = 0, None

    def through(self, x, compute):
        due, self.count = self.count % STEPS == 0 or self.added is None, self.count + 1
        if due:
            result = compute()
            self.added = result - x
        return x + self.added.to(x.dtype)


def teacache(model):
    """A forward in the place of the diffusion model's, whose state is an attribute of it."""
    module = model.model.diffusion_model
    own = type(module).forward.__get__(module)

    def forward(x, *args, transformer_options, **kwargs):
        if is_first(transformer_options):
            module.teacache_state = Kept()
        return module.teacache_state.through(
            x, lambda: own(x, *args, transformer_options=transformer_options, **kwargs)
        )

    clone = model.clone()
    clone.add_object_patch("diffusion_model.forward", forward)
    return clone


def magcache(model):
    """A wrapper of the diffusion model with a closure."""
    kept = Kept()

    def wrapper(executor, x, timestep, *args, **kwargs):
        nonlocal kept
        if is_first(kwargs.get("transformer_options") or next(each for each in args if isinstance(each, dict))):
            kept = Kept()
        return kept.through(x, lambda: executor(x, timestep, *args, **kwargs))

    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "magcache", wrapper)
    return clone


class CacheDiT:
    """Counts calls for itself and begins anew in a wrapper around the sampler's run."""

    def __init__(self):
        self.kept = Kept()

    def run(self, executor, *args, **kwargs):
        self.kept = Kept()
        return executor(*args, **kwargs)

    def call(self, executor, x, *args, **kwargs):
        return self.kept.through(x, lambda: executor(x, *args, **kwargs))


def cache_dit(model):
    clone, cache = model.clone(), CacheDiT()
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "cache_dit", cache.run)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "cache_dit", cache.call)
    return clone


def wavespeed(model):
    """A model function wrapper that exchanges a block's forward while it calls the model."""
    kept = {}
    block = model.model.diffusion_model.blocks[1]

    def wrapper(apply_model, given):
        if is_first(given["c"]["transformer_options"]):
            kept.update(state=Kept())
        own = block.forward
        with patch.object(
            block, "forward", lambda x, *args, **kwargs: kept["state"].through(x, lambda: own(x, *args, **kwargs))
        ):
            return apply_model(given["input"], given["timestep"], **given["c"])

    clone = model.clone()
    clone.set_model_unet_function_wrapper(wrapper)
    return clone


PACKS = {"TeaCache": teacache, "MagCache": magcache, "CacheDiT": cache_dit, "WaveSpeed": wavespeed}


class Adapter:
    """A patch as IP-Adapters have: layers in the model's dtype beside a block's own, a weight that falls with each call."""

    def __init__(self, dtype):
        self.image = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(6)).to(dtype)
        self.calls = 0

    def __call__(self, q, k, v, extra_options):
        from comfy.ldm.modules.attention import optimized_attention

        self.calls = 1 if is_first(extra_options) else self.calls + 1
        weight = torch.randn(k.shape[-1], 32, generator=torch.Generator().manual_seed(7)) / 6
        image = torch.nn.functional.linear(self.image, weight.to(self.image.dtype)).repeat(len(q), 1, 1)
        result = optimized_attention(q, k, v, extra_options["n_heads"])
        return result + optimized_attention(q, image, image, extra_options["n_heads"]) / self.calls


def ip_adapter(model, dtype):
    clone = model.clone()
    clone.set_model_attn2_replace(Adapter(dtype), "middle", 0, 0)
    return clone
