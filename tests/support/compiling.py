"""torch.compile on a model, as ComfyUI does it."""

from __future__ import annotations

import functools

import pytest
import torch

COMPILER = "aot_eager"  # dynamo's graphs and then the functional ones of AOTAutograd, in twice the time of "eager"


def compiled(model, keys=("diffusion_model",), backend=COMPILER):
    """A clone as TorchCompileModel makes it; the default backend needs no compiler. With other keys, what the node does to
    the whole model is done to its parts."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import TorchCompileModel, skip_torch_compile_dict

    if not can_filter_guards():
        pytest.skip("ComfyUI's TorchCompileModel cannot compile ComfyUI's layers with this torch")
    if tuple(keys) == ("diffusion_model",):
        return TorchCompileModel.execute(model, backend).args[0]
    clone = model.clone(disable_dynamic=True)
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(model=clone, backend=backend, keys=list(keys), options=options)
    return clone


@functools.cache
def can_filter_guards() -> bool:
    """Whether TorchCompileModel can compile ComfyUI's own layers. With torch 2.8 it cannot: where guards are filtered, torch
    reads what each is about, and the guard of ``hasattr(s, "_v")`` (comfy/ops.py) is about what is not there. Without
    the filter each step compiles anew."""
    import comfy.ops
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    layer = comfy.ops.manual_cast.Linear(4, 4, dtype=torch.float16)
    try:
        torch.compile(layer, backend="eager", options={"guard_filter_fn": skip_torch_compile_dict})(torch.ones(2, 4))
    except torch._dynamo.exc.InternalTorchDynamoError:
        return False
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    return True
