"""Matmuls and convolutions with fp16 operands, fp32 accumulation and results that cannot overflow.

``fp16``: the result is proven to fit fp16 and returned in it. ``fp16_wide``: the operand fits fp16, the result is fp32.
``fp16_scaled``: the operand is first scaled by an exact power of two. Where the device can only return fp16, as for
every convolution, the scale also keeps the result in range: a sum of products is at most ``amax(x) * max_row ||w||_1``.
That proves the result of every algorithm that adds up these products. It proves nothing of a convolution by Winograd's
algorithm that keeps transformed inputs in fp16: 4 times larger for F(2x2, 3x3), which the two bits left at the
measurement hold until the input grows, and 100 times for F(4x4, 3x3) (Lavin and Gray, arXiv:1509.09308). What overflows
there gives Inf or NaN, not a wrong number.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from ..base.amax import amax
from ..base.flags import fp32_accumulation
from ..base.modes import FP16, FP16_SCALED, FP16_WIDE, FP32
from .calibration import Calibration
from .operand_scale import OperandScale
from .products import HAS_WIDE_PRODUCT, wide_product
from .proofs import Proof

Provided = tuple | AbstractContextManager[tuple]
WeightProvider = Callable[..., Provided]
"""``provider(module, x, dtype, bias_dtype=fp32)`` gives a layer's ``(weight, bias)`` on the device of ``x``, within a
context where they are to be given back. ``dtype`` None: that of the stored weight where it is a plain one of 16 or 32
bit, fp32 with a LoRA added, else fp16. ``bias_dtype`` None: fp32, or the stored dtype where it takes no cast and torch
adds it to fp32."""
SMALLEST_WEIGHT = 2.0**-12
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def lent(weights: Provided) -> AbstractContextManager[tuple]:
    """Have what a provider gives for the length of a context."""
    return nullcontext(weights) if isinstance(weights, tuple) else weights


def kind_of(module: torch.nn.Module) -> str | None:
    """Return ``linear``, ``conv`` or ``transposed``; None for a module that multiplies no matrices."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return "linear"
    if isinstance(module, torch.nn.modules.conv._ConvTransposeNd):
        return "transposed"
    return "conv" if isinstance(module, torch.nn.modules.conv._ConvNd) else None


def has_wide_output(device: torch.device, kind: str) -> bool:
    """Tell whether fp16 operands can give an fp32 result: on CUDA for matrix products, and where they are emulated."""
    if is_emulated(device):
        return True
    # ROCm and XPU have taken ``mm(out_dtype=...)`` lately, in versions that nobody has tried it with here, and scale
    # instead.
    return device.type == "cuda" and kind == "linear" and torch.version.hip is None and HAS_WIDE_PRODUCT


def is_emulated(device: torch.device) -> bool:
    """Tell whether rounded operands are multiplied in fp32, the same arithmetic, as on a CPU without fp16 units."""
    return device.type == "cpu"


class SafeOperation:
    """Run one module's forward with fp16 operands: finite wherever fp32 is.

    ``scale``: how the operand is scaled, and what is proven of it. ``largest_fp16``: return fp16 while the result is
    proven to fit it and no larger than this when measured; None: always fp32. ``finite``: checks the result in every
    later call, where model code may hide an overflow of the layer. ``is_wide``: the device gives an fp32 result.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        scale: OperandScale,
        calibration: Calibration,
        weights: WeightProvider,
        largest_fp16: float | None = None,
    ):
        self.module = module
        kind = kind_of(module)
        if kind is None:
            raise TypeError(module)
        self.kind = kind
        self.scale = scale
        self.calibration = calibration
        self.weights = weights
        self.largest_fp16 = largest_fp16
        self.finite: Proof | None = None
        self.is_wide = False

    @property
    def observed_mode(self) -> str:
        """The mode of the layer in its last calibration; planned is ``fp16_wide``."""
        if self.scale.in_fp32:
            return FP32.name
        if self.scale.fits_result:
            return FP16.name
        return FP16_SCALED.name if self.scale.exponent else FP16_WIDE.name

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Run the layer on ``input``, of any float dtype; return fp32, or fp16 where that is proven."""
        calibration, scale = self.calibration, self.scale
        if calibration.calibrating:
            return self._calibrate(input, *args, **kwargs)
        if scale.in_fp32:
            return self._in_fp32(input, *args, **kwargs)
        operand = calibration.operands.of(scale, input)
        bias_dtype = torch.float16 if scale.fits_result else None if self.is_wide else torch.float32
        weights = self.weights(self.module, operand, torch.float16, bias_dtype)
        multiply = self._in_fp16 if calibration.by_layer else self._multiplied
        if not isinstance(weights, tuple):
            with weights as (weight, bias):
                result = multiply(operand, weight, bias, *args, **kwargs)
        elif scale.fits_result and self.kind == "linear" and not calibration.by_layer:
            result = F.linear(operand, *weights, *args, **kwargs)
        else:
            result = multiply(operand, *weights, *args, **kwargs)
        if self.finite is not None:
            self.finite.record_amax(self._column(result))
        return result

    def look(self) -> None:
        """Look at the result in every later call."""
        if self.finite is None:
            self.finite = self.calibration.add(Proof(f"{self.scale.name} result"))
        self.finite.device = self.scale.device

    def widen(self) -> None:
        """Return fp32 from now on: model code replaces what overflows in fp16."""
        if self.scale.fits_result:
            self.calibration.results.give_up(self.scale)

    def _in_fp32(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        with lent(self.weights(self.module, x, torch.float32)) as (weight, bias):
            return multiplied(self.module, self.kind, x.float(), weight, bias, *args, **kwargs)

    def _in_fp16(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        with fp32_accumulation():
            return self._multiplied(operand, weight, bias, *args, **kwargs)

    def _multiplied(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        """Multiply in fp16. A result that is not proven is fp32, or made so from a scaled one."""
        if self.scale.fits_result:
            return multiplied(self.module, self.kind, operand, weight, bias, *args, **kwargs)
        # ``torch.mm`` with ``out_dtype`` has no derivative (torch 2.8 to 2.11).
        needs_gradient = torch.is_grad_enabled() and (operand.requires_grad or weight.requires_grad)
        if not self.is_wide:
            product = multiplied(self.module, self.kind, operand, weight, None, *args, **kwargs)
        elif is_emulated(operand.device) or needs_gradient:
            product = multiplied(self.module, self.kind, operand.float(), weight.float(), None, *args, **kwargs)
        else:
            product = _wide_linear(operand, weight, *args, **kwargs)
        if bias is not None and self.kind != "linear":
            bias = bias.reshape(-1, *[1] * len(self.module.kernel_size))
        return self.scale.unscaled(product, bias)

    def _is_wide(self, x: torch.Tensor) -> bool:
        return has_wide_output(x.device, self.kind)

    def _column(self, result: torch.Tensor) -> torch.Tensor:
        """Return a channel of the result, in whose sums each element of the operand is; all channels of groups."""
        if getattr(self.module, "groups", 1) > 1:
            return result
        return result.select(-1 if self.kind == "linear" else -1 - len(self.module.kernel_size), 0)

    def _calibrate(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        # ComfyUI adds a LoRA in place to a weight that it prefetched (comfy/ops.py, resolve_cast_module_with_vbar):
        # asked for twice, the weight has the LoRA twice. A quantized weight, which no LoRA is added to in place, is
        # asked for in fp16 as in later calls, so that it is rounded alike and the first run of a seed equals the next.
        # Where memory is short any weight is asked for so.
        spares, asked = self.calibration.spares_memory, None
        if spares:
            asked = torch.float32 if self.scale.in_fp32 else torch.float16
        plain = type(self.module.weight) in (torch.Tensor, torch.nn.Parameter)
        self.scale.device = x.device
        self.is_wide = self._is_wide(x)
        result = None
        with self.calibration.measuring(), self.calibration.hiding.pause():
            with lent(self.weights(self.module, x, asked)) as (weight, bias):
                half = weight.to(torch.float16)
                most = self._choose(x, half, bias)
                if not self.scale.in_fp32:
                    operands = self.calibration.operands
                    operand = self.scale.scaled_eagerly(x) if spares else operands.measured(self.scale, x)
                    result = self._first_product(operand, half, bias, *args, **kwargs)
                    self.calibration.hiding.norms.set(result, most)
                elif plain:
                    if asked == torch.float16:  # the weight was rounded to it
                        self.calibration.results.give_up(self.scale)
                    result = multiplied(self.module, self.kind, x.float(), weight.float(), bias, *args, **kwargs)
            if result is None:
                result = self._in_fp32(x, *args, **kwargs)
        self.calibration.flops[self.scale.name] += matmul_flops(result, self.module, self.kind)
        if not self.scale.in_fp32:
            self.calibration.hiding.ran(self.scale.name, self)
        return result

    def _choose(self, x: torch.Tensor, half: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Choose the scale of the input, and whether the result is proven to fit fp16; one read of the device. Return
        the most that any input of the model makes of the result."""
        largest_bias = x.new_zeros((), dtype=torch.float32) if bias is None else amax(bias)
        largest_sum = _row_sum(half, self.kind)
        most = self.calibration.hiding.norms.of(x) * largest_sum + largest_bias
        numbers = torch.stack([amax(x), amax(half), largest_sum, largest_bias])
        magnitude, of_weight, row_sum, of_bias = numbers.tolist()
        self.calibration.results.note_operand(magnitude, x.dtype)
        if of_weight < SMALLEST_WEIGHT or not math.isfinite(of_weight):
            self.scale.in_fp32 = True
        if self.scale.in_fp32:
            return most
        self.scale.calibrate(magnitude, 1.0 if self.is_wide else max(1.0, row_sum))
        if self.largest_fp16 is not None and self.calibration.results.allowed:
            self.scale.prove_result(magnitude, max(1.0, row_sum), of_bias)
        return most

    def _first_product(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        """Multiply in a call that calibrates: in fp16 only if it is not larger there than allowed."""
        if self.scale.fits_result:
            half_bias = None if bias is None else bias.to(torch.float16)
            result = self._in_fp16(operand, weight, half_bias, *args, **kwargs)
            if amax(result).item() <= self.largest_fp16:
                self.calibration.results.note_result(self.scale)
                return result
            self.scale.refute_result()
            del result  # before another is made
        return self._in_fp16(operand, weight, bias, *args, **kwargs)


def multiplied(
    module: torch.nn.Module, kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args, **how
) -> torch.Tensor:
    """Multiply as a module of a kind does, by a weight and bias of one dtype; the rest is as of its forward."""
    if kind == "linear":
        return F.linear(x, weight, bias, *args, **how)  # takes no more: an argument that is not known raises
    if kind == "conv":
        return module._conv_forward(x, weight, bias, *args, **how)
    dimensions = weight.dim() - 2
    output_size = args[0] if args else how.get("output_size")
    padding = module._output_padding(
        x, output_size, module.stride, module.padding, module.kernel_size, dimensions, module.dilation
    )
    convolve = TRANSPOSED[dimensions]
    return convolve(x, weight, bias, module.stride, module.padding, padding, module.groups, module.dilation)


def _wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply by an fp16 weight ``(outputs, inputs)`` with an fp32 result."""
    return wide_product(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], weight.shape[0])


def _row_sum(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute ``max ||w||_1`` over the output channels, 0-dim fp32: the most by which ``amax`` of an input can grow."""
    outputs = weight.transpose(0, 1) if kind == "transposed" else weight
    return torch.linalg.vector_norm(outputs.reshape(outputs.shape[0], -1), 1, dim=1, dtype=torch.float32).amax()


def matmul_flops(result: torch.Tensor, module: torch.nn.Module, kind: str) -> int:
    """Count the floating-point operations of the matmul or convolution that gave ``result``, a multiply-add as two."""
    weight = module.weight
    if kind == "transposed":
        return 2 * result.numel() * weight.numel() // (module.out_channels * math.prod(module.stride))
    return 2 * result.numel() * (weight.numel() // weight.shape[0])
