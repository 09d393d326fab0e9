"""A low-rank change of a weight, added to the product instead of into the weight: ``y = W x + up (scale * (down
x))``.

What an 8-bit weight holds is on a grid; a LoRA that is added to it and rounded again moves the weight by whole steps of
that grid, and the rounding of the sum is new noise of the grid's size. Two thin products of its own lose nothing of
either.

The factors are normalized by powers of two, which is exact: rows of ``down`` to a sum of magnitudes of at most
``LARGEST_SUM``, columns of ``up`` to a largest magnitude of at most 1. Inputs of both products are brought to a largest
magnitude of 1 where they are in fp16. So no partial sum of ``down x`` passes ``LARGEST_SUM``, and none of ``up h`` the
rank: neither product can overflow, in whatever precision it is accumulated. Nor does it lose small numbers: a sum of 1
would leave most of a wide ``down`` below fp16's smallest normal number, and the matrix units of MI200 read those as
zero ("Numerical accuracy" in PyTorch's notes).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..amax import norm_loses_nan
from .operand_scale import converts_results

SMALLEST_SIZE = 2.0**-120
SMALLEST_HALF = 2.0**-24
"""fp16's smallest number."""
LARGEST_SUM = 2.0**14
"""What the magnitudes of a row of ``down`` add up to at most: a quarter of fp16's range, so that rounding cannot pass
it."""
ROOM = 8.0
"""A row's size may pass fp16's largest number by this much where its products do not."""


@dataclass(frozen=True)
class Factors:
    """``up @ diag(scale) @ down`` is the change of a weight.

    Args:
        down: ``(rank, inputs)``, each row's magnitudes sum up to at most ``LARGEST_SUM``.
        up: ``(outputs, rank)``, each column's largest magnitude is at most 1.
        scale: ``(rank,)``, fp32.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: torch.Tensor


def normalized(down: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> Factors:
    """Normalize ``down`` ``(rank, inputs)`` and ``up`` ``(outputs, rank)``, any float dtype, to factors in
    ``dtype``."""
    down, up = down.float(), up.float()
    down_exponent = _exponent(down.abs().sum(1) / LARGEST_SUM)
    up_exponent = _exponent(up.abs().amax(0))
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


def inner_product(x: torch.Tensor, down: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``scale * (down x)`` as ``(h, size)``, ready to be multiplied by ``up``; ``size``:
    what to multiply that by, per row.

    Args:
        x: ``(..., inputs)``, any float dtype.
        down: normalized, in the dtype to multiply in.
        scale: ``(rank,)``, fp32.

    Returns:
        ``h`` ``(..., rank)`` in the dtype of ``down``, and ``size`` ``(..., 1)`` in fp32, which fp16 alone has.
    """
    if down.dtype != torch.float16:
        h = F.linear(x.to(down.dtype), down)
        return (h.mul_(scale) if converts_results(h.device) else (h * scale).to(h.dtype)), None
    size = _size(x)
    h = _half_product(_scaled_down(x, size), down) * scale  # in fp32, as ``scale`` is
    peak = _size(h)
    return (h / peak).to(torch.float16), peak * size


def add_outer_product(base: torch.Tensor, h: torch.Tensor, size: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """Compute ``base + size * (up h)`` in the dtype of ``base`` ``(..., outputs)``,
    for what :func:`inner_product` gave."""
    if size is None:
        return (base + F.linear(h, up)).to(base.dtype)
    product = _half_product(h, up)
    if base.dtype == torch.float16:  # one pass, no fp32 copy of the result; it is added up in fp32 and rounded once
        return torch.addcmul(base, product.to(base.dtype), (size / ROOM).to(base.dtype), value=ROOM)
    return torch.addcmul(base, product, size).to(base.dtype)


def _scaled_down(rows: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Compute ``rows / size`` in fp16, divided in fp32 and rounded once. fp16 rows are copied once:
    their ``size`` is an fp16 number too."""
    return (rows / (size.to(rows.dtype) if rows.dtype == torch.float16 else size)).to(torch.float16)


def _half_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply fp16 operands; a CPU multiplies the rounded operands in fp32, as in ``linear.py``."""
    return F.linear(a.float(), b.float()) if a.device.type == "cpu" else F.linear(a, b)


def _size(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row, ``(..., 1)`` in fp32, and never 0, nor in fp16 where the rows are."""
    if norm_loses_nan(rows.device):
        size = rows.abs().amax(-1, keepdim=True).float()
    else:
        size = torch.linalg.vector_norm(rows, math.inf, dim=-1, keepdim=True, dtype=torch.float32)
    return size.clamp_(min=SMALLEST_HALF if rows.dtype == torch.float16 else SMALLEST_SIZE)
