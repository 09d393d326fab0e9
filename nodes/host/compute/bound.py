"""Layers that multiply by a quantized weight as it is stored: in fp8, and in int8."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from comfy.quant_ops import QuantizedTensor

from ....precision.base.dtypes import dtype_named, name_of
from ....precision.base.modes import FP8, INT8, ModeName
from ....precision.formats.format import Format
from ....precision.formats.fp8 import FP8_RESULT, OF_INPUTS, activation_scale
from ..comfyui.attributes import BIAS_FUNCTIONS, WEIGHT_FUNCTIONS
from ..comfyui.kernels import DATA, PARAMS, kernel_that_takes
from ..comfyui.layers import is_quantized
from ..comfyui.weights import Bound, multiplies_in_fp8

LAYOUT = "TensorCoreFP8E4M3Layout"


def has_changed_weight(module: torch.nn.Module) -> bool:
    """True if a LoRA is added at each call, or has left the weight in 16 bit."""
    unpacked = not (is_quantized(module) or multiplies_in_fp8(module))
    return unpacked or bool(getattr(module, WEIGHT_FUNCTIONS) or getattr(module, BIAS_FUNCTIONS))


class Int8Linear(Bound):
    """Multiply in int8, as ComfyUI multiplies by an int8 weight: by the product of the weight's
    format."""

    takes_patched = True
    as_stored: ModeName = INT8.name

    @property
    def mode(self) -> str:
        """Mode of the product, or the dtype that the last call unpacked the weight to."""
        return name_of(self.ran) if isinstance(self.ran, torch.dtype) else self.as_stored

    def _product(self, format: Format, x: torch.Tensor, weight: QuantizedTensor) -> Callable[..., torch.Tensor]:
        data, scale = getattr(weight, DATA), getattr(weight, PARAMS).scale
        return partial(format.apply, format.kernels_for(kernel_that_takes, x, data, scale, self.group))


class Fp8Linear(Int8Linear):
    """Multiply in fp8, with a scale computed from the input."""

    as_stored = FP8.name

    def otherwise(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        module, dtype = self.module, input.dtype if input.dtype.itemsize == 2 else dtype_named(FP8_RESULT)
        if multiplies_in_fp8(module) or not torch.compiler.is_compiling() or has_changed_weight(module):
            self.ran = dtype if has_changed_weight(module) or is_quantized(module) else True
            return type(module).forward(module, input.to(dtype), *args, **kwargs).to(input.dtype)
        rows = input.reshape(-1, input.shape[-1]).to(dtype)
        quantized = QuantizedTensor.from_float(rows, LAYOUT, scale=activation_scale(rows, OF_INPUTS))
        bias = None if module.bias is None else module.bias.to(dtype)
        result = F.linear(quantized, module.weight.to(dtype), bias)
        return result.view(*input.shape[:-1], module.weight.shape[0]).to(input.dtype)


AS_STORED: dict[str, type[Bound]] = {"float8_e4m3fn": Fp8Linear, "int8_tensorwise": Int8Linear}
"""ComfyUI's names of formats -> what multiplies by their weights as they are stored."""
