"""A clone of a model to measure, and a short run of ComfyUI's euler sampler on the user's own prompt and size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....precision.base.patching import compile_disabled
from ..accumulation.executor import accumulation_of, with_accumulation
from ..comfyui.execution import COMPILE_KWARGS
from ..compute.executor import compute_of, set_compute
from ..replay.call import Call
from ..replay.interceptor import ANALYSIS, GUARD, REPORT, Acting, Stage, put_stage, take_stages
from ..replay.model_compiler import compiler_off

CFG = 4.0
RATIOS = ("downscale_ratio_spacial", "downscale_ratio_temporal")
COMPILE_KEY = "torch.compile"
"""The key of ComfyUI's TorchCompileModel's wrapper on a model (``comfy_api/torch_helpers/torch_compile.py``)."""


class _CallsInside(Stage, Acting):
    """Make each call of a model inside of a context."""

    def __init__(self, context: Callable[[], AbstractContextManager]):
        self._context = context

    def in_call(self, call: Call) -> Acting:
        return self

    def attempt(self, call: Call) -> AbstractContextManager:
        return self._context()


def watch_sampling(patcher: ModelPatcher, step: Callable, calls: Callable[[], AbstractContextManager]) -> None:
    """Call ``step`` around each step of a sampler, with ComfyUI's executor of it, and make each call of the model
    inside of ``calls``."""
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, ANALYSIS, step)
    put_stage(patcher, ANALYSIS, _CallsInside(calls))


def bare_clone(patcher: ModelPatcher) -> ModelPatcher:
    """Clone a model without torch.compile, guards, which would hide overflows, and a report on its runs.

    Its compute plan and accumulation are made anew, so that those of the model learn nothing from what is measured.
    """
    clone, compute, accumulation = patcher.clone(), compute_of(patcher), accumulation_of(patcher)
    if accumulation:
        clone = with_accumulation(clone, accumulation.request)
    if compute:
        set_compute(clone, compute.plan.unwatched)
    take_stages(clone, GUARD, REPORT)
    for kind in list(clone.wrappers):
        clone.remove_wrappers_with_key(kind, COMPILE_KEY)
    clone.model_options.pop(COMPILE_KWARGS, None)
    return clone


def sample(
    patcher: ModelPatcher, positive, negative, latent: dict, seed: int, steps: int, image_denoise: float = 1.0,
    cfg: float = CFG,
) -> list[torch.Tensor]:  # fmt: skip
    """Run the sampler and return the final latents, several for a nested latent.

    ``negative``: None samples the positive conditioning alone; ``image_denoise``: for a latent that holds an image.
    """
    ratios = {name: latent[name] for name in RATIOS if name in latent}
    start = comfy.sample.fix_empty_latent_channels(patcher, latent["samples"], **ratios)
    noise = comfy.sample.prepare_noise(start, seed, latent.get("batch_index"))
    conds = positive, positive if negative is None else negative
    cfg = 1.0 if negative is None else cfg
    denoise = image_denoise if not start.is_nested and torch.count_nonzero(start) else 1.0
    with compile_disabled(), compiler_off(), torch.no_grad():
        result = comfy.sample.sample(
            patcher, noise, steps, cfg, "euler", "simple", *conds, start,
            denoise=denoise, noise_mask=latent.get("noise_mask"), disable_pbar=True, seed=seed,
        )  # fmt: skip
    return list(result.unbind()) if result.is_nested else [result]
