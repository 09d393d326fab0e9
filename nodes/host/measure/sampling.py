"""A short run of ComfyUI's euler sampler, for what is measured on a user's own prompt and size."""

from typing import TYPE_CHECKING

import comfy.sample
import torch

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

CFG = 4.0
RATIOS = ("downscale_ratio_spacial", "downscale_ratio_temporal")


def sample(
    patcher: "ModelPatcher", positive, negative, latent: dict, seed: int, steps: int, image_denoise: float = 1.0
) -> list[torch.Tensor]:
    """Run the sampler and return the final latent, one for each part of a nested one.

    Args:
        negative: conditioning for guidance; None samples the positive one alone.
        latent: as the KSampler takes it; an empty one gets the size of the model's latents, by the ratios it carries.
        image_denoise: denoise for a latent that holds an image.
    """
    ratios = {name: latent[name] for name in RATIOS if name in latent}
    start = comfy.sample.fix_empty_latent_channels(patcher, latent["samples"], **ratios)
    noise = comfy.sample.prepare_noise(start, seed, latent.get("batch_index"))
    conds = positive, positive if negative is None else negative
    cfg = 1.0 if negative is None else CFG
    denoise = image_denoise if not start.is_nested and torch.count_nonzero(start) else 1.0
    result = comfy.sample.sample(
        patcher, noise, steps, cfg, "euler", "simple", *conds, start,
        denoise=denoise, noise_mask=latent.get("noise_mask"), disable_pbar=True, seed=seed,
    )  # fmt: skip
    return list(result.unbind()) if result.is_nested else [result]
