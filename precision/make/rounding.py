"""Choose the codes of a weight by what the layer's inputs are: GPTQ, block by block.

Rounding to nearest keeps each number close. What counts is the layer's result, and there an error in one column can be
made good by the columns that are rounded after it: GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds one column after
the other, the one with the largest inputs first, and moves the rest by what the inverse of the inputs' products says;
sweeps of coordinate descent afterwards choose each column again with all others fixed (QuantEase, Behdin et al. 2023,
arXiv 2309.01885). Formats and scales stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

DAMPING = 0.01
DAMPING_OF_FEW = 0.2
STEP = 32
SWEEPS = 2

Nearest = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Round values ``(rows, c)``, which stand in those ``c`` columns of a weight, to the nearest numbers it can hold."""


@torch.no_grad()
def rounded(
    values: torch.Tensor, blocks: torch.Tensor, tokens: int, nearest: Nearest, sweeps: int = SWEEPS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight ``(rows, K)`` in fp32 with the least error on inputs of these products.

    Args:
        blocks: ``(K / b, b, b)``, on the host; in the weight's own basis. ``tokens``: how many inputs are in them.

    Returns:
        The numbers ``(rows, K)``, and the squared errors on those inputs, a sum each: of rounding to nearest, and of
        the numbers returned. No block of a row is worse than rounded to nearest: where it would be, it is.
    """

    def grid(at: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return nearest(columns.T, at).T

    count, width, _ = blocks.shape
    order = blocks.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True)
    ordered = blocks.gather(1, order[:, :, None].expand_as(blocks)).gather(2, order[:, None, :].expand_as(blocks))
    columns = (order + torch.arange(count)[:, None] * width).to(values.device)
    exact = values.T[columns.reshape(-1)].view(count, width, -1)
    damped, factor = (matrix.to(values.device) for matrix in _damped_and_factor(ordered, damping(width, tokens)))
    ordered = ordered.to(values.device)
    near = grid(columns.reshape(-1), exact.flatten(0, 1)).view_as(exact)
    chosen = _gptq(exact, columns, factor, grid)
    for _ in range(sweeps):
        _sweep(chosen, exact, columns, damped, grid)
    before, after = _errors(near - exact, ordered), _errors(chosen - exact, ordered)
    chosen = torch.where((after < before)[:, None], chosen, near)
    result = torch.empty_like(values.T)
    result[columns.reshape(-1)] = chosen.flatten(0, 1)
    return result.T.contiguous(), before.sum(), torch.minimum(before, after).sum()


def damping(width: int, tokens: int) -> float:
    """Return the share of the mean diagonal to add to blocks of that width, sums over so many tokens.

    1 % is GPTQ's own. Fewer tokens than inputs say nothing of most directions, and a larger part keeps the change there
    small: as if each block had met a fifth of its width in tokens of no direction (docs/internals/calibration.md).
    """
    return max(DAMPING, DAMPING_OF_FEW * width / max(tokens, 1))


def _gptq(exact: torch.Tensor, columns: torch.Tensor, factor: torch.Tensor, grid: Nearest) -> torch.Tensor:
    """Round each block's columns in order; ``factor``: the upper Cholesky factors of the inverse products."""
    moved = exact.clone()
    width = exact.shape[1]
    for start in range(0, width, STEP):
        end = min(start + STEP, width)
        errors = torch.empty_like(moved[:, start:end])
        for j in range(start, end):
            value = grid(columns[:, j], moved[:, j])
            errors[:, j - start] = (moved[:, j] - value) / factor[:, j, j, None]
            moved[:, j] = value
            moved[:, j + 1 : end] -= factor[:, j, j + 1 : end, None] * errors[:, None, j - start]
        moved[:, end:] -= torch.bmm(factor[:, start:end, end:].mT, errors)
    return moved


def _sweep(
    chosen: torch.Tensor, exact: torch.Tensor, columns: torch.Tensor, products: torch.Tensor, grid: Nearest
) -> None:
    """Choose each column again, in place, with the others as they are."""
    width = exact.shape[1]
    slope = torch.bmm(products, chosen - exact)
    for start in range(0, width, STEP):
        end = min(start + STEP, width)
        changes = torch.empty_like(chosen[:, start:end])
        for j in range(start, end):
            value = grid(columns[:, j], chosen[:, j] - slope[:, j] / products[:, j, j, None])
            changes[:, j - start] = value - chosen[:, j]
            chosen[:, j] = value
            slope[:, j + 1 : end] += products[:, j, j + 1 : end, None] * changes[:, None, j - start]
        slope[:, end:] += torch.bmm(products[:, start:end, end:].mT, changes)


def _errors(difference: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Return the squared error ``(blocks, rows)`` that a difference makes on inputs of these products."""
    return torch.bmm(products, difference).mul_(difference).sum(1)


def _damped_and_factor(products: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return products with a part of their mean diagonal added, and the upper Cholesky factor of the inverse.

    Where even those have none, as sums in fp32 of few tokens may, more is added.
    """
    exact = products.double()
    mean = exact.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    mean = torch.where(mean > 0, mean, 1.0)
    while True:
        damped = exact + damping * mean * torch.eye(exact.shape[1], dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed.any():
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed.any():
            return damped.float(), factor.float()
        damping *= 10
