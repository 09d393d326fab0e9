"""Bounds on the values of a tensor that are known without a look at it: from a norm's parameters, from a layer's
weight, from a measurement of the same tensor earlier in the call.

==============================  ===================================================================================
result of                       bound, for every input that is finite
==============================  ===================================================================================
LayerNorm of d numbers          it is ``g * z + b`` with ``sum z = 0`` and ``sum z**2 <= d``, so by Cauchy-Schwarz
                                ``|z_i| <= sqrt(d - 1)``: an element is at most ``|g_i| sqrt(d - 1) + |b_i|``, a row's
                                2-norm at most ``max |g| sqrt(d) + ||b||``
RMSNorm of d numbers            ``g * z`` with ``sum z**2 <= d``: the same with ``sqrt(d)`` and no ``b``
GroupNorm of groups of d        as LayerNorm in each group. A sample of c channels of n numbers has a 2-norm of at most
                                ``sqrt(d sum_groups max g**2) + sqrt(n) ||b||``
Linear                          ``|y_i| <= min(||w_i||_2 ||x||_2, ||w_i||_1 max |x|) + |b_i|`` (Hoelder); so is every
                                partial sum. 64 of its outputs have a 2-norm of at most ``s ||x||_2 + ||b||_2``, ``s``
                                the largest singular value of their rows (``spectral_bound``)
convolution, zeros around it    as Linear, ``w_i`` all weights of output i: what a kernel covers are numbers of the
                                sample, each once
attention                       a mean of rows of v: no element is larger than v's largest
``scale * x + shift``           ``max |scale|`` times the bound of x, plus ``max |shift|`` for each element
a view of a tensor              its elements are among the tensor's
==============================  ===================================================================================

What is not finite stays so through every layer behind it: the last operation of a call is always measured
(``Calibration``). ``ROUNDING`` is what arithmetic adds: fp16 operands round by ``2**-11``, fp32 sums of K products by
less than ``K * 2**-23`` of the sum of their magnitudes, which both bounds are bounds of. No bound holds of the
LayerNorm of a row whose deviations are below fp32's rounding of its mean: that is noise of up to
``|mean| * 2**-24 / sqrt(eps)``.
"""

import math
from typing import NamedTuple

import torch

ROUNDING = 1.01
PART = 64
"""Successive outputs that are bounded together: attention heads are a multiple of it in most models."""


class ValueBound(NamedTuple):
    """Bound the magnitudes in a tensor: of an element, the 2-norm of a row (last dimension), the 2-norm of ``PART``
    successive numbers of a row that begin at a multiple of it, and the 2-norm of a sample (all but the first
    dimension)."""

    largest: float
    norm: float = math.inf
    part: float = math.inf
    sample: float = math.inf

    def is_within(self, other: "ValueBound") -> bool:
        """Tell whether whatever keeps this bound keeps the other."""
        return self is other or all(mine <= theirs for mine, theirs in zip(self, other, strict=True))

    def of_head(self, size: int) -> float:
        """Return the largest 2-norm of ``size`` successive numbers of a row, from a multiple of it on."""
        parts = math.sqrt(size / PART) * self.part if size % PART == 0 else math.inf
        return min(math.sqrt(size) * self.largest, self.norm, parts)


def of_elements(largest: float, columns: int) -> ValueBound:
    """Bound rows of ``columns`` numbers that are no larger than ``largest``."""
    return ValueBound(largest, math.sqrt(columns) * largest, math.sqrt(PART) * largest)


def after_norm(size: int, centred: bool, weight: torch.Tensor | None, bias: torch.Tensor | None) -> ValueBound:
    """Bound the result of a LayerNorm (``centred``) or an RMSNorm of ``size`` numbers, from its parameters."""
    element, row = math.sqrt(size - 1 if centred else size), math.sqrt(size)
    numbers = [element, row] if weight is None and bias is None else _with_parameters(element, row, weight, bias)
    largest, norm = _rounded_up(numbers)
    return ValueBound(largest, norm, min(norm, math.sqrt(PART) * largest))


def after_group_norm(
    groups: int, sample: torch.Size, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> ValueBound:
    """Bound the result of a GroupNorm from its parameters. ``sample``: its shape but for the first dimension,
    (channels, ...)."""
    channels, size, numbers = sample[0], sample.numel() // groups, sample.numel() // sample[0]
    like = torch.ones(channels) if weight is None else weight.detach()
    gain = like.float().abs()
    shift = torch.zeros_like(gain) if bias is None else bias.detach().float().abs()
    largest = (gain * math.sqrt(size - 1) + shift).amax()
    by_group = torch.linalg.vector_norm(gain.unflatten(0, (groups, -1)).amax(1))
    norm = by_group * math.sqrt(size) + torch.linalg.vector_norm(shift) * math.sqrt(numbers)
    largest, norm = _rounded_up(_read([largest, norm]))
    return ValueBound(largest, norm, min(norm, math.sqrt(PART) * largest), norm)


def _with_parameters(element: float, row: float, weight: torch.Tensor | None, bias: torch.Tensor | None) -> list[float]:
    gain = torch.ones_like(bias, dtype=torch.float32) if weight is None else weight.detach().float().abs()
    shift = torch.zeros_like(gain) if bias is None else bias.detach().float().abs()
    largest = (gain * element + shift).amax()
    return _read([largest, gain.amax() * row + torch.linalg.vector_norm(shift)])


def after_linear(weight: torch.Tensor, bias: torch.Tensor | None, x: ValueBound) -> ValueBound:
    """Bound the result of a Linear from the bound of its operand.

    Args:
        weight: as it is multiplied, (outputs, K).
        bias: or None.
        x: of the operand.
    """
    shift = weight.new_zeros(weight.shape[0], dtype=torch.float32) if bias is None else bias.detach().float().abs()
    sums = x.largest * torch.linalg.vector_norm(weight, 1, dim=1, dtype=torch.float32)
    if x.norm < math.inf:
        sums = torch.minimum(sums, x.norm * torch.linalg.vector_norm(weight, 2, dim=1, dtype=torch.float32))
    reach = sums + shift
    numbers = [reach.amax(), torch.linalg.vector_norm(reach)]
    if weight.shape[0] % PART == 0:
        by_part = torch.linalg.vector_norm(reach.unflatten(0, (-1, PART)), dim=1)
        if x.norm < math.inf:
            of_bias = torch.linalg.vector_norm(shift.unflatten(0, (-1, PART)), dim=1)
            by_part = torch.minimum(by_part, x.norm * spectral_bound(weight.unflatten(0, (-1, PART))) + of_bias)
        numbers.append(by_part.amax())
    return ValueBound(*_rounded_up(_read(numbers)))


def after_conv(weight: torch.Tensor, bias: torch.Tensor | None, x: ValueBound, zeros_around: bool) -> ValueBound:
    """Bound the result of a convolution from the bound of its operand.

    Args:
        weight: as it is multiplied, (outputs, ...).
        bias: or None.
        x: of the operand.
        zeros_around: it is padded with nothing else, which would repeat numbers of the sample.
    """
    rows = weight.flatten(1)
    sums = x.largest * torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float32)
    if zeros_around and x.sample < math.inf:
        sums = torch.minimum(sums, x.sample * torch.linalg.vector_norm(rows, 2, dim=1, dtype=torch.float32))
    reach = [sums.amax()] if bias is None else [sums.amax(), bias.detach().float().abs().amax()]
    return ValueBound(*_rounded_up([sum(_read(reach))]))


def modulated(bound: ValueBound, scale: float, shift: float, columns: int) -> ValueBound:
    """Bound rows of ``columns`` numbers times what is no larger than ``scale``, plus what is no larger than ``shift``;
    rounded to fp16 at most."""
    scaled = ValueBound(*(ROUNDING * scale * number for number in bound))
    return plus(scaled, shift, columns)


def plus(bound: ValueBound, largest: float, columns: int) -> ValueBound:
    """Bound the sum of a tensor and one of ``columns`` numbers a row that are no larger than ``largest``."""
    added = of_elements(ROUNDING * largest, columns)
    return ValueBound(*(one + other for one, other in zip(bound, added, strict=True)))


def _read(numbers: list[torch.Tensor]) -> list[float]:
    return torch.stack(numbers).tolist()


def _rounded_up(numbers: list[float]) -> list[float]:
    """Add what rounding adds; what is NaN bounds nothing."""
    return [math.inf if math.isnan(number) else ROUNDING * number for number in numbers]


def spectral_bound(matrices: torch.Tensor) -> torch.Tensor:
    """Bound the largest singular value of each matrix (..., PART, K) from above, at most ``PART**(1/16)`` = 1.30 times
    too large: ``s**16 <= sum s_i**16 = ||(M M^T)**4||_F**2``."""
    rows = matrices.float()
    gram = rows @ rows.transpose(-1, -2)
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    power = gram / size[..., None, None]
    for _ in range(2):
        power = power @ power
    return (torch.linalg.matrix_norm(power) ** 0.25 * size).sqrt()
