"""Matmuls and convolutions with fp16 operands, fp32 accumulation and fp32 results, which cannot
overflow.

``fp16_wide``: the operand fits fp16. ``fp16_scaled``: the operand is first scaled by an exact power
of two. If the device can only return fp16, as for every convolution, the scale also keeps the
product in range: a sum of products is
at most ``amax(x) * max_row ||w||_1``.
This bound holds for every algorithm that adds up these products. It does not hold for a convolution
by Winograd's algorithm with transformed inputs in fp16: these are 4 times larger for F(2x2, 3x3),
which the two bits of headroom cover until the input grows, and 100 times larger for F(4x4, 3x3)
(Lavin and Gray, arXiv:1509.09308). An overflow there gives Inf or NaN, not a wrong number.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ..base.amax import amax
from ..base.flags import fp32_accumulation
from ..base.layers import kind_of
from ..base.modes import FP16_SCALED, FP16_WIDE, FP32
from .calibration import Calibration
from .operand_scale import OperandScale
from .products import HAS_WIDE_PRODUCT, wide_product
from .proofs import Proof

Provided = tuple | AbstractContextManager[tuple]
WeightProvider = Callable[..., Provided]
"""``provider(module, x, dtype, bias_dtype=fp32)`` gives a layer's ``(weight, bias)`` on the device
of ``x``, within a context where they are to be given back. ``dtype`` None: that of the stored
weight where it is a plain one of 16 or 32 bit, fp32 with a LoRA added, else fp16. ``bias_dtype``
None: fp32, or the stored dtype where it takes no cast and torch adds it to fp32."""
SMALLEST_WEIGHT = 2.0**-12
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def lent(weights: Provided) -> AbstractContextManager[tuple]:
    """Yield ``(weight, bias)``, whether the provider returned a tuple or a context manager."""
    return nullcontext(weights) if isinstance(weights, tuple) else weights


def has_wide_output(device: torch.device, kind: str) -> bool:
    """True if fp16 operands can give an fp32 result: matrix products on CUDA, and emulated
    products."""
    if is_emulated(device):
        return True
    # ROCm and XPU have taken ``mm(out_dtype=...)`` lately, in versions that nobody has tried it
    # with here, and scale instead.
    return device.type == "cuda" and kind == "linear" and torch.version.hip is None and HAS_WIDE_PRODUCT


def is_emulated(device: torch.device) -> bool:
    """True if fp16 operands are multiplied in fp32 after rounding, as on a CPU without fp16
    units."""
    return device.type == "cpu"


class SafeOperation:
    """Forward of one module with fp16 operands and an fp32 result: finite whenever the fp32 forward
    is.

    ``scale``: scale of the operand and the proof about it. ``finite``: proof that the result is
    finite, set if later model code could hide an overflow. ``is_wide``: the device returns fp32.
    ``is_emulated``: it multiplies in fp32. ``bias_dtype``: the dtype to ask for the bias in.
    """

    def __init__(self, module: torch.nn.Module, scale: OperandScale, calibration: Calibration, weights: WeightProvider):
        self.module = module
        kind = kind_of(module)
        if kind is None:
            raise TypeError(module)
        self.kind = kind
        self.scale = scale
        self.calibration = calibration
        self.weights = weights
        self.finite: Proof | None = None
        self.is_wide = self.is_emulated = False
        self.bias_dtype = torch.float32

    @property
    def mode(self) -> str:
        """Mode of the layer in its last calibration; ``fp16_wide`` before it."""
        if self.scale.in_fp32:
            return FP32.name
        return FP16_SCALED.name if self.scale.exponent else FP16_WIDE.name

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Run the layer on ``input`` (any float dtype); return fp32."""
        calibration, scale = self.calibration, self.scale
        if calibration.calibrating:
            return self._calibrate(input, *args, **kwargs)
        if scale.in_fp32:
            return self._in_fp32(input, *args, **kwargs)
        in_graph = torch.compiler.is_dynamo_compiling()  # one function, where ``is_compiling`` is two
        operand = scale.recorded(input) if in_graph or scale.is_watched else input.half()
        weights = self.weights(self.module, operand, torch.float16, self.bias_dtype)
        multiply = self._traced if in_graph else self._in_fp16 if calibration.by_layer else self._multiplied
        if isinstance(weights, tuple):
            result = multiply(operand, *weights, *args, **kwargs)
        else:
            with weights as (weight, bias):
                result = multiply(operand, weight, bias, *args, **kwargs)
        if self.finite is not None:
            self.finite.record_amax(self._column(result))
        return result

    def look(self) -> None:
        """Check the result in every later call."""
        if self.finite is None:
            self.finite = self.calibration.add(Proof(f"{self.scale.name} result"))
        self.finite.device = self.scale.device

    def _in_fp32(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        with lent(self.weights(self.module, x, torch.float32)) as (weight, bias):
            return _multiply(self.module, self.kind, x.float(), weight, bias, *args, **kwargs)

    def _in_fp16(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        """Multiply with fp16 accumulation switched off around the product."""
        with fp32_accumulation():
            return self._multiplied(operand, weight, bias, *args, **kwargs)

    def _multiplied(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        """Multiply fp16 operands in eager code, and return the unscaled result in fp32."""
        # ``torch.mm`` with ``out_dtype`` has no derivative (torch 2.8 to 2.11).
        recorded = torch.is_grad_enabled() and (operand.requires_grad or weight.requires_grad)
        if self.is_wide and not self.is_emulated and not recorded:
            rows = torch.mm(operand.flatten(0, -2), weight.t(), *args, out_dtype=torch.float32, **kwargs)
            return self.scale.unscaled(rows.view(*operand.shape[:-1], weight.shape[0]), bias)
        product = self._product(operand, weight, *args, **kwargs)
        return self.scale.unscaled(product, self._beside(bias))

    def _traced(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        """Multiply as :meth:`_multiplied` does, in a graph of torch.compile."""
        recorded = torch.is_grad_enabled() and (operand.requires_grad or weight.requires_grad)
        if self.is_wide and not is_emulated(operand.device) and not recorded:
            product = _wide_linear(operand, weight, *args, **kwargs)
        else:
            product = self._product(operand, weight, *args, **kwargs)
        return self.scale.unscaled_in_graph(product, self._beside(bias))

    def _product(self, operand, weight, *args, **kwargs) -> torch.Tensor:
        """Multiply by torch's own product of this kind, in fp32 if fp16 products are emulated or
        need a gradient."""
        if self.is_wide:
            operand, weight = operand.float(), weight.float()
        return _multiply(self.module, self.kind, operand, weight, None, *args, **kwargs)

    def _beside(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bias in a shape that can be added to a product."""
        return bias if bias is None or self.kind == "linear" else bias.reshape(-1, *[1] * len(self.module.kernel_size))

    def _is_wide(self, x: torch.Tensor) -> bool:
        return has_wide_output(x.device, self.kind)

    def _column(self, result: torch.Tensor) -> torch.Tensor:
        """Return one output channel, whose sums contain every element of the operand; all channels
        if the module has groups."""
        if getattr(self.module, "groups", 1) > 1:
            return result
        return result.select(-1 if self.kind == "linear" else -1 - len(self.module.kernel_size), 0)

    def _calibrate(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Run the layer in a calibrating call: measure input and weight, choose the scale, and
        return the first product, in fp32 if the scale moved the layer to fp32. Reads the device
        once. Counts the layer's flops and notes that it ran."""
        # ComfyUI adds a LoRA in place to a weight that it prefetched (comfy/ops.py,
        # resolve_cast_module_with_vbar): asked for twice, the weight has the LoRA twice. A
        # quantized weight, which no LoRA is added to in place, is asked for in fp16 as in later
        # calls, so that it is rounded alike and the first run of a seed equals the next. Where
        # memory is short any weight is asked for so.
        asked = None
        if self.calibration.spares_memory:
            asked = torch.float32 if self.scale.in_fp32 else torch.float16
        plain = type(self.module.weight) in (torch.Tensor, torch.nn.Parameter)
        self.scale.device = x.device
        self.is_wide, self.is_emulated = self._is_wide(x), is_emulated(x.device)
        result = None
        with self.calibration.measuring(), self.calibration.hiding.pause():
            bias_dtype = None if self.is_wide else torch.float32
            with lent(self.weights(self.module, x, asked, bias_dtype)) as (weight, bias):
                self.bias_dtype = torch.float32 if bias is None else bias.dtype
                half = weight.to(torch.float16)
                self._choose(x, half)
                if not self.scale.in_fp32:
                    result = self._in_fp16(self.scale.scaled_eagerly(x), half, bias, *args, **kwargs)
                elif plain:
                    # Beside ``asked``, the weight was rounded to fp16.
                    self.calibration.lacks_precision |= asked == torch.float16
                    bias = None if bias is None else bias.float()
                    result = _multiply(self.module, self.kind, x.float(), weight.float(), bias, *args, **kwargs)
            if result is None:
                result = self._in_fp32(x, *args, **kwargs)
        self.calibration.flops[self.scale.name] += matmul_flops(result, self.module, self.kind)
        if not self.scale.in_fp32:
            self.calibration.hiding.ran(self.scale.name, self)
        return result

    def _choose(self, x: torch.Tensor, half: torch.Tensor) -> None:
        """Choose the scale of the input, with one read of the device."""
        numbers = [amax(x), amax(half)]
        if not self.is_wide:
            numbers.append(_row_sum(half, self.kind))
        magnitude, of_weight, *row_sum = torch.stack(numbers).tolist()
        if of_weight < SMALLEST_WEIGHT or not math.isfinite(of_weight):
            self.scale.in_fp32 = True
        if not self.scale.in_fp32:
            self.scale.calibrate(magnitude, max([1.0, *row_sum]))


def _multiply(
    module: torch.nn.Module, kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args, **how
) -> torch.Tensor:
    """Multiply as a module of ``kind`` does, with a weight and bias of one dtype; further arguments
    as in its forward."""
    if kind == "linear":
        return F.linear(x, weight, bias, *args, **how)  # takes no more: an argument that is not known raises
    if kind == "conv":
        return module._conv_forward(x, weight, bias, *args, **how)
    dimensions = weight.dim() - 2
    padding = module._output_padding(
        x, _output_size(*args, **how), module.stride, module.padding, module.kernel_size, dimensions, module.dilation
    )
    convolve = TRANSPOSED[dimensions]
    return convolve(x, weight, bias, module.stride, module.padding, padding, module.groups, module.dilation)


def _output_size(output_size: Any = None) -> Any:
    return output_size  # an argument that is not known raises


def _wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply by an fp16 weight ``(outputs, inputs)`` with an fp32 result."""
    return wide_product(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], weight.shape[0])


def _row_sum(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute ``max ||w||_1`` over the output channels, 0-dim fp32: the largest factor from the
    input's amax to the result's."""
    outputs = weight.transpose(0, 1) if kind == "transposed" else weight
    return torch.linalg.vector_norm(outputs.reshape(outputs.shape[0], -1), 1, dim=1, dtype=torch.float32).amax()


def matmul_flops(result: torch.Tensor, module: torch.nn.Module, kind: str) -> int:
    """Count the floating-point operations of the matmul or convolution that returned ``result``; a
    multiply-add counts as two."""
    weight = module.weight
    if kind == "transposed":
        return 2 * result.numel() * weight.numel() // (module.out_channels * math.prod(module.stride))
    return 2 * result.numel() * (weight.numel() // weight.shape[0])
