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
    bound.prove(x.norm(dim=1).max().item(), weight.norm(dim=1).max().item(), weight.shape[1])
    return bound


def given(norm: float, gain: float = 1.0) -> SumBound:
    """The bound of a layer for the largest norms of rows of its input and of its weight."""
    bound = SumBound("layer")
    bound.prove(norm, gain, 64)
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


@pytest.mark.parametrize("factor", [0.9, 1.001, 1e6, math.inf])
def test_the_proof_holds_up_to_the_margin_and_no_further(factor: float) -> None:
    bound = given(FITS * 0.5, 2 * factor)
    assert bound.proven is (factor < 1)
    if bound.proven:
        assert bound.limit == pytest.approx(FITS / (2 * factor))
        assert bound.holds(bound.limit) and not bound.holds(bound.limit * 1.001) and not bound.holds(math.nan)
    assert bound.holds(0.0) is bound.proven


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_an_input_that_is_not_finite_changes_no_proof(norm: float) -> None:
    bound = given(1.0)
    evidence = bound.evidence
    bound.prove(norm, 1.0, 8)
    assert bound.proven and (bound.evidence, bound.terms) == (evidence, 64)


def test_a_smaller_input_proves_nothing_until_the_larger_is_forgotten() -> None:
    bound = given(FITS * 2)
    bound.prove(1.0, 1.0, 64)
    assert not bound.proven
    bound.forget()
    assert not bound.holds(0.0)
    bound.prove(1.0, 1.0, 64)
    assert bound.proven and bound.holds(0.0)
