"""One call of a loaded diffusion model on seeded inputs, the same for every way of loading it."""

import torch


def denoise(model, seed: int = 3, context_width: int = 4096, channels: int = 16) -> torch.Tensor:
    """The fp32 output of one denoiser call of a Wan-shaped ``model`` (a ModelPatcher): ``(1, channels, 1, 8, 8)``."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, channels, 1, 8, 8, generator=generator)
    context = torch.randn(1, 12, context_width, generator=generator)
    with torch.inference_mode():
        return model.model.apply_model(x, torch.tensor([0.7]), c_crossattn=context).float()
