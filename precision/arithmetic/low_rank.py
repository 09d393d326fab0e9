"""A low-rank change of a weight, added to the product instead of into the weight: ``y = W x + up (scale * (down
x))``.

What an 8-bit weight holds is on a grid; a LoRA that is added to it and rounded again moves the weight by whole steps of
that grid, and the rounding of the sum is new noise of the grid's size. Two thin products of its own lose nothing of
either.

The factors are normalized by powers of two, which is exact: rows of ``down`` to a sum of magnitudes of at most
``LARGEST_SUM``, columns of ``up`` to a largest magnitude from 1 to 2. Nothing in between overflows in fp16:

==================  =============================================================  ====================================
input               what is multiplied                                             why ``h = scale * (down x)`` fits
==================  =============================================================  ====================================
operand of a layer  as the layer multiplies it, and its result is added to         ``|h|`` is at most ``gain * amax(x)``
that is bounded     ``factor * up (h / factor)``                                   (Hoelder), and amax(x) is bounded: it
                                                                                   is recorded or known for the layer
any in fp16, for    as it is                                                       where ``h`` passes fp16's range, the
an fp16 result                                                                     change it stands for does
any other in fp16   rows brought to a largest magnitude of 1                       ``|h|`` is at most ``gain``
bf16, fp32          as it is                                                       the dtype has fp32's range
==================  =============================================================  ====================================

``gain`` is a bound of the change of an output as well, so ``factor``, a power of two, is chosen from it. What
``down`` makes of an fp16 input is summed and kept in fp32, or its input is at most 1: a row of ``down`` sums up to
more than fp16's smallest numbers, as a sum of 1 would leave most of a wide ``down`` below fp16's smallest normal
number, and the matrix units of MI200 read those as zero ("Numerical accuracy" in PyTorch's notes).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..amax import norm_loses_nan
from ..dtypes import FP16_MAX
from .operand_scale import converts_results
from .proofs import MARGIN
from .wide_product import add_wide_product, wide_product

ROUNDING = 1.01
"""What rounding adds to a bound."""
SMALLEST_SIZE = 2.0**-120
SMALLEST_HALF = 2.0**-24
"""fp16's smallest number."""
LARGEST_SUM = 2.0**14
"""What the magnitudes of a row of ``down`` add up to at most: a quarter of fp16's range, so that rounding cannot pass
it."""


@dataclass(frozen=True)
class Factors:
    """``up @ diag(scale) @ down`` is the change of a weight.

    Args:
        down: ``(rank, inputs)``, each row's magnitudes sum up to at most ``LARGEST_SUM``.
        up: ``(outputs, rank)``, each column's largest magnitude is from 1 to 2.
        scale: ``(rank,)``, fp32.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: torch.Tensor

    @property
    def gain(self) -> float:
        """How much larger than the largest magnitude of an input ``scale * (down x)`` or the change can be."""
        rows = self.scale.abs().cpu() * self.down.float().abs().sum(1).cpu()
        largest = torch.cat([rows, self.up.float().abs().cpu() @ rows]).amax().item()
        return ROUNDING * largest if math.isfinite(largest) else math.inf


def normalized(down: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> Factors:
    """Normalize ``down`` ``(rank, inputs)`` and ``up`` ``(outputs, rank)``, any float dtype, to factors in
    ``dtype``."""
    down, up = down.float(), up.float()
    down_exponent = _exponent(down.abs().sum(1) / LARGEST_SUM)
    up_exponent = _exponent(up.abs().amax(0)) - 1
    scale = torch.ldexp(torch.ones_like(down_exponent, dtype=torch.float32), down_exponent + up_exponent)
    down, up = torch.ldexp(down, -down_exponent[:, None]), torch.ldexp(up, -up_exponent)
    return Factors(down.to(dtype), up.to(dtype), scale)


def _exponent(sizes: torch.Tensor) -> torch.Tensor:
    """Return the exponents of the smallest powers of two that reach ``sizes``; 0 for what is not finite."""
    return torch.where(torch.isfinite(sizes), torch.frexp(sizes).exponent, 0)


def joined(parts: list[Factors]) -> Factors:
    """Join the factors of several changes of one weight into those of their sum."""
    if len(parts) == 1:
        return parts[0]
    axes = {"down": 0, "up": 1, "scale": 0}
    return Factors(**{name: torch.cat([getattr(part, name) for part in parts], axis) for name, axis in axes.items()})


def hadamard_factors(downs: list[torch.Tensor], ups: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (down, up) of ``(up1 @ down1) * (up2 @ down2)``, of rank ``r1 * r2``: the row-wise and column-wise
    Kronecker products."""
    down = (downs[0].float()[:, None] * downs[1].float()[None]).flatten(0, 1)
    up = (ups[0].float()[:, :, None] * ups[1].float()[:, None]).flatten(1)
    return down, up


def kronecker_factors(downs: list[torch.Tensor], ups: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (down, up) of ``kron(up1 @ down1, up2 @ down2)``, of rank ``r1 * r2``."""
    return torch.kron(*(down.float() for down in downs)), torch.kron(*(up.float() for up in ups))


def fitting_factor(largest: float) -> float:
    """Return a power of two that sums of at most ``largest`` are divided by to fit fp16, rounding included."""
    return 2.0 ** math.frexp(MARGIN * largest / FP16_MAX)[1] if math.isfinite(largest) else 1.0


def inner_product(x: torch.Tensor, down: torch.Tensor, scale: torch.Tensor, wide: bool = False) -> torch.Tensor:
    """Compute ``scale * (down x)``, rounded once where the device can.

    Args:
        x: ``(..., inputs)``, in the dtype of ``down``.
        down: normalized.
        scale: ``(rank,)``, fp32.
        wide: multiply fp16 into fp32; else no number of an fp16 ``x`` may be larger than 1.

    Returns:
        ``(rows, rank)``, in the dtype of ``down``.
    """
    rows = x.reshape(-1, x.shape[-1])
    return _scaled(_product(rows, down, wide), scale, down.dtype)


def _scaled(product: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``product * scale`` in ``dtype``, computed in fp32, in one kernel where the device has one."""
    recorded = product.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling() or recorded or not converts_results(product.device):
        return (product * scale).to(dtype)
    return torch.mul(product, scale, out=torch.empty_like(product, dtype=dtype) if product.dtype != dtype else product)


def add_outer_product(
    base: torch.Tensor,
    h: torch.Tensor,
    up: torch.Tensor,
    factor: float | torch.Tensor = 1.0,
    size: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``base + factor * size * (up h)``, in place where that is possible.

    Args:
        base: ``(..., outputs)``, the layer's own result.
        h: of :func:`inner_product`.
        up: ``(outputs, rank)``, in the dtype of ``h``.
        factor: a number, or a tensor of one in a compiled graph.
        size: ``(..., 1)``, what to multiply each row by; ``h`` in fp16 alone has one.
    """
    if torch.compiler.is_compiling() or (base.requires_grad and torch.is_grad_enabled()) or not base.is_contiguous():
        product = _product(h, up, wide=size is None and h.dtype == torch.float16).reshape(base.shape)
        return (base + product * (factor if size is None else size * factor)).to(base.dtype)
    total = base.view(-1, base.shape[-1])
    if size is not None:
        product = _product(h, up).to(torch.float16)
        total.addcmul_(product, size.reshape(-1, 1).to(base.dtype), value=factor)  # added in fp32 and rounded once
    elif base.dtype == h.dtype:
        total.addmm_(h, up.t(), alpha=factor)
    elif h.dtype == torch.float16:
        add_wide_product(total, h, up.t(), factor)
    else:
        total.add_(F.linear(h, up), alpha=factor)
    return base


def _product(a: torch.Tensor, b: torch.Tensor, wide: bool = False) -> torch.Tensor:
    """Multiply; a CPU multiplies rounded fp16 operands in fp32, as in ``linear.py``. ``wide``: another device does."""
    if a.dtype == torch.float16 and a.device.type == "cpu":
        return F.linear(a.float(), b.float())
    return wide_product(a, b.t()) if wide else F.linear(a, b)


def row_sizes(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row, ``(..., 1)`` in fp32, and never 0, nor in fp16 where the rows are."""
    x = x.detach()
    if norm_loses_nan(x.device):
        size = x.abs().amax(-1, keepdim=True).float()
    else:
        size = torch.linalg.vector_norm(x, math.inf, dim=-1, keepdim=True, dtype=torch.float32)
    return size.clamp_(min=SMALLEST_HALF if x.dtype == torch.float16 else SMALLEST_SIZE)


def scaled_down(x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Compute ``x / size`` in fp16, divided in fp32 and rounded once. fp16 rows are copied once: their ``size`` is an
    fp16 number too."""
    if x.dtype == torch.float16:
        return x / size.to(x.dtype)
    recorded = x.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling() or recorded or not converts_results(x.device):
        return (x / size).to(torch.float16)
    return torch.div(x, size, out=torch.empty_like(x, dtype=torch.float16))
