"""Quantized products of layers whose kernels are looked up once: fp8 by fp8, and int8 by int8."""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from comfy.quant_ops import QuantizedTensor

try:
    from comfy_kitchen.scaled_mm_v2 import scaled_mm_v2
except ImportError:
    scaled_mm_v2 = None

from ....precision.base.dtypes import dtype_named
from ....precision.base.modes import FP8, INT8
from ....precision.base.oom import is_torch_oom
from ....precision.formats.fp8 import activation_scale
from ..comfyui.attributes import bias_functions, weight_functions
from ..comfyui.kernels import DATA, INT8_RESULTS, PARAMS, divides_in_fp32, kernel_that_takes, unpacked_weight
from ..comfyui.layers import is_quantized
from ..comfyui.weights import Bound

E4M3 = torch.float8_e4m3fn
LAYOUT = "TensorCoreFP8E4M3Layout"
FP8_RESULT = "bf16"
"""Dtype of fp8 products in an fp32 stream: torch has none with an fp32 result and a bias."""
RESULT = dtype_named(FP8_RESULT)
Refused = dict[tuple[int, ...], str]
"""Weight shape (outputs, K) -> torch's reason for refusing its matmul with fast accumulation."""
_refused: ContextVar[Refused | None] = ContextVar("halfsafe_fp8_fast_accumulation", default=None)
_told: set[str] = set()
logger = logging.getLogger("halfsafe")


@contextlib.contextmanager
def fast_accumulation(refused: Refused) -> Iterator[None]:
    """Context in which this thread's fp8 products use fast accumulation. Products that torch refuses run without it,
    and are listed in ``refused``."""
    token = _refused.set(refused)
    try:
        yield
    finally:
        _refused.reset(token)


def has_changed_weight(module: torch.nn.Module) -> bool:
    """True if a LoRA is added at each call, or has left the weight in 16 bit."""
    return not is_quantized(module) or bool(weight_functions(module) or bias_functions(module))


class Fp8Linear(Bound):
    """Multiply in fp8 with a scale computed from the activation, whatever scale the file states for it.

    Activations are e4m3fn for weights in either format: CUDA does not multiply e5m2 by e5m2 ("Multiplication of two
    Float8_e5m2 matrices is not supported", ``aten/src/ATen/native/cuda/ScaledBlas.cpp``). fp32 activations are rounded
    to bf16 first: torch has no product with an fp32 result and a bias.
    """

    takes_patched = True
    mode = FP8.name

    def otherwise(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        module, dtype = self.module, input.dtype if input.dtype.itemsize == 2 else RESULT
        if not torch.compiler.is_compiling() or has_changed_weight(module):
            self.ran = True
            return type(module).forward(module, input.to(dtype), *args, **kwargs).to(input.dtype)
        rows = input.reshape(-1, input.shape[-1]).to(dtype)
        quantized = QuantizedTensor.from_float(rows, LAYOUT, scale=activation_scale(rows, E4M3))
        bias = None if module.bias is None else module.bias.to(dtype)
        result = F.linear(quantized, module.weight.to(dtype), bias)
        return result.view(*input.shape[:-1], module.weight.shape[0]).to(input.dtype)

    def product(self, x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        data, scale = getattr(weight, DATA), getattr(weight, PARAMS).scale
        dtype = x.dtype if x.dtype.itemsize == 2 else RESULT
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        key = E4M3, dtype, x.get_device()
        found = self.kernels.get(key)
        if found is None:
            kernel = kernel_that_takes("quantize_per_tensor_fp8", x=rows, scale=scale.float(), output_type=E4M3)
            found = self.kernels[key] = kernel, divides_in_fp32(kernel)
        kernel, in_fp32 = found
        of_rows = activation_scale(rows, E4M3, in_fp32)
        left, refused = kernel(rows, of_rows, E4M3), _refused.get()
        how = {"bias": None if bias is None else bias.to(dtype), "out_dtype": dtype}
        ways: list[dict] = [{}] if refused is None else [{"use_fast_accum": True}, {}]
        for more in ways:
            # For AMD comfy-kitchen has a kernel of its own.
            multiply = scaled_mm_v2 if torch.version.hip and not more else torch._scaled_mm
            try:
                result = multiply(left, data.t(), scale_a=of_rows, scale_b=scale, **how, **more)
                return result.view(*x.shape[:-1], len(data)).to(x.dtype)
            except (RuntimeError, TypeError) as error:
                if is_torch_oom(error):
                    raise
                problem = str(error).partition("\n")[0]
            if more and refused is not None:
                refused[tuple(data.shape)] = problem
        if problem not in _told:
            _told.add(problem)
            logger.warning("Halfsafe: an fp8 weight is unpacked, because torch refuses its product: %s", problem)
        return F.linear(x, unpacked_weight(weight, x.dtype), None if bias is None else bias.to(x.dtype))


class Int8Linear(Bound):
    """Multiply in int8 by comfy-kitchen's kernel, which quantizes the activation: ComfyUI's product of an int8 layer.
    The result has the dtype of the activation."""

    takes_patched = True
    mode = INT8.name

    def product(self, x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        data, scale = getattr(weight, DATA), getattr(weight, PARAMS).scale
        dtype, group = x.dtype, self.group
        bias, x = None if bias is None else bias.to(dtype), x.contiguous()
        rotation, key = (bool(group), group or 256), (dtype, x.get_device(), x.dim())
        # What watches operations, such as the guard's search, sees no kernel, but its operator.
        if torch._C._len_torch_dispatch_stack():
            return torch.ops.comfy_kitchen.int8_linear(x, data, scale, bias, INT8_RESULTS.index(dtype), *rotation)
        kernel = self.kernels.get(key)
        if kernel is None:
            names = ("x", "weight", "weight_scale", "bias", "out_dtype", "convrot", "convrot_groupsize")
            call = dict(zip(names, (x, data, scale, bias, dtype, *rotation), strict=True))
            kernel = self.kernels[key] = kernel_that_takes("int8_linear", **call)
        return kernel(x, data, scale, bias, dtype, *rotation)
