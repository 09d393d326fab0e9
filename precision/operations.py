"""Matrix products, convolutions and attention with fp16 operands, fp32 sums and fp32 results that cannot overflow.

``fp16_wide``: the operand fits fp16 and the result is fp32. ``fp16_scaled``: the operand is first scaled by an exact power
of two. Where the device can only return fp16, the scale also keeps the result in range: a sum of products is at most
``amax(x) * max_row ||w||_1``, so scaling by that bound is a proof.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F

from .ranges import FP16_MAX, Ranges, Slot, magnitude

Weights = Callable[[torch.nn.Module, torch.Tensor, torch.dtype], AbstractContextManager]
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def kind_of(module: torch.nn.Module) -> str | None:
    """``linear``, ``conv``, ``transposed``, or None for a module that multiplies no matrices."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return "linear"
    if isinstance(module, torch.nn.modules.conv._ConvTransposeNd):
        return "transposed"
    return "conv" if isinstance(module, torch.nn.modules.conv._ConvNd) else None


def has_wide_output(device: torch.device, kind: str) -> bool:
    """Whether fp16 operands can give an fp32 result: on CUDA for matrix products from torch 2.8 on (PyTorch #150812).

    A CPU has no fp16 units to gain from; it multiplies the rounded operands in fp32, which is the same arithmetic.
    """
    if device.type == "cpu":
        return True
    return device.type == "cuda" and kind == "linear" and torch.version.hip is None and torch_version() >= (2, 8)


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class SafeOperation:
    """One module's forward with fp16 operands: finite wherever fp32 is.

    Args:
        module: a Linear, Conv or ConvTranspose.
        slot: where its magnitudes are kept.
        ranges: the model's measuring state.
        weights: gives ``(weight, bias)`` of the module on the input's device, the weight in the dtype asked for and the
            bias in fp32, as a context.
        wide: whether the device returns fp32 from fp16 operands; None to ask it.
    """

    def __init__(self, module: torch.nn.Module, slot: Slot, ranges: Ranges, weights: Weights, wide: bool | None = None):
        self.module = module
        self.kind = kind_of(module)
        self.slot = slot
        self.ranges = ranges
        self.weights = weights
        self.wide = wide
        self.full = False

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """``x``: the module's input, any float dtype. Returns fp32."""
        with self.weights(self.module, x, torch.float32 if self.full else torch.float16) as (weight, bias):
            if self.ranges.measuring:
                return self._measure(x, weight, bias, *args, **kwargs)
            if self.full:
                return self._apply(x.float(), weight, bias, *args, **kwargs)
            self.slot.record(magnitude(x))
            return self._fp16(x, weight, bias, *args, **kwargs)

    def _measure(self, x, weight, bias, *args, **kwargs) -> torch.Tensor:
        gain = 1.0 if self._is_wide(x.device) else max(1.0, largest_row_sum(weight, self.kind))
        self.full = self.full or not math.isfinite(gain) or not bool(torch.isfinite(weight).all())
        if self.full:
            with self.weights(self.module, x, torch.float32) as (weight, bias):
                result = self._apply(x.float(), weight, bias, *args, **kwargs)
        else:
            self.slot.fit(magnitude(x).item(), gain)
            result = self._fp16(x, weight, bias, *args, **kwargs)
        self.slot.work += 2 * result.numel() * weight.numel() // weight.shape[1 if self.kind == "transposed" else 0]
        return result

    def _fp16(self, x, weight, bias, *args, **kwargs) -> torch.Tensor:
        exponent = self.slot.exponent
        x = (x * 2.0**-exponent if exponent else x).to(torch.float16)
        product = self._wide(x, weight, *args, **kwargs) if self._is_wide(x.device) else self._narrow(x, weight, *args, **kwargs)
        if exponent:
            product = product.mul_(2.0**exponent)
        return product if bias is None else product.add_(self._broadcast(bias, product))

    def _is_wide(self, device: torch.device) -> bool:
        return has_wide_output(device, self.kind) if self.wide is None else self.wide

    def _wide(self, x, weight, *args, **kwargs) -> torch.Tensor:
        if x.device.type == "cpu":
            return self._apply(x.float(), weight.float(), None, *args, **kwargs)
        product = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
        return product.reshape(*x.shape[:-1], weight.shape[0])

    def _narrow(self, x, weight, *args, **kwargs) -> torch.Tensor:
        return self._apply(x, weight, None, *args, **kwargs).float()

    def _apply(self, x, weight, bias, *args, **kwargs) -> torch.Tensor:
        module = self.module
        if self.kind == "linear":
            return F.linear(x, weight, bias)
        if self.kind == "conv":
            return module._conv_forward(x, weight, bias, *args, **kwargs)
        dimensions = weight.dim() - 2
        output_size = args[0] if args else kwargs.get("output_size")
        padding = module._output_padding(
            x, output_size, module.stride, module.padding, module.kernel_size, dimensions, module.dilation
        )
        convolve = TRANSPOSED[dimensions]
        return convolve(x, weight, bias, module.stride, module.padding, padding, module.groups, module.dilation)

    def _broadcast(self, bias: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        return bias if self.kind == "linear" else bias.reshape(-1, *[1] * len(self.module.kernel_size))


def largest_row_sum(weight: torch.Tensor, kind: str) -> float:
    """``max ||w||_1`` over the output channels: the largest factor by which a layer can raise ``amax`` of its input."""
    outputs = weight.transpose(0, 1) if kind == "transposed" else weight
    return torch.linalg.vector_norm(outputs.reshape(outputs.shape[0], -1), 1, dim=1, dtype=torch.float32).max().item()


class SafeAttention:
    """Attention with fp16 operands wherever neither an operand nor a score can pass fp16's range, in fp32 elsewhere.

    A score is at most ``max ||q|| * max ||k|| * scale`` (Cauchy-Schwarz); a result is a mean of rows of ``v``.
    """

    def __init__(self, ranges: Ranges):
        self.ranges = ranges
        self.slot = ranges.slot("attention")
        self.in_full: list[bool] = []
        self.full_work = 0
        self.index = 0

    def begin(self) -> None:
        """Call before each model call: attentions are told apart by their order."""
        self.index = 0
        if self.ranges.measuring:
            self.full_work = 0

    def __call__(self, attention: Callable, q, k, v, heads: int, *args, **kwargs) -> torch.Tensor:
        """``attention`` with ComfyUI's arguments. Returns the dtype of ``q``."""
        index, self.index = self.index, self.index + 1
        if self.ranges.measuring:
            self._measure(index, q, k, v, heads, kwargs)
        if index >= len(self.in_full) or self.in_full[index]:
            return attention(q, k, v, heads, *args, **kwargs)
        if not self.ranges.measuring:
            self.slot.record(largest_in_attention(q, k, v, heads, kwargs))
        half = (tensor.to(torch.float16) for tensor in (q, k, v))
        masks = (_half_mask(mask) for mask in args)
        kwargs = {**kwargs, "mask": _half_mask(kwargs.get("mask"))} if "mask" in kwargs else kwargs
        return attention(*half, heads, *masks, **kwargs).to(q.dtype)

    def _measure(self, index: int, q, k, v, heads: int, kwargs) -> None:
        largest = largest_in_attention(q, k, v, heads, kwargs).item()
        full = not largest * 2.0 < FP16_MAX
        if index < len(self.in_full):
            self.in_full[index] = self.in_full[index] or full
        else:
            self.in_full.append(full)
        self.slot.limit = FP16_MAX
        work = 4 * q.numel() * k.shape[-2]
        if self.in_full[index]:
            self.full_work += work
        else:
            self.slot.work += work


def _head_size(q: torch.Tensor, heads: int) -> int:
    return q.shape[-1] if q.dim() == 4 else q.shape[-1] // heads


def largest_in_attention(q, k, v, heads: int, kwargs: dict) -> torch.Tensor:
    """The largest number an attention can hold: a norm of a row of q or k, an element of v, or the bound on a score."""
    size = _head_size(q, heads)
    rows = [torch.linalg.vector_norm(t.unflatten(-1, (-1, size)), dim=-1, dtype=torch.float32).amax() for t in (q, k)]
    score = rows[0] * rows[1] * (kwargs.get("scale") or size**-0.5)
    return torch.stack([*rows, score, magnitude(v)]).amax()


def _half_mask(mask):
    """A floating mask in fp16. Half of the largest negative number hides a token as well as -inf and can be added to."""
    if not torch.is_tensor(mask) or not mask.is_floating_point():
        return mask
    return mask.clamp(min=-FP16_MAX / 2).to(torch.float16)
