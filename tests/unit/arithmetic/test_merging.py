"""When a change of an 8-bit weight is merged into it: by the rank of its factors, and by what rounding leaves of it."""

import math

import pytest
import torch
from halfsafe.precision.arithmetic.merging import LARGEST_LOSS, MergingError, merging_error, outweighs
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 1 << 15), st.integers(1, 1 << 15), st.integers(0, 1 << 14))
def test_from_where_factors_take_more_bytes_than_the_weight(outputs, inputs, rank):
    factors, weight = 2 * rank * outputs + 2 * rank * inputs, outputs * inputs
    assert outweighs(rank, (outputs, inputs)) == (factors > weight)


@pytest.mark.parametrize(("shape", "most"), [((3072, 3072), 768), ((12288, 3072), 1228), ((640, 640), 160), ((5120, 13824), 1868)])
def test_the_largest_rank_beside(shape, most):
    assert not outweighs(most, shape) and outweighs(most + 1, shape)


def test_the_error_is_that_of_the_rounding_alone():
    generator = torch.Generator().manual_seed(0)
    base, change = (torch.randn(64, 128, generator=generator) for _ in range(2))
    exact = base + change / 10
    rounded = (exact * 16).round() / 16
    error = merging_error(base, exact, rounded)
    lost = float((rounded.double() - exact).norm())
    assert error.of_weight == pytest.approx(lost / float(exact.double().norm()), rel=1e-4)
    assert error.of_change == pytest.approx(lost / float((exact.double() - base).norm()), rel=1e-4)
    assert merging_error(base, exact, exact) == MergingError(0.0, 0.0)


@pytest.mark.parametrize(
    ("of_change", "kept"), [(0.0, True), (LARGEST_LOSS, True), (LARGEST_LOSS * 1.01, False), (1.0, False), (math.inf, False), (math.nan, False)]
)
def test_a_change_is_kept_while_rounding_is_at_most_half_of_it(of_change, kept):
    assert MergingError(0.01, of_change).keeps_change is kept


def test_no_change_and_one_that_is_not_finite_are_not_kept():
    base = torch.ones(4, 4)
    assert not merging_error(base, base, base).keeps_change
    assert not merging_error(base, base * math.nan, base * math.nan).keeps_change
