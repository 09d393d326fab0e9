"""The modules of a model in memory: by name, whose forward they run, and how the weights of one are had."""

import contextlib
from collections.abc import Callable, Iterator

import comfy.ops
import torch

from ....precision.arithmetic.linear import kind_of
from ....precision.arithmetic.patching import Patch


def plain_name(name: str) -> str:
    """A module's name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def modules_of(model) -> dict[str, torch.nn.Module]:
    """Name -> module of everything in ComfyUI's model, by the names it has when nothing is compiled."""
    return {plain_name(name): module for name, module in model.diffusion_model.named_modules()}


def matrix_layers(model) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, module) of the layers that multiply, in model order."""
    for name, module in modules_of(model).items():
        if kind_of(module) and isinstance(getattr(module, "weight", None), torch.Tensor) and module.weight.dim() > 1:
            yield name, module


def has_own_forward(module: torch.nn.Module) -> bool:
    """Whether something other than its class gave this module its forward, such as a LoRA in bypass mode."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def exchanged(module: torch.nn.Module, forward: Callable) -> list[Patch]:
    """Patches that make a layer multiply by ``forward`` alone: not in fp8 on its own, and not past its forward, as
    ComfyUI from 0.38 does in fp16 while products sum in fp16."""
    return [(module, "forward", forward), (module, "_full_precision_mm", True)]


def only_multiplies(module: torch.nn.Module) -> bool:
    """Whether the module does no more than cast its weights and multiply: ComfyUI's and torch's own classes."""
    if has_own_forward(module) or hasattr(module, "pre_quant_scale") or kind_of(module) is None:
        return False
    methods = (getattr(type(module), name, None) for name in ("forward", "forward_comfy_cast_weights", "_forward"))
    return all(method.__module__.startswith((comfy.ops.__name__, "torch.nn.")) for method in methods if method)


def weights_of(module: torch.nn.Module) -> Callable:
    """What gives such a module's weight in a dtype, and its bias in fp32, as a context."""
    return core_weights if hasattr(module, "comfy_cast_weights") else torch_weights


@contextlib.contextmanager
def core_weights(module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple]:
    """The module's weight in ``dtype`` and bias in fp32 through ComfyUI's cast: offload, LoRA and quantization included."""
    comfy.ops.run_every_op()
    weight, bias, stream = comfy.ops.cast_bias_weight(
        module, dtype=dtype, device=x.device, bias_dtype=torch.float32, offloadable=True
    )
    try:
        yield weight, bias
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


@contextlib.contextmanager
def torch_weights(module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple]:
    """The same for a module of torch's own classes, which custom model code may hold."""
    bias = None if module.bias is None else module.bias.to(x.device, torch.float32)
    yield module.weight.to(x.device, dtype), bias
