"""When sums in fp16 are proven to fit: from norms of the input and of the weight, with a margin."""

from __future__ import annotations

import math

import pytest
import torch
from halfsafe.precision.arithmetic.fp16_accumulation import MARGIN, SumBound
from halfsafe.precision.base.dtypes import FP16_MAX

FITS = FP16_MAX / MARGIN


def proven(x: torch.Tensor, weight: torch.Tensor) -> SumBound:
    """The bound of a layer with this weight after an input."""
    bound = SumBound("layer")
    norms = weight.abs().sum(1).max().item(), weight.norm(dim=1).max().item()
    bound.prove(x.abs().max().item(), x.norm(dim=1).max().item(), *norms, terms=weight.shape[1])
    return bound


def given(amax: float, row_sum: float = 1.0) -> SumBound:
    """The bound of a layer whose input has this amax and an endless 2-norm, so that the amax decides."""
    bound = SumBound("layer")
    bound.prove(amax, 1e30, row_sum, 1e30, terms=64)
    return bound


@pytest.mark.parametrize("seed", range(20))
def test_no_partial_sum_of_a_proven_layer_leaves_fp16(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 64, generator=generator, dtype=torch.float64) * 10 ** (seed % 5)
    weight = torch.randn(16, 64, generator=generator, dtype=torch.float64)
    bound = proven(x, weight)
    sums = (x[:, None] * weight).cumsum(2).abs().max().item()
    assert not bound.proven or sums <= FITS, (sums, bound.evidence)
    assert bound.proven is (seed % 5 < 3)


@pytest.mark.parametrize(("x", "weight", "by"), [([[1.0, 1, 1, 1]], [[3.0, 0, 0, 0]], "amax"), ([[4.0, 0, 0, 0]], [[1.0, 1, 1, 1]], "norm")])
def test_the_smaller_of_the_two_bounds_decides(x: list, weight: list, by: str) -> None:
    bound = proven(torch.tensor(x), torch.tensor(weight))
    assert bound.by == by and bound.gain == (3.0 if by == "amax" else 2.0)
    assert f"bound {3 if by == 'amax' else 8} of 65504" in bound.evidence and "K 4" in bound.evidence


@pytest.mark.parametrize("factor", [0.9, 1.001, 1e6, math.inf])
def test_the_proof_holds_up_to_the_margin_and_no_further(factor: float) -> None:
    bound = given(FITS * 0.5, row_sum=2 * factor) if factor < math.inf else given(1.0, row_sum=math.inf)
    assert bound.proven is (factor < 1)
    if bound.proven:
        assert bound.limit == pytest.approx(FITS / (2 * factor))
        assert bound.holds(bound.limit) and not bound.holds(bound.limit * 1.001) and not bound.holds(math.nan)
    assert bound.holds(0.0) is bound.proven


@pytest.mark.parametrize(("largest", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)])
def test_an_input_that_is_not_finite_changes_no_proof(largest: float, norm: float) -> None:
    bound = given(1.0)
    evidence = bound.evidence
    bound.prove(largest, norm, 1.0, 1.0, terms=8)
    assert bound.proven and (bound.evidence, bound.terms) == (evidence, 64)


def test_a_smaller_input_proves_nothing_until_the_larger_is_forgotten() -> None:
    bound = given(FITS * 2)
    bound.prove(1.0, 1e30, 1.0, 1e30, terms=64)
    assert not bound.proven
    bound.forget()
    assert not bound.holds(0.0)
    bound.prove(1.0, 1e30, 1.0, 1e30, terms=64)
    assert bound.proven and bound.holds(0.0)
