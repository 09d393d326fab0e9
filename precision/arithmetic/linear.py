"""Matmuls and convolutions with fp16 operands, fp32 accumulation and results that cannot overflow.

``fp16``: the result is proven to fit fp16 and may be returned in it, which costs no more than a plain fp16 model's
layer but the cast and the amax of an operand. Otherwise results are fp32. ``fp16_wide``: the operand fits fp16 and the
result is fp32. ``fp16_scaled``: the operand is first scaled by an exact power of two. Where the device can only return
fp16, as for every convolution, the scale also keeps the result in range: a sum of products is at most ``amax(x) *
max_row ||w||_1``. That proves the result of every algorithm that adds up these products: direct, as a matrix product,
implicit or not. It proves nothing of a convolution by Winograd's algorithm that keeps transformed inputs in fp16: 4
times larger for F(2x2, 3x3), which the two bits left at the measurement hold until the input grows, and 100 times for
F(4x4, 3x3) (Lavin and Gray, arXiv:1509.09308). What overflows there gives Inf or NaN, not a wrong number.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F

from ..amax import amax
from ..dtypes import FP16_MAX
from ..modes import FP16, FP16_SCALED, FP16_WIDE, FP32
from .bounds.followed import as_plain, follow, is_followed
from .bounds.known_values import Tag, counted, counting_writes, tag_at
from .bounds.value_bounds import ValueBound, after_conv, after_linear, plus
from .calibration import Calibration
from .flags import fp32_accumulation
from .operand_scale import OperandScale
from .result_bound import RESULT_MARGIN
from .wide_product import HAS_WIDE_PRODUCT, wide_product

WeightProvider = Callable[..., AbstractContextManager]
"""Called with a module, its input, the weight's dtype and, where it is not fp32, the bias's: None for fp32 or, where
that takes a cast, what it is held in."""
SMALLEST_WEIGHT = 2.0**-12
WINOGRAD = 4.0
"""How much larger than its operand the numbers are that a convolution by F(2x2, 3x3) keeps in fp16."""
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def kind_of(module: torch.nn.Module) -> str | None:
    """Return ``linear``, ``conv`` or ``transposed``; None for a module that multiplies no matrices."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return "linear"
    if isinstance(module, torch.nn.modules.conv._ConvTransposeNd):
        return "transposed"
    return "conv" if isinstance(module, torch.nn.modules.conv._ConvNd) else None


def has_wide_output(device: torch.device, kind: str) -> bool:
    """Tell whether fp16 operands can give an fp32 result: on CUDA for matrix products, and on a CPU.

    A CPU has no fp16 units to gain from; it multiplies the rounded operands in fp32, which is the same arithmetic.
    """
    if device.type == "cpu":
        return True
    # ROCm and XPU have taken ``mm(out_dtype=...)`` lately, in versions that nobody has tried it with here, and scale
    # instead.
    return device.type == "cuda" and kind == "linear" and torch.version.hip is None and HAS_WIDE_PRODUCT


class Beside(Protocol):
    """Add a change of a weight to its layer's result, as ``low_rank.py`` does.

    ``reach``: how much larger than the largest magnitude of an input the change of a result can be.
    """

    reach: float

    def fit(self, largest: float) -> None:
        """Be ready for fp16 operands no larger than that."""

    def __call__(
        self, x: torch.Tensor, result: torch.Tensor, times: float | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``result`` with the change for an input, written over. ``times``: ``x`` is an operand in fp16 no
        larger than was fitted, and the change for it is to be multiplied by that."""


class SafeOperation:
    """Run one module's forward with fp16 operands: finite wherever fp32 is.

    Args:
        module: a Linear, Conv or ConvTranspose.
        scale: how its operand is scaled, and what is proven of it; ``scale.in_fp32`` once the layer was found to need
            fp32.
        calibration: the model's.
        weights: provides ``(weight, bias)`` of the module on the input's device, the weight in the dtype asked for and
            the bias in fp32, or in the dtype given last.
        wide: whether the device returns fp32 from fp16 operands; None to ask it. For tests of CUDA's path on a CPU.
        largest_fp16: return fp16 while the result is proven to fit it and no larger than this when measured. None:
            always fp32.

    Attributes:
        beside: what is added to the result; set from outside for the length of a call.
        reach: of what its proofs hold for.
    """

    beside: Beside | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        scale: OperandScale,
        calibration: Calibration,
        weights: WeightProvider,
        wide: bool | None = None,
        largest_fp16: float | None = None,
    ):
        self.module = module
        self.kind = kind_of(module)
        self.scale = scale
        self.calibration = calibration
        self.weights = weights
        self.wide = wide
        self.largest_fp16 = largest_fp16
        self.tag: Tag | None = None
        self.reach = 0.0

    def stand_beside(self, change: Beside) -> float:
        """Return how large an operand ``change`` must be fitted to in the next call. One that reaches further than what
        the proofs hold for has that call repeated with calibration."""
        if self.calibration.calibrating or self.scale.in_fp32:
            return 1.0
        if change.reach > self.reach:
            self.scale.recorder.missed = True
        return self.scale.room if self.scale.beside < math.inf else 1.0

    @property
    def observed_mode(self) -> str:
        """The mode the layer was found to run in by its last calibration; planned is ``fp16_wide``
        (``PlannedLayers``)."""
        if self.scale.in_fp32:
            return FP32.name
        if self.scale.result.proven:
            return FP16.name
        return FP16_SCALED.name if self.scale.exponent else FP16_WIDE.name

    def __repr__(self) -> str:
        return f"SafeOperation({self.observed_mode})"

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Run the layer on ``input``, of any float dtype; return fp32, or fp16 where that is proven."""
        if not is_followed(input):
            return self._run(input, *args, **kwargs)
        with as_plain(input):
            return self._run(input, *args, **kwargs)

    def _run(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if self.calibration.calibrating:
            result = self._calibrate(input, *args, **kwargs)
            self.calibration.flops[self.scale.name] += matmul_flops(result, self.module, self.kind)
            result = self._noted(counted(result), self._bound(self.scale.covered is not None))
            self.tag = tag_at(result)
            return result
        if self.scale.in_fp32:
            return self._changed(input, self._fp32(input, *args, **kwargs))
        operand = self.calibration.operands.operand(self.scale, input)
        noted = self._is_relied_on()
        known = noted and self.calibration.values.covers(self.scale, input)
        result = self._product_of(operand, noted, *args, **kwargs)
        result = self._changed(input, result, operand)
        if not torch.compiler.is_compiling():
            self.scale.record_result(result, alone=self.calibration.operands.runs_once(self.scale))
        return self._noted(result, self._bound(known)) if noted else result

    def _is_relied_on(self) -> bool:
        """Tell whether a later operation relies on the bound of the result, or several on one measurement of it."""
        if torch.compiler.is_compiling() or not self.tag or not self.tag.used:
            return False
        return self.tag.once is None or self.tag.once.is_shared

    def _product_of(self, operand: torch.Tensor, noted: bool, *args, **kwargs) -> torch.Tensor:
        counting = counting_writes() if noted else nullcontext()
        if self.scale.result.proven:
            with self.weights(self.module, operand, torch.float16, torch.float16) as (weight, bias), counting:
                return self._fp16(operand, weight, bias, *args, **kwargs)
        # A kernel that adds fp16 to fp32 takes one launch less than a cast of the bias and that sum.
        bias_dtype = None if self._is_wide(operand.device) else torch.float32
        with self.weights(self.module, operand, torch.float16, bias_dtype) as (weight, bias), counting:
            return self._wide(operand, weight, bias, *args, **kwargs)

    def _bound(self, known: bool) -> ValueBound | None:
        """Return what is known of the result if all that this call records holds. ``known``: the operand was known."""
        if known:
            return self.scale.reach
        if self.kind != "linear" or not self.scale.result.proven:
            return None
        return ValueBound(FP16_MAX if self.scale.by_result else FP16_MAX / RESULT_MARGIN)

    def _noted(self, result: torch.Tensor, bound: ValueBound | None) -> torch.Tensor:
        """Keep the bound of a result that a later operation may rely on, or that one may come."""
        values = self.calibration.values
        if (bound is None and values.uniform) or values.note(result, bound) is None or values.uniform:
            return result
        followed = values.calibrating or (self.tag and self.tag.carried)
        return follow(result, values) if followed and bound is not None else result

    def _calibrate(self, x, *args, **kwargs) -> torch.Tensor:
        """Calibrate and multiply with one and the same weight, which is asked for once."""
        self.calibration.results.note_operand(x)
        self.calibration.last, self.tag = self.scale, None
        self.scale.covered, self.scale.by_result = None, False
        plain = type(self.module.weight) in (torch.Tensor, torch.nn.Parameter)
        self.scale.recorder.device = x.device
        # ComfyUI adds a LoRA in place to a weight that it prefetched (comfy/ops.py, resolve_cast_module_with_vbar):
        # asked for twice, the weight has the LoRA twice. A quantized weight, which no LoRA is added to in place, is
        # asked for in fp16 as in later calls, so that it is rounded alike and the first run of a seed equals the next.
        operand = result = None
        with self.weights(self.module, x, torch.float32 if plain else torch.float16) as (weight, bias):
            half = weight.to(torch.float16)
            self.scale.in_fp32 = self.scale.in_fp32 or not fits_fp16(half)
            if not self.scale.in_fp32:
                self._fit(x, half, bias)
            self.calibration.values.multiply(x, in_fp16=self.scale.takes_fp16)
            if not self.scale.in_fp32:
                operand = self.calibration.operands.calibrated_operand(self.scale, x)
                self._rely_on(x)
                result = self._first_product(operand, half, bias, *args, **kwargs)
            elif plain:
                result = self._apply(x.float(), weight, bias, *args, **kwargs)
        result = self._changed(x, self._fp32(x, *args, **kwargs) if result is None else result, operand)
        if self.beside and result.dtype == torch.float16 and not amax(result).item() <= self.largest_fp16:
            self.calibration.results.give_up(self.scale.result)
        if operand is not None and self.beside is None and tag_at(x) is not None:
            self.scale.measure_by_result(operand, result, amax(x).item())
            if self.scale.by_result:
                self.calibration.values.rely_on(x)
        return result

    def _fit(self, x: torch.Tensor, half: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Choose the scale of the input, and whether the result is proven to fit fp16."""
        magnitude, wide = amax(x).item(), self._is_wide(x.device)
        returns_fp16 = self.largest_fp16 is not None and self.calibration.results.allowed
        row_sum = 1.0 if wide and not returns_fp16 else largest_row_sum(half, self.kind)
        self.scale.calibrate(magnitude, 1.0 if wide else row_sum)
        self.reach = self.beside.reach if self.beside else 0.0
        if returns_fp16:
            self.scale.prove_result(magnitude, row_sum + self.reach, 0.0 if bias is None else amax(bias).item())
        known = self.calibration.values.known(self.scale, x)
        self.scale.cover(known, known and self._reached(x, half, bias, known), magnitude, wide)
        if self.beside and self._adds(x):
            self.beside.fit(self.scale.leave_room())

    def _reached(self, x, half: torch.Tensor, bias: torch.Tensor | None, known: ValueBound) -> ValueBound:
        """Bound the result, with what is added beside the weight."""
        reached = after_linear(half, bias, known) if self.kind == "linear" else self._convolved(x, half, bias, known)
        return plus(reached, self.reach * known.largest, half.shape[0])

    def _convolved(self, x, half: torch.Tensor, bias: torch.Tensor | None, known: ValueBound) -> ValueBound:
        weight = half.transpose(0, 1) if self.kind == "transposed" else half
        if x.dim() < half.dim():
            known = known._replace(sample=math.inf)  # of a tensor without a batch, that is a channel
        bound = after_conv(weight, bias, known, zeros_around=self.module.padding_mode == "zeros")
        return ValueBound(max(bound.largest, WINOGRAD * known.largest))

    def _rely_on(self, x: torch.Tensor) -> None:
        if self.scale.covered is not None:
            shares, _, _ = self.calibration.operands.place_of(self.scale)
            self.calibration.values.rely_on(x, alone=not shares)

    def _first_product(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        """Multiply in a call that calibrates: in fp16 only if it is not larger there than allowed."""
        if self.scale.result.proven:
            result = self._fp16(operand, weight, None if bias is None else bias.to(torch.float16), *args, **kwargs)
            if amax(result).item() <= self.largest_fp16:
                self.calibration.results.note_result(self.scale.result)
                return result
            self.scale.result.refute()
        return self._wide(operand, weight, bias, *args, **kwargs)

    def _fp32(self, x, *args, **kwargs) -> torch.Tensor:
        with self.weights(self.module, x, torch.float32) as (weight, bias):
            return self._apply(x.float(), weight, bias, *args, **kwargs)

    def _fp16(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        with fp32_accumulation():
            return self._apply(operand, weight, bias, *args, **kwargs)

    def _wide(self, operand, weight, bias, *args, **kwargs) -> torch.Tensor:
        with fp32_accumulation():
            product = self._product(operand, weight, *args, **kwargs)
        return self.scale.unscaled(product, None if bias is None else self._broadcast(bias))

    def _changed(self, x: torch.Tensor, result: torch.Tensor, operand: torch.Tensor | None = None) -> torch.Tensor:
        """Return a result with what is added beside the weight, after the weight was given back: ComfyUI may put the
        change's own where it was (``get_cast_buffer`` in comfy/model_management.py)."""
        if self.beside is None:
            return result
        if operand is None or not self._adds(operand):
            return self.beside(x.to(result.dtype) if result.dtype == torch.float16 else x, result)
        with fp32_accumulation():
            return self.beside(operand, result, times=self.scale.times)

    def _adds(self, x: torch.Tensor) -> bool:
        """Tell whether the product's operand can be multiplied by what is beside the weight too."""
        return not self.scale.in_fp32 and self._is_wide(x.device) and not _needs_gradient(x, self.module.weight)

    def _is_wide(self, device: torch.device) -> bool:
        return has_wide_output(device, self.kind) if self.wide is None else self.wide

    def _product(self, x, weight, *args, **kwargs) -> torch.Tensor:
        if not self._is_wide(x.device):
            return self._apply(x, weight, None, *args, **kwargs)
        if x.device.type == "cpu" or _needs_gradient(x, weight):
            return self._apply(x.float(), weight.float(), None, *args, **kwargs)
        product = wide_product(x.reshape(-1, x.shape[-1]), weight.t())
        return product.reshape(*x.shape[:-1], weight.shape[0])

    def _apply(self, x, weight, bias, *args, **kwargs) -> torch.Tensor:
        return multiplied(self.module, self.kind, x, weight, bias, *args, **kwargs)

    def _broadcast(self, bias: torch.Tensor) -> torch.Tensor:
        return bias if self.kind == "linear" else bias.reshape(-1, *[1] * len(self.module.kernel_size))


def multiplied(
    module: torch.nn.Module, kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args, **how
) -> torch.Tensor:
    """Multiply as a module of this kind does, by the weight and bias given, all of one dtype; other arguments as of its
    forward."""
    if kind == "linear":
        return F.linear(x, weight, bias)
    if kind == "conv":
        return module._conv_forward(x, weight, bias, *args, **how)
    dimensions = weight.dim() - 2
    output_size = args[0] if args else how.get("output_size")
    padding = module._output_padding(
        x, output_size, module.stride, module.padding, module.kernel_size, dimensions, module.dilation
    )
    convolve = TRANSPOSED[dimensions]
    return convolve(x, weight, bias, module.stride, module.padding, padding, module.groups, module.dilation)


def _needs_gradient(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether autograd records this product."""
    # ``torch.mm`` with ``out_dtype`` has no derivative (torch 2.8 to 2.11).
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


def largest_row_sum(weight: torch.Tensor, kind: str) -> float:
    """Compute ``max ||w||_1`` over the output channels: the largest factor by which a layer can raise ``amax``
    of its input."""
    outputs = weight.transpose(0, 1) if kind == "transposed" else weight
    rows = outputs.reshape(outputs.shape[0], -1)
    return max(1.0, torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float32).max().item())


def fits_fp16(weight: torch.Tensor) -> bool:
    """Tell whether a weight cast to fp16 is finite and has not lost its precision to fp16's smallest numbers."""
    return SMALLEST_WEIGHT <= amax(weight).item() < math.inf


def matmul_flops(result: torch.Tensor, module: torch.nn.Module, kind: str) -> int:
    """Count the floating-point operations of the matmul or convolution that gave ``result``, a multiply-add as two."""
    weight = module.weight
    if kind == "transposed":
        return 2 * result.numel() * weight.numel() // (module.out_channels * math.prod(module.stride))
    return 2 * result.numel() * (weight.numel() // weight.shape[0])
