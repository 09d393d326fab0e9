"""torch.compile on a model, as ComfyUI does it."""

COMPILER = "aot_eager"


def compiled(model, keys=("diffusion_model",), backend=COMPILER):
    """A clone as TorchCompileModel makes it; the default backend needs no compiler."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = model.clone(disable_dynamic=True)
    set_torch_compile_wrapper(model=clone, backend=backend, keys=list(keys))
    return clone
