"""Bounds that are known without a look: no input passes them, and some come close."""

import math

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.bounds.value_bounds import (
    PART,
    ROUNDING,
    ValueBound,
    after_conv,
    after_group_norm,
    after_linear,
    after_norm,
    of_elements,
    spectral_bound,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = ("normal", "one large", "two opposite", "constant but one", "tiny", "huge", "half and half")


def rows(shape: str, size: int, seed: int) -> torch.Tensor:
    """Rows of numbers that norms treat differently."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, size, generator=generator)
    place = seed % size
    if shape == "one large":
        x = x * 1e-3
        x[:, place] = 1e4
    if shape == "two opposite":
        x = torch.zeros(8, size)
        x[:, place], x[:, (place + 1) % size] = 1e5, -1e5
    if shape == "constant but one":
        x = torch.full((8, size), 3.0)
        x[:, place] = -5e4
    if shape == "half and half":
        x = x.sign()
    return x * {"tiny": 1e-6, "huge": 1e15}.get(shape, 1.0)


def parameters(size: int, seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(size, generator=generator) * scale, torch.randn(size, generator=generator) * scale


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 300), st.sampled_from(SHAPES), st.integers(0, 999), st.floats(0.01, 100), st.booleans(), st.booleans())
def test_no_input_of_a_norm_passes_the_bound(size, shape, seed, scale, centred, affine):
    x = rows(shape, size, seed)
    weight, bias = parameters(size, seed, scale) if affine else (None, None)
    bias = bias if centred else None
    bound = after_norm(size, centred, weight, bias)
    norm = F.layer_norm(x, (size,), weight, bias, 1e-6) if centred else F.rms_norm(x, (size,), weight, 1e-6)
    assert norm.abs().max() <= bound.largest
    assert norm.norm(dim=-1).max() <= bound.norm


@pytest.mark.parametrize("centred", [True, False])
def test_one_large_number_comes_close_to_the_bound_of_a_norm(centred):
    x = rows("two opposite", 256, 0) * torch.tensor([1.0, 0.0] + [0.0] * 254)
    found = F.layer_norm(x, (256,)) if centred else F.rms_norm(x, (256,))
    bound = after_norm(256, centred, None, None)
    assert found.abs().max() >= bound.largest / (1.01 * ROUNDING)
    assert found.norm(dim=-1).max() >= bound.norm / (1.01 * ROUNDING)


GROUPED = ((2, 8, 5), (1, 4, 3, 3), (4, 4, 6), (3, 9, 2, 2, 2), (1, 1, 4))
"""Groups, then a sample's shape."""


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(GROUPED), st.sampled_from(SHAPES), st.integers(0, 999), st.floats(0.01, 100), st.booleans())
def test_no_input_of_a_group_norm_passes_the_bound(grouped, shape, seed, scale, affine):
    groups, *sample = grouped
    x = rows(shape, math.prod(sample), seed).view(-1, *sample)
    weight, bias = parameters(sample[0], seed, scale) if affine else (None, None)
    bound = after_group_norm(groups, torch.Size(sample), weight, bias)
    found = F.group_norm(x, groups, weight, bias, 1e-6)
    assert found.abs().max() <= bound.largest
    assert found.flatten(1).norm(dim=1).max() <= bound.sample
    assert found.norm(dim=-1).max() <= bound.norm


def test_two_numbers_come_close_to_the_bound_of_a_group_norm():
    x = rows("two opposite", 256, 0).view(8, 4, 64) * torch.tensor([1.0] + [0.0] * 63)
    x = x.index_select(1, torch.zeros(4, dtype=torch.long))
    found = F.group_norm(x, 4)
    bound = after_group_norm(4, x.shape[1:], None, None)
    assert found.abs().max() >= bound.largest / (1.02 * ROUNDING)
    assert found.flatten(1).norm(dim=1).max() >= bound.sample / (1.02 * ROUNDING)


CONVOLUTIONS = {
    "plain": {"padding": 1},
    "strided": {"stride": 2},
    "grouped": {"groups": 2, "padding": 2},
    "dilated": {"dilation": 2, "padding": 2},
    "reflected": {"padding": 1, "padding_mode": "reflect"},
    "around": {"padding": 2, "padding_mode": "circular"},
}


def worst_samples(convolve, size: tuple, bound: ValueBound) -> torch.Tensor:
    """The samples within a bound that come closest to the bound of the result: along each number of the result."""
    x = torch.zeros(1, *size, requires_grad=True)
    result = convolve(x).flatten()
    found = [torch.autograd.grad(number, x, retain_graph=True)[0] for number in result[:: max(1, len(result) // 10)]]
    signs, along = torch.cat(found).sign() * bound.largest, torch.cat(found) * 1e6
    found = torch.cat([signs, along])
    found = found * (bound.largest / found.flatten(1).abs().amax(1).clamp(min=1e-9)).clamp(max=1)[:, None, None, None]
    return found * (bound.sample / found.flatten(1).norm(dim=1).clamp(min=1e-9)).clamp(max=1)[:, None, None, None]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("how", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 999), largest=st.floats(0.1, 50), share=st.floats(0.05, 1), has_bias=st.booleans())
def test_no_sample_within_its_bound_takes_a_convolution_past_its_own(how, transposed, seed, largest, share, has_bias):
    if transposed and "padding_mode" in how:
        return
    torch.manual_seed(seed)
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    module = kind(4, 6, 3, bias=has_bias, **how)
    x = ValueBound(largest, sample=largest * math.sqrt(4 * 25) * share)
    weight = module.weight.detach().transpose(0, 1) if transposed else module.weight.detach()
    bound = after_conv(weight, module.bias, x, zeros_around=module.padding_mode == "zeros")
    assert module(worst_samples(module, (4, 5, 5), x)).abs().max() <= bound.largest


def test_the_worst_sample_comes_close_to_the_bound_of_a_convolution():
    torch.manual_seed(0)
    module, x = torch.nn.Conv2d(4, 6, 3, bias=False), ValueBound(1e9, sample=10.0)
    bound = after_conv(module.weight.detach(), None, x, zeros_around=True)
    assert module(worst_samples(module, (4, 3, 3), x)).abs().max() >= bound.largest / (1.01 * ROUNDING)


def test_what_is_repeated_around_a_sample_is_not_bounded_by_its_norm():
    module = torch.nn.Conv2d(1, 1, 3, bias=False, padding=1, padding_mode="replicate")
    torch.nn.init.ones_(module.weight)
    sample = torch.zeros(1, 1, 4, 4)
    sample[..., 0, 0] = 1.0
    x = ValueBound(1.0, sample=1.0)
    assert module(sample).max() > after_conv(module.weight.detach(), None, x, zeros_around=True).largest
    assert module(sample).max() <= after_conv(module.weight.detach(), None, x, zeros_around=False).largest


def worst_inputs(weight: torch.Tensor, x: ValueBound) -> torch.Tensor:
    """The inputs within a bound that come closest to the bound of the result: along a row, its signs, and along the
    largest singular vector of each part."""
    along = x.norm * weight / weight.norm(dim=1, keepdim=True)
    vectors = torch.linalg.svd(weight.unflatten(0, (-1, PART)))[2][:, 0] * x.norm
    signs = x.largest * weight.sign()
    found = torch.cat([along, vectors, signs])
    found = found * (x.largest / found.abs().amax(1, keepdim=True)).clamp(max=1)
    return found * (x.norm / found.norm(dim=1, keepdim=True)).clamp(max=1)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 200), st.integers(0, 999), st.floats(0.1, 50), st.floats(0.3, 1), st.booleans())
def test_no_operand_within_its_bound_takes_a_linear_past_its_own(parts, inputs, seed, largest, share, has_bias):
    torch.manual_seed(seed)
    weight = torch.randn(parts * PART, inputs)
    bias = torch.randn(parts * PART) if has_bias else None
    x = ValueBound(largest, largest * math.sqrt(inputs) * share)
    bound = after_linear(weight, bias, x)
    result = F.linear(worst_inputs(weight, x), weight, bias)
    assert result.abs().max() <= bound.largest
    assert result.norm(dim=-1).max() <= bound.norm
    assert result.unflatten(-1, (-1, PART)).norm(dim=-1).max() <= bound.part
    assert F.linear(worst_inputs(weight, x).half(), weight.half(), None).float().abs().max() <= bound.largest


def test_the_worst_operand_comes_close_to_the_bound_of_a_linear():
    torch.manual_seed(0)
    weight, x = torch.randn(128, 256), ValueBound(1e9, 10.0)
    result = F.linear(worst_inputs(weight, x), weight)
    bound = after_linear(weight, None, x)
    assert result.abs().max() >= bound.largest / (1.01 * ROUNDING)
    assert result.unflatten(-1, (-1, PART)).norm(dim=-1).max() >= bound.part / (1.3 * ROUNDING)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 999), st.integers(1, 200), st.floats(-15, 15), st.integers(1, 64))
def test_no_singular_value_passes_its_bound(seed, columns, exponent, rank):
    torch.manual_seed(seed)
    matrix = torch.randn(PART, rank) @ torch.randn(rank, columns) * 2.0**exponent
    largest = torch.linalg.svdvals(matrix.double())[0].item()
    assert largest * 0.999 <= spectral_bound(matrix).item() <= 1.31 * largest


def test_a_linear_that_multiplies_by_zeros_only_adds_its_bias():
    assert after_linear(torch.zeros(64, 8), torch.full((64,), 3.0), ValueBound(2.0, 5.0)).largest == pytest.approx(3.03)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_parameters_that_are_no_numbers_bound_nothing(wrong):
    bias = torch.full((64,), wrong)
    assert after_linear(torch.ones(64, 8), bias, ValueBound(2.0, 5.0)).largest == math.inf
    assert after_norm(64, True, bias, None).largest == math.inf


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([32, 64, 96, 128]), st.integers(0, 999))
def test_a_head_keeps_what_is_known_of_its_row(size, seed):
    torch.manual_seed(seed)
    x = torch.randn(5, 384) * torch.logspace(-2, 2, 384)
    bound = ValueBound(x.abs().max().item(), x.norm(dim=1).max().item(), x.unflatten(1, (-1, PART)).norm(dim=-1).max().item())
    assert x.unflatten(1, (-1, size)).norm(dim=-1).max().item() <= bound.of_head(size) * 1.0001


def test_rows_of_small_numbers_have_small_norms():
    bound = of_elements(2.0, 9)
    assert bound.largest == 2.0 and bound.norm == 6.0
