"""The attributes of ComfyUI's modules that are read and set here, by name: no other file touches
them.

ComfyUI sets most of them from outside of the class or probes for them with ``hasattr``, so that a
renamed one raises no error. Each annotation names the file of ComfyUI that has its attributes;
``tests/host/graph/test_core_names.py`` looks every attribute up there."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from comfy_aimdo.model_vbar import vbar_fault, vbar_signature_compare, vbar_unpin

from ....precision.base.patching import Patch

Layer = Annotated[torch.nn.Module, "comfy.ops"]
LayerAttribute = Annotated[str, "comfy.ops"]
ModelAttribute = Annotated[str, "comfy.model_base"]
PatchedModel = Annotated[torch.nn.Module, "comfy.model_patcher"]
SamplingAttribute = Annotated[str, "comfy.model_sampling"]
Control = Annotated[Any, "comfy.controlnet"]
StepCacheAttribute = Annotated[str, "comfy_extras.nodes_easycache"]
PrefixModel = Annotated[torch.nn.Module, "comfy.ldm.qwen_image21.model"]
PrefixOption = Annotated[str, "comfy.ldm.qwen_image21.model"]
PoseCache = Annotated[Any, "comfy.ldm.wan.model_animate2"]
PoseOption = Annotated[str, "comfy.ldm.wan.model_animate2"]
FileAttention = Annotated[torch.nn.Module, "comfy.ldm.modules.attention"]
AttentionOption = Annotated[str, "comfy.ldm.modules.attention"]
EncoderAttention = Annotated[torch.nn.Module, "comfy.text_encoders.qwen35"]
CommandLine = Annotated[Any, "comfy.cli_args"]
TrainedPart = Annotated[torch.nn.Module, "comfy_extras.nodes_train"]
PrefetchingAttribute = Annotated[str, "comfy.model_prefetch"]

WEIGHT_FUNCTIONS: LayerAttribute = "weight_function"
BIAS_FUNCTIONS: LayerAttribute = "bias_function"
"""The functions that ComfyUI applies to a layer's weight, and to its bias, in each call, such as a
LoRA that is not merged."""
FORCED_TO_CAST: LayerAttribute = "comfy_force_cast_weights"
"""True on a layer if the model's compute dtype was changed, for which ComfyUI dequantizes the
weights of its layers."""
FULL_PRECISION: LayerAttribute = "_full_precision_mm"
FILE_ASKS_FULL_PRECISION: LayerAttribute = "_full_precision_mm_config"
PRODUCT: LayerAttribute = "_forward"
"""The matmul of a quantized Linear, as a method of its own."""
FORWARDS = ("forward", "forward_comfy_cast_weights", PRODUCT)
INPUT_SCALE: LayerAttribute = "pre_quant_scale"
"""What a layer multiplies its input by before the matmul, as AWQ's do."""
DYNAMIC: LayerAttribute = "_v"
"""A layer's pages in comfy-aimdo's virtual memory, as (owner, address, bytes)."""
PREFETCHED: LayerAttribute = "_prefetch"
CAST_DTYPE: ModelAttribute = "manual_cast_dtype"
EXTRA_CONDITIONS: ModelAttribute = "extra_conds"
MEMORY_ESTIMATE: ModelAttribute = "memory_required"
TEXT_ADAPTER: ModelAttribute = "preprocess_text_embeds"
DENOISED: SamplingAttribute = "calculate_denoised"
SCALES_INPUT: SamplingAttribute = "calculate_input"
"""The method that scales a noisy latent for the model."""
STEP_METADATA: StepCacheAttribute = "state_metadata"
CLOSE_GRAPH: PrefetchingAttribute = "cleanup_malloc_graph"
PREFIX_CACHE: PrefixOption = "qwen_image21_cache"
POSE_CACHE: PoseOption = "animate2_cache"
OVERRIDE: AttentionOption = "optimized_attention_override"
"""The option of a model's call that runs in place of each attention (``wrap_attn``)."""


def casts_weights(layer: Layer) -> bool:
    """True if a module is one of ComfyUI's operations, which can cast their weights to their
    input's dtype."""
    return hasattr(layer, "comfy_cast_weights")


def casting(layer: Layer) -> list[Patch]:
    """Return the patches that make an operation of ComfyUI cast its weights; none if its class
    always casts."""
    always = getattr(type(layer), "comfy_cast_weights", False)
    return [(layer, "comfy_cast_weights", True)] if casts_weights(layer) and not always else []


def is_patched(layer: Layer, name: str) -> bool:
    """True if ComfyUI changes a layer's ``weight`` or ``bias`` at each call, with dynamic VRAM
    too."""
    # ``param_key + "_lowvram_function"`` in comfy/model_patcher.py and comfy/ops.py.
    return bool(getattr(layer, f"{name}_function") or layer.__dict__.get(f"{name}_lowvram_function"))


def quantization_format(layer: Layer) -> str:
    """Return ComfyUI's name of the quantization format that a layer was loaded in; "" for none."""
    return getattr(layer, "quant_format", None) or ""


def set_quantization_format(layer: Layer, name: str, layout: str) -> None:
    """Set the quantization format that a layer multiplies in, and the layout of its weight, as
    loading does."""
    layer.quant_format = name
    layer.layout_type = layout


def lie_ready(layer: Layer, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> bool:
    """True if a layer's parameters are on its input's device, and ComfyUI does nothing to them but
    cast them."""
    device = x.get_device()  # a number is compared in half of the time of a ``torch.device``
    if weight.get_device() != device or (bias is not None and bias.get_device() != device):
        return False
    # nn.Module's own look-up of a name that is not there raises an exception inside, which takes a microsecond.
    return not (DYNAMIC in layer.__dict__ or layer.weight_function or layer.bias_function)


def resident_weights(layer: Layer, device: torch.device) -> tuple | None:
    """Return the weight, the bias and the token of a layer whose pages are in VRAM, pinned until
    ``uncast_bias_weight``; None where ComfyUI has more to do than to find them.

    It finds them as ``cast_modules_with_vbar`` in comfy/ops.py does ("FIXME: add n=1 cache hit fast
    path"), in a third of the functions that ``cast_bias_weight`` runs for it."""
    own = layer.__dict__
    kept = own.get("_v_signature")
    if kept is None or layer.weight_function or layer.bias_function or own.get(PREFETCHED) is not None:
        return None
    weight = layer._v_weight
    if weight.device != device:  # a custom node moved the layer to a CPU
        return None
    found = vbar_fault(layer._v)
    if vbar_signature_compare(found, kept):
        return weight, layer._v_bias, (None, device, None)
    if found is not None:
        vbar_unpin(layer._v)
    return None


def made_when_loaded(layer: Layer) -> tuple[str, ...]:
    """Return the names of the parameters that ComfyUI makes only as it loads a layer: those of each
    Linear under dynamic VRAM."""
    has_bias = getattr(layer, "comfy_need_lazy_init_bias", None)
    return () if has_bias is None else ("weight", "bias")[: 1 + has_bias]


def dtype_made_for(layer: Layer, name: str) -> torch.dtype | None:
    """Return the dtype that ComfyUI made a layer for; None where it noted none."""
    return getattr(layer, f"{name}_comfy_model_dtype", None)


def hold_in_dtype(layer: Layer, name: str, dtype: torch.dtype) -> None:
    """Convert a parameter permanently, and update the dtype that dynamic VRAM restores in each call
    (``archive_model_dtypes`` in comfy/model_management.py)."""
    setattr(layer, name, torch.nn.Parameter(getattr(layer, name).to(dtype), requires_grad=False))
    setattr(layer, f"{name}_comfy_model_dtype", dtype)


def weight_state(model: PatchedModel) -> Any:
    """Return ComfyUI's id of the patches merged into a model's weights."""
    return model.current_weight_patches_uuid


def set_control_dtype(control: Control, dtype: torch.dtype) -> None:
    """Set the dtype that a ControlNet casts its inputs and weights to."""
    control.manual_cast_dtype = dtype


def empty_caches(diffusion_model: PrefixModel, poses: PoseCache | None) -> None:
    """Empty what a diffusion model keeps between steps: keys and values of the text, and what the
    blocks of Wan-Animate-2 keep of the pose video, in ``poses``. Other models keep none."""
    if hasattr(diffusion_model, "reset_prefix_cache"):
        diffusion_model.reset_prefix_cache(diffusion_model.prefix_cache_enabled)
    if poses is not None:
        poses.free()


def runs_again(part: TrainedPart) -> bool:
    """True if the backward pass of Train LoRA runs a part again, which its gradient_checkpointing
    asks for."""
    return hasattr(part, "org_forward")


def kernel_of_file(attention: FileAttention) -> tuple[str, bool] | None:
    """Return the kernel that a model's file asks for in an attention, and whether ComfyUI has it on
    this device; None for other modules, and where the file asks for none."""
    if type(attention).__name__ != "ComfyAttention" or attention.config is None:
        return None
    return attention.config["attention"], attention.function is not None


def caches_in_int8(attention: EncoderAttention, device: torch.device) -> bool:
    """True if an attention of a text encoder that generates keeps its keys and values in int8 on a
    device, as its file or ``--use-ck-attention`` requests (ComfyUI 0.39)."""
    cache_of = getattr(attention, "kv_cache_type", None)
    return callable(cache_of) and "Int8" in cache_of(device, torch.bfloat16).__name__


def compiler_is_off(arguments: CommandLine) -> bool | None:
    """True if ComfyUI's model compiler is turned off; None where this ComfyUI has none."""
    return getattr(arguments, "disable_comfy_compiler", None)


def has_kitchen_attention(arguments: CommandLine) -> bool:
    """True if comfy-kitchen's int8 attention can be chosen for all models."""
    return hasattr(arguments, "use_ck_attention")


def without_compiler(arguments: CommandLine) -> list[Patch]:
    """Return the patches that turn off ComfyUI's model compiler and CUDA graphs, if it has them;
    read in each call."""
    switches = ("disable_comfy_compiler", "disable_cuda_graphs")
    return [(arguments, switch, True) for switch in switches if hasattr(arguments, switch)]
