"""How the layers of ComfyUI's models multiply: what ``PlannedLayers`` asks for, in ComfyUI's terms."""

from collections.abc import Callable

import torch

from ....precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from ....precision.arithmetic.linear import WeightProvider
from ....precision.arithmetic.planned import LayerHost
from ....precision.base.dtypes import dtype_named
from ....precision.base.flags import flags_set
from ....precision.base.modes import FP8, FP16_WIDE, FP32
from ....precision.base.patching import Patch
from ....precision.formats.fp8 import activation_scale
from ....precision.plan.compute import ComputeDecision
from ....precision.plan.fp16_results import largest_fp16_result
from ..comfyui.attributes import bias_functions, casting, not_forced_to_cast, weight_functions
from ..comfyui.layers import is_quantized
from ..comfyui.weights import exchanged, has_own_forward, only_multiplies, quantized_weights, weights_of
from .fp8_product import fp8_product

FP8_RESULT = "bf16"
"""What fp8 products give an fp32 stream: torch has none with an fp32 result and a bias."""


class Switching:
    """Say whether torch's flags are switched layer by layer in the calls of a model."""

    by_layer = True


class CoreLayers(LayerHost):
    """Say how a model's layers multiply.

    Args:
        activations: the model's activation dtype.
        switching: whether a layer may switch flags for itself.
    """

    def __init__(self, activations: str, switching: Switching):
        self._activations = activations
        self._switching = switching

    def weights(self, layer: torch.nn.Module) -> WeightProvider | None:
        """Return ComfyUI's cast for a layer that does no more than multiply."""
        return weights_of(layer) if only_multiplies(layer) else None

    def own_forward(self, layer: torch.nn.Module, mode: str) -> tuple[Callable[..., torch.Tensor], torch.dtype]:
        """Return the forward that is on the layer now, and a dtype for its input: ComfyUI's classes cast their weights
        to that.

        It is read inside of accumulation's wrapper, so it is accumulation's where that has one (``wrappers.PLACES``).
        """
        if type(layer).forward.__module__.startswith("torch.nn."):
            return layer.forward, layer.weight.dtype  # torch's own classes cannot cast their weights
        if mode == FP8.name:  # a LoRA in bypass mode has put its own forward around the layer's
            mode = FP8_RESULT if self._activations == FP32.name else self._activations
        return layer.forward, torch.float32 if mode == FP16_WIDE.name else dtype_named(mode)

    def product(self, layer: torch.nn.Module, mode: str) -> Callable[..., torch.Tensor] | None:
        """Return the fp8 product of a layer whose forward nobody has exchanged."""
        return Fp8Linear(layer).__call__ if mode == FP8.name and not has_own_forward(layer) else None

    def largest_fp16(self, name: str, decision: ComputeDecision) -> float | None:
        """Return up to which magnitude a result that is not added to the residual stream may be fp16."""
        return None if decision.stream == FP32.name else largest_fp16_result(name)

    def patches(self, layer: torch.nn.Module, decision: ComputeDecision, forward: Callable) -> list[Patch]:
        """Return the patches that take all of a layer's products through ``forward`` and have ComfyUI cast its
        weights."""
        if decision.sums:
            forward = SumsByRule(decision.sums, forward, self._switching).__call__
        cast = casting(layer)
        return [*exchanged(layer, forward), *cast]


class Fp8Linear:
    """Run ComfyUI's fp8 Linear with the activation scale taken from the activation, instead of 1.0 or the file's.

    Activations are in e4m3fn with weights in either format: CUDA multiplies no e5m2 by e5m2 ("Multiplication of two
    Float8_e5m2 matrices is not supported", ``aten/src/ATen/native/cuda/ScaledBlas.cpp``).
    """

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply the module's input; fp32 is multiplied into bf16 (``FP8_RESULT``)."""
        module = self.module
        dtype = dtype_named(FP8_RESULT) if x.dtype == torch.float32 else x.dtype
        if has_changed_weight(module):
            return type(module).forward(module, x.to(dtype))
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        scale = activation_scale(rows, torch.float8_e4m3fn)
        with quantized_weights(module, rows) as (weight, bias):
            return fp8_product(rows, scale, weight, bias).reshape(*x.shape[:-1], weight.shape[0])

    def __repr__(self) -> str:
        return "Fp8Linear(e4m3)"


class SumsByRule:
    """Run a forward with the accumulation that a rule asks for.

    Not where flags are switched for whole calls: they are the whole process's, so that another thread's layers would
    have it too, and a compiled graph cannot switch them.
    """

    def __init__(self, sums: str, inner: Callable[..., torch.Tensor], switching: Switching):
        self.sums = sums
        self.inner = inner
        self._switching = switching

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        if torch.compiler.is_compiling() or not self._switching.by_layer:
            return self.inner(*args, **kwargs)
        with flags_set({FP16_ACCUMULATION: self.sums == "fp16"}):
            return self.inner(*args, **kwargs)

    def __repr__(self) -> str:
        return f"SumsByRule({self.sums})"


def has_changed_weight(module: torch.nn.Module) -> bool:
    """Tell whether a LoRA is added at each call, or has left the weight in 16 bit."""
    return not is_quantized(module) or bool(weight_functions(module) or bias_functions(module))


def int8_patches(module: torch.nn.Module, decision: ComputeDecision) -> list[Patch]:
    """Make ComfyUI's int8 layer multiply in int8 though the model's compute dtype was changed, which would else
    dequantize it (``comfy_force_cast_weights``).

    With an fp32 result its input is cast: a result in the dtype of a 16-bit input would be rounded, or past fp16's
    range, before it is widened.
    """
    kept = [not_forced_to_cast(module)]
    forward = module.forward
    return [*kept, (module, "forward", lambda x: forward(x.float()))] if decision.stream == FP32.name else kept
