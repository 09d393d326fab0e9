"""The attributes of ComfyUI's modules that are read and set here, by name: no other file touches them.

ComfyUI sets most of them from outside of the class or probes for them with ``hasattr``, so that a renamed one raises no
error. Each annotation names the file of ComfyUI that has its attributes; ``tests/support/core_names.py`` reads both
from this source, and the contract test looks every attribute up in that file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import torch
from comfy.quant_ops import QuantizedTensor, get_layout_class

from ....precision.base.patching import Patch

Layer = Annotated[torch.nn.Module, "comfy.ops"]
LayerAttribute = Annotated[str, "comfy.ops"]
Model = Annotated[torch.nn.Module, "comfy.model_base"]
ModelAttribute = Annotated[str, "comfy.model_base"]
PatchedModel = Annotated[torch.nn.Module, "comfy.model_patcher"]
Sampling = Annotated[torch.nn.Module, "comfy.model_sampling"]
Control = Annotated[Any, "comfy.controlnet"]
StepCache = Annotated[Any, "comfy_extras.nodes_easycache"]
PrefixModel = Annotated[torch.nn.Module, "comfy.ldm.qwen_image21.model"]
PrefixOption = Annotated[str, "comfy.ldm.qwen_image21.model"]
CommandLine = Annotated[Any, "comfy.cli_args"]
Prefetching = Annotated[Any, "comfy.model_prefetch"]

FULL_PRECISION: LayerAttribute = "_full_precision_mm"
PRODUCT: LayerAttribute = "_forward"
IN_DYNAMIC_MEMORY: LayerAttribute = "_v"
FORWARDS = ("forward", "forward_comfy_cast_weights", PRODUCT)
CAST_DTYPE: ModelAttribute = "manual_cast_dtype"
PREFIX_CACHE: PrefixOption = "qwen_image21_cache"


class OnlyCalled:
    """A layer without a weight to read: ``linear_input_act`` of ``comfy/ops.py``, in all versions, can only call it."""

    weight = None
    _full_precision_mm = True

    def __init__(self, layer: torch.nn.Module):
        self._layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(x)


PATCH_IN_DYNAMIC_MEMORY = "_lowvram_function"
"""What ComfyUI puts behind a parameter's name for a patch that it runs at each call with dynamic VRAM (``load`` in
comfy/model_patcher.py)."""


def casts_weights(layer: Layer) -> bool:
    """Tell whether a module is one of ComfyUI's operations, which can cast their weights to their input's dtype."""
    return hasattr(layer, "comfy_cast_weights")


def casting(layer: Layer) -> list[Patch]:
    """Return what makes an operation of ComfyUI's cast its weights; nothing where its class does that anyway, and for
    another module."""
    always = getattr(type(layer), "comfy_cast_weights", False)
    return [(layer, "comfy_cast_weights", True)] if casts_weights(layer) and not always else []


def weight_functions(layer: Layer) -> list[Callable]:
    """Return what ComfyUI runs on a layer's weight at each call, such as a LoRA that is not merged."""
    return layer.weight_function


def bias_functions(layer: Layer) -> list[Callable]:
    """Return what ComfyUI runs on a layer's bias at each call."""
    return layer.bias_function


def is_bias_patched(layer: Layer) -> bool:
    """Tell whether ComfyUI changes a layer's bias at each call, with dynamic VRAM too."""
    return bool(layer.bias_function or getattr(layer, f"bias{PATCH_IN_DYNAMIC_MEMORY}", None))


def with_weight_function(layer: Layer, function: Callable) -> Patch:
    """Return what makes ComfyUI run one more function on a layer's weight at each call, after the others."""
    return layer, "weight_function", [*layer.weight_function, function]


def full_precision(layer: Layer) -> Patch:
    """Return what turns off ComfyUI's own quantized matmul in a layer."""
    return layer, "_full_precision_mm", True


def set_full_precision(layer: Layer) -> None:
    """Turn off ComfyUI's own quantized matmul in a layer for good."""
    layer._full_precision_mm = True


def has_product(layer: Layer) -> bool:
    """Tell whether a layer of ComfyUI's has its matmul as a method of its own, as quantized Linears do."""
    return hasattr(layer, "_forward")


def with_product(layer: Layer, product: Callable) -> Patch:
    """Return what makes a quantized Linear multiply by ``product``."""
    return layer, "_forward", product


def forwards_of_class(layer: Layer) -> list[Callable]:
    """List the methods of a layer's class that its call runs through."""
    methods = (getattr(type(layer), name, None) for name in FORWARDS)
    return [method for method in methods if method]


def quantization_format(layer: Layer) -> str:
    """Return ComfyUI's name of the quantization format that a layer was loaded in; "" for none."""
    return getattr(layer, "quant_format", None) or ""


def is_forced_to_cast(layer: Layer) -> bool:
    """Tell whether the model's compute dtype was changed, for which ComfyUI dequantizes the weights of its layers."""
    return getattr(layer, "comfy_force_cast_weights", False)


def not_forced_to_cast(layer: Layer) -> Patch:
    """Return what makes a layer multiply as it is stored though the model's compute dtype was changed."""
    return layer, "comfy_force_cast_weights", False


def dequantizes_any_format(layer: Layer) -> bool:
    """Tell whether full precision holds for every format, as from ComfyUI 0.38 on.

    Before, it holds for those that quantize a layer's input.
    """
    return hasattr(layer, "can_use_quantized_matmul")


def scales_input(layer: Layer) -> bool:
    """Tell whether a layer multiplies its input by a scale of its own before the matmul, as AWQ's do."""
    return hasattr(layer, "pre_quant_scale")


def lie_ready(layer: Layer, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> bool:
    """Tell whether a layer's parameters are on the device, and ComfyUI does nothing to them at a call but a cast."""
    if weight.device != device or (bias is not None and bias.device != device):
        return False
    # nn.Module's own look-up of a name that is not there raises an exception inside, which takes a microsecond.
    return not (IN_DYNAMIC_MEMORY in layer.__dict__ or layer.weight_function or layer.bias_function)


def hold_in_dtype(layer: Layer, name: str, dtype: torch.dtype) -> None:
    """Hold a parameter of a layer in a dtype for good, which dynamic VRAM would else undo at each call by the dtype of
    the file (``archive_model_dtypes`` in comfy/model_management.py)."""
    setattr(layer, name, torch.nn.Parameter(getattr(layer, name).to(dtype), requires_grad=False))
    setattr(layer, f"{name}_comfy_model_dtype", dtype)


def weight_state(model: PatchedModel) -> Any:
    """Return what ComfyUI identifies the patches by that are in a model's weights now."""
    return model.current_weight_patches_uuid


def has_cast_dtype(model: Model) -> bool:
    """Tell whether a model casts its weights to one dtype; text encoders do not."""
    return hasattr(model, "manual_cast_dtype")


def set_cast_dtype(model: Model, dtype: torch.dtype) -> None:
    """Set the dtype that a model casts its weights and inputs to."""
    model.manual_cast_dtype = dtype


def cast_dtype(model: Model) -> torch.dtype:
    """Return the dtype that a model's inputs are cast to now: its manual cast dtype, else that of its weights."""
    return model.manual_cast_dtype or dtype_of_weights(model)


def dtype_of_weights(model: Model) -> torch.dtype:
    """Return the dtype that ComfyUI loaded a model's weights in."""
    return model.get_dtype()


def with_cast_dtype(model: Model, dtype: torch.dtype) -> Patch:
    """Return what makes a model cast its weights and inputs to a dtype."""
    return model, "manual_cast_dtype", dtype


def extra_conditions(model: Model) -> Callable[..., dict]:
    """Return the method that makes a model's conditions of text, once per run."""
    return model.extra_conds


def with_extra_conditions(model: Model, function: Callable[..., dict]) -> Patch:
    """Return what makes a model take its conditions from ``function``."""
    return model, "extra_conds", function


def adapts_text(diffusion_model: Model) -> bool:
    """Tell whether a diffusion model has layers that ComfyUI runs on the text before it calls the model."""
    return hasattr(diffusion_model, "preprocess_text_embeds")


def scaled_input(sampling: Sampling) -> Callable:
    """Return the method that scales a noisy latent for the model."""
    return sampling.calculate_input


def with_scaled_input(sampling: Sampling, function: Callable) -> Patch:
    """Return what makes a model's latent be scaled by ``function``."""
    return sampling, "calculate_input", function


def denoised(sampling: Sampling) -> Callable:
    """Return the method that makes a denoised latent of what the network gives: (noise level, output, noisy latent)."""
    return sampling.calculate_denoised


def set_control_dtype(control: Control, dtype: torch.dtype) -> None:
    """Set the dtype that a ControlNet casts its inputs and weights to."""
    control.manual_cast_dtype = dtype


def forget_call(cache: StepCache) -> None:
    """Let EasyCache take the next call in another dtype or of another size: without metadata it compares neither."""
    cache.state_metadata = None


def empty_prefix_cache(diffusion_model: PrefixModel) -> None:
    """Empty the keys and values of the text that a diffusion model keeps between steps; others keep none."""
    if hasattr(diffusion_model, "reset_prefix_cache"):
        diffusion_model.reset_prefix_cache(diffusion_model.prefix_cache_enabled)


def without_compiler(arguments: CommandLine) -> list[Patch]:
    """Return what turns off ComfyUI's model compiler, which each model asks as its call begins; nothing where there is
    none."""
    return [(arguments, "disable_comfy_compiler", True)] if hasattr(arguments, "disable_comfy_compiler") else []


def close_graph(prefetching: Prefetching) -> None:
    """Close the graph that ComfyUI's model compiler has open on this thread, and forget what it recorded."""
    if hasattr(prefetching, "cleanup_malloc_graph"):
        prefetching.cleanup_malloc_graph()


def is_in_layout(tensor: QuantizedTensor, name: str) -> bool:
    """Tell whether a quantized weight is in the layout that ComfyUI registered under a name."""
    return tensor.layout_cls is get_layout_class(name)


def takes_to_quantize(name: str, parameter: str) -> bool:
    """Tell whether the layout that ComfyUI registered under a name quantizes by a parameter; "" is any."""
    return not parameter or parameter in inspect.signature(get_layout_class(name).quantize).parameters
