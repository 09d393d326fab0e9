"""When sums in fp16 are proven to fit: from norms of the input and of the weight, with a margin."""

from __future__ import annotations

import math

import pytest
import torch
from halfsafe.precision.arithmetic.fp16_accumulation import (
    FLOOR_BITS,
    MARGIN,
    MAX_EXPONENT,
    WORTH_SCALING,
    SumBound,
    needed_exponent,
)
from halfsafe.precision.base.dtypes import FP16_MAX

FITS = FP16_MAX / MARGIN


def proven(x: torch.Tensor, weight: torch.Tensor, can_scale: bool = True) -> SumBound:
    """The bound of a layer with this weight after an input."""
    bound = SumBound("layer")
    norms = weight.abs().sum(1).max().item(), weight.norm(dim=1).max().item()
    bound.prove(x.abs().max().item(), x.norm(dim=1).max().item(), *norms, terms=weight.shape[1], can_scale=can_scale)
    return bound


def given(amax: float, row_sum: float = 1.0, can_scale: bool = True) -> SumBound:
    """The bound of a layer whose input has this amax and an endless 2-norm, so that the amax decides."""
    bound = SumBound("layer")
    bound.prove(amax, 1e30, row_sum, 1e30, terms=64, can_scale=can_scale)
    return bound


@pytest.mark.parametrize("seed", range(20))
def test_no_partial_sum_of_a_proven_layer_leaves_fp16(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 64, generator=generator, dtype=torch.float64) * 10 ** (seed % 5)
    weight = torch.randn(16, 64, generator=generator, dtype=torch.float64)
    bound = proven(x, weight)
    sums = (x[:, None] * weight).cumsum(2).abs().max().item() * 2.0**-bound.exponent
    assert not bound.proven or sums <= FITS, (sums, bound.evidence)
    assert bound.proven == (bound.exponent <= MAX_EXPONENT)


@pytest.mark.parametrize(("x", "weight", "by"), [([[1.0, 1, 1, 1]], [[3.0, 0, 0, 0]], "amax"), ([[4.0, 0, 0, 0]], [[1.0, 1, 1, 1]], "norm")])
def test_the_smaller_of_the_two_bounds_decides(x: list, weight: list, by: str) -> None:
    bound = proven(torch.tensor(x), torch.tensor(weight))
    assert bound.by == by and bound.gain == (3.0 if by == "amax" else 2.0)
    assert f"bound {3 if by == 'amax' else 8} of 65504" in bound.evidence and "K 4" in bound.evidence


@pytest.mark.parametrize(("bound", "exponent"), [(0.0, 0), (FITS, 0), (FITS * 1.001, 2), (FITS * 2, 2), (FITS * 2.001, 3), (math.inf, math.inf)])
def test_an_input_is_scaled_to_twice_the_margin_once_it_passes_the_margin(bound: float, exponent: float) -> None:
    assert needed_exponent(bound) == exponent
    assert exponent in (0, math.inf) or FITS / 4 < bound * 2.0**-exponent <= FITS / 2


@pytest.mark.parametrize(("factor", "scales"), [(0.9, False), (1.5, True)])
def test_the_proof_holds_up_to_the_margin_and_no_further(factor: float, scales: bool) -> None:
    bound = given(FITS * factor)
    assert bound.proven and bound.scales is scales and ("input scaled by 2^-" in bound.evidence) is scales
    assert bound.limit == pytest.approx(FITS * 2.0**bound.exponent)
    assert bound.holds(bound.limit) and not bound.holds(bound.limit * 1.001) and not bound.holds(math.nan)


@pytest.mark.parametrize(("exponent", "fits"), [(MAX_EXPONENT, True), (MAX_EXPONENT + 1, False)])
def test_an_input_that_would_have_to_be_scaled_too_far_is_not_proven(exponent: int, fits: bool) -> None:
    bound = given(FITS * 2.0 ** (exponent - 1))
    assert (bound.exponent, bound.proven, bound.holds(1.0)) == (exponent, fits, fits)
    assert ("input scaled" in bound.evidence) is fits


def test_an_input_that_scaling_would_push_below_fp16_is_not_scaled() -> None:
    smallest = 2.0 ** (2 - FLOOR_BITS)
    assert given(smallest, FITS * 2 / smallest).proven and not given(smallest * 0.99, FITS * 2 / smallest).proven


def test_a_layer_with_few_outputs_is_not_scaled_and_says_so() -> None:
    few = f"fewer than {WORTH_SCALING} outputs"
    assert not given(FITS * 2, can_scale=False).proven and few in given(FITS * 2, can_scale=False).evidence
    assert given(FITS, can_scale=False).proven and few not in given(FITS, can_scale=False).evidence
    assert few not in given(FITS * 2).evidence


@pytest.mark.parametrize(("largest", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)])
def test_an_input_that_is_not_finite_changes_no_proof(largest: float, norm: float) -> None:
    bound = given(1.0)
    evidence = bound.evidence
    bound.prove(largest, norm, 1.0, 1.0, terms=8, can_scale=True)
    assert bound.proven and (bound.evidence, bound.terms) == (evidence, 64)


def test_a_smaller_input_narrows_no_proof_until_it_is_forgotten() -> None:
    bound = given(FITS * 2)
    bound.prove(1.0, 1e30, 1.0, 1e30, terms=64, can_scale=True)
    assert bound.exponent == 2
    bound.forget()
    assert not bound.holds(0.0)
    bound.prove(1.0, 1e30, 1.0, 1e30, terms=64, can_scale=True)
    assert bound.exponent == 0 and bound.proven
