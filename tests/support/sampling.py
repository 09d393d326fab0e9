"""Sampling the small models through ComfyUI's own sampler."""

import torch

CONTEXT_WIDTH = {"sdxl": 2048, "qwen_image": 3584, "z_image": 2560}
POOLED_WIDTH = {"flux": 768, "hunyuan_video": 768, "sd3": 2048, "sdxl": 1280}
NEEDS_MASK = ("ltxv", "z_image")


def sample(model, family: str, steps: int = 2) -> torch.Tensor:
    """The latent after a few steps on a seeded prompt and noise, for a family of `support.tiny_models`."""
    import comfy.sample

    generator = torch.Generator().manual_seed(1)
    latent = model.model.latent_format
    shape = (1, latent.latent_channels, *([1] if latent.latent_dimensions == 3 else []), 8, 8)
    context = torch.randn(1, 16, CONTEXT_WIDTH.get(family, 4096), generator=generator)
    pooled = torch.randn(1, POOLED_WIDTH.get(family, 768), generator=generator)
    extra = {"attention_mask": torch.ones(1, 16, dtype=torch.long)} if family in NEEDS_MASK else {}
    cond = [[context, {"pooled_output": pooled, **extra}]]
    noise = torch.randn(shape, generator=generator)
    return comfy.sample.sample(model, noise, steps, 1.0, "euler", "simple", cond, cond, torch.zeros(shape), seed=1)
