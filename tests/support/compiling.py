"""torch.compile on a model, as ComfyUI does it."""

from __future__ import annotations

COMPILER = "aot_eager"  # dynamo's graphs and then the functional ones of AOTAutograd, in twice the time of "eager"


def compiled(model, keys=("diffusion_model",), backend=COMPILER):
    """A clone as TorchCompileModel makes it; the default backend needs no compiler. With other keys, what the node does to
    the whole model is done to its parts."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import TorchCompileModel, skip_torch_compile_dict

    if tuple(keys) == ("diffusion_model",):
        return TorchCompileModel.execute(model, backend).args[0]
    clone = model.clone(disable_dynamic=True)
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(model=clone, backend=backend, keys=list(keys), options=options)
    return clone
