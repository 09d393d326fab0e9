"""One call of a loaded diffusion model on seeded inputs, the same for every way of loading it."""

import torch


def denoise(model) -> torch.Tensor:
    """The fp32 output of one denoiser call of a Wan-shaped ``model`` (a ModelPatcher): ``(1, 16, 1, 8, 8)``.

    As in ComfyUI's sampler: the model is loaded and its wrappers are in the transformer options.
    """
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    model.pre_run()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 16, 1, 8, 8, generator=generator)
    context = torch.randn(1, 12, 4096, generator=generator)
    options = transformer_options(model)
    try:
        with torch.inference_mode():
            return model.model.apply_model(
                x, torch.tensor([0.7]), c_crossattn=context, transformer_options=options
            ).float()
    finally:
        model.cleanup()


def transformer_options(model) -> dict:
    """A model's transformer options with its wrappers and callbacks, as ComfyUI's sampler prepares them."""
    import comfy.patcher_extension

    options = model.model_options["transformer_options"].copy()
    merge = comfy.patcher_extension.merge_nested_dicts
    for name, values in (("wrappers", model.wrappers), ("callbacks", model.callbacks)):
        options[name] = merge(options.get(name, {}).copy(), values, copy_dict1=False)
    return options
