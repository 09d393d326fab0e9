"""A clone of a model to measure, and a short run of ComfyUI's euler sampler on the user's own
prompt and size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import comfy.sample
import numpy as np
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....precision.base.patching import compile_disabled
from ..accumulation.executor import Accumulation, with_accumulation
from ..comfyui.execution import COMPILE_KWARGS
from ..compute.executor import compute_of, set_compute
from ..replay.call import Call
from ..replay.interceptor import ANALYSIS, GUARD, REPORT, Acting, Stage, put_stage, take_stages
from ..replay.model_compiler import compiler_off

CFG = 4.0
RATIOS = ("downscale_ratio_spacial", "downscale_ratio_temporal")
COMPILE_KEY = "torch.compile"
"""The key of ComfyUI's TorchCompileModel's wrapper on a model
(``comfy_api/torch_helpers/torch_compile.py``)."""


@dataclass(frozen=True)
class Inputs:
    """What a study samples with: conditionings, a latent as nodes pass it, the first of some
    ``seeds`` of the noise, and the sampler's cfg. ``negative``: None samples the positive
    conditioning alone."""

    positive: list
    negative: list | None
    latent: dict
    seed: int
    cfg: float = CFG
    seeds: int = 1


class _CallsInside(Stage, Acting):
    """Make each call of a model inside of a context."""

    def __init__(self, context: Callable[[], AbstractContextManager]):
        self._context = context

    def in_call(self, call: Call) -> Acting:
        return self

    def attempt(self, call: Call) -> AbstractContextManager:
        return self._context()


def watch_sampling(patcher: ModelPatcher, step: Callable, calls: Callable[[], AbstractContextManager]) -> None:
    """Call ``step`` around each step of a sampler, with ComfyUI's executor of it, and make each
    call of the model inside of ``calls``."""
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, ANALYSIS, step)
    put_stage(patcher, ANALYSIS, _CallsInside(calls))


def bare_clone(patcher: ModelPatcher) -> ModelPatcher:
    """Clone a model without torch.compile, guards, which would hide overflows, and a report on its
    runs.

    Its compute plan and accumulation are made anew, so that those of the model learn nothing from
    what is measured.
    """
    clone, compute, accumulation = patcher.clone(), compute_of(patcher), Accumulation.on(patcher)
    if accumulation:
        clone = with_accumulation(clone, accumulation.request)
    if compute:
        set_compute(clone, compute.plan.unwatched)
    take_stages(clone, GUARD, REPORT)
    for kind in list(clone.wrappers):
        clone.remove_wrappers_with_key(kind, COMPILE_KEY)
    clone.model_options.pop(COMPILE_KWARGS, None)
    return clone


def picture_of(patcher: ModelPatcher, latents: list[torch.Tensor]) -> np.ndarray | None:
    """Draw final latents as ComfyUI's previews do (``Latent2RGBPreviewer`` in latent_preview.py),
    without a VAE.

    Returns:
        uint8 (height, width, 3), a pixel for each of the first image or frame; None if ComfyUI does
        not tell the colours of these latents.
    """
    known = patcher.model.latent_format
    if known.latent_rgb_factors is None or latents[0].dim() not in (4, 5):
        return None
    latent = patcher.model.process_latent_in(latents[0].cpu().float())
    if known.latent_rgb_factors_reshape is not None:
        latent = known.latent_rgb_factors_reshape(latent)
    first = latent[0, :, 0] if latent.dim() == 5 else latent[0]
    colours = first.movedim(0, -1) @ torch.tensor(known.latent_rgb_factors)
    if known.latent_rgb_factors_bias is not None:
        colours += torch.tensor(known.latent_rgb_factors_bias)
    return ((colours + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8).numpy()


def sample(
    patcher: ModelPatcher, given: Inputs, steps: int, number: int = 0, image_denoise: float = 1.0
) -> list[torch.Tensor]:
    """Run the sampler and return the final latents, several for a nested latent.

    ``number``: of the seed, from ``given.seed`` on; ``image_denoise``: for a latent that holds an
    image.
    """
    latent = given.latent
    seed = (given.seed + number) % (1 << 64)
    ratios = {name: latent[name] for name in RATIOS if name in latent}
    start = comfy.sample.fix_empty_latent_channels(patcher, latent["samples"], **ratios)
    noise = comfy.sample.prepare_noise(start, seed, latent.get("batch_index"))
    conds = given.positive, given.positive if given.negative is None else given.negative
    cfg = 1.0 if given.negative is None else given.cfg
    denoise = image_denoise if not start.is_nested and torch.count_nonzero(start) else 1.0
    with compile_disabled(), compiler_off, torch.no_grad():
        result = comfy.sample.sample(
            patcher, noise, steps, cfg, "euler", "simple", *conds, start,
            denoise=denoise, noise_mask=latent.get("noise_mask"), disable_pbar=True, seed=seed,
        )  # fmt: skip
    return list(result.unbind()) if result.is_nested else [result]
