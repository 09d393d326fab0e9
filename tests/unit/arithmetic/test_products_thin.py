"""Factors of LoRAs and rows of inputs in fp16: scaled so that nothing in between overflows, and nothing is lost."""

import pytest
import torch
from halfsafe.precision.arithmetic.products import normalized, rows_in_fp16
from support.measures import relative_error


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("shape", [(8, 4096), (4096, 8)])
def test_a_factor_is_scaled_by_a_power_of_two_that_bounds_its_rows(size, shape):
    factor = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * size
    made, power = normalized(factor, torch.float16)
    assert made.dtype == torch.float16 and made.float().abs().sum(1).max() <= max(1.0, shape[1] / 64) * 1.001
    assert relative_error(factor, made.double() * power) < 1e-3
    assert torch.frexp(torch.tensor(power))[0] == 0.5


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_factor_of_zeros_or_that_is_not_finite_stays_what_it_is(value):
    made, power = normalized(torch.full((2, 3), value), torch.float16)
    assert power == 1.0
    torch.testing.assert_close(made, torch.full((2, 3), value).half(), equal_nan=True)


def test_rows_are_scaled_each_by_its_own_and_zeros_stay():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)) * torch.tensor([[0.0], [1e-30], [1.0], [1e30]])
    half, size = rows_in_fp16(x)
    assert half.dtype == torch.float16 and half.abs().max() == 1
    assert torch.equal(half[0], torch.zeros(64).half())
    for row in (1, 2, 3):
        assert relative_error(x[row].double(), half[row].double() * size[row]) < 1e-3


def test_a_row_that_is_not_finite_leaves_the_others():
    x = torch.ones(3, 8)
    x[1, 2], x[2, 3] = float("inf"), float("nan")
    half, size = rows_in_fp16(x)
    assert torch.isfinite(half[0] * size[0]).all() and not any(
        torch.isfinite(half[row] * size[row]).all() for row in (1, 2)
    )


def test_a_factor_of_few_columns_stays_above_what_matrix_units_flush():
    """Units that flush subnormal fp16 numbers lose what is below 6e-5: a factor may sum to its columns / 64 and no less."""
    factor = torch.randn(16, 4096, generator=torch.Generator().manual_seed(3)) / 64
    made, power = normalized(factor, torch.float16)
    flushed = torch.where(made.float().abs() < torch.finfo(torch.float16).smallest_normal, 0.0, made.float())
    error = relative_error(factor, flushed.double() * power)
    assert error < 1e-3, f"error {error:.2g} with numbers below 6.1e-5 flushed, largest {made.abs().max():.3g}"
