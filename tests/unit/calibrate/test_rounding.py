"""Codes chosen by a layer's inputs: against every possibility of tiny weights, and never worse than rounding to nearest."""

import itertools

import pytest
import torch
from halfsafe.precision.calibrate import rounding
from halfsafe.precision.calibrate.products import Products, block_width
from halfsafe.precision.calibrate.rounding import rounded
from halfsafe.precision.calibrate.weights import CODES
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measures import relative_error


def inputs(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Inputs as trained layers meet them: a few directions carry most, some columns are far larger."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return (mixed + torch.randn(tokens, 1, generator=generator) * 3) * torch.logspace(-1, 1, columns)


def to_half(values, at):
    """A grid of steps of a half."""
    return (values * 2).round() / 2


def weight_of(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(found, weight, x) -> torch.Tensor:
    return ((found - weight) @ x.T).square().sum()


def best_of_all(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The squared error of the best of all combinations of the nine steps around each number, row by row."""
    total = torch.zeros(())
    for row in weight:
        near = to_half(row, None)
        shifts = torch.tensor(list(itertools.product([step / 2 for step in range(-4, 5)], repeat=len(row))))
        total += ((near + shifts - row) @ x.T).square().sum(1).min()
    return total


@pytest.mark.parametrize("seed", range(6))
def test_it_comes_near_the_best_of_all_on_tiny_problems(seed):
    x, weight = inputs(64, 4, seed), weight_of(8, 4, seed)
    blocks = (x.T @ x)[None]
    found, before, after = rounded(weight, blocks, len(x), to_half)
    best = best_of_all(weight, x)
    torch.testing.assert_close(error(found, weight, x), after, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(error(to_half(weight, None), weight, x), before, rtol=1e-3, atol=1e-3)
    assert best * 0.999 <= after <= before
    assert after - best <= 0.35 * (before - best)


def test_gptq_is_the_textbook_s(monkeypatch):
    """One block, no sweeps: column by column with the inverse recomputed for those that are left (OBQ with a fixed order)."""
    x, weight = inputs(200, 48), weight_of(6, 48)
    products = x.T @ x
    damped = products.double() + rounding.damping(48, 200) * products.diagonal().double().mean() * torch.eye(48, dtype=torch.float64)
    left, moved, expected = products.diagonal().argsort(descending=True).tolist(), weight.double(), torch.empty(6, 48)
    while left:
        inverse = torch.linalg.inv(damped[left][:, left])
        column = left[0]
        expected[:, column] = to_half(moved[:, column], None).float()
        change = (moved[:, column] - expected[:, column]) / inverse[0, 0]
        moved[:, left] -= change[:, None] * inverse[0]
        left = left[1:]
    monkeypatch.setattr(rounding, "_errors", lambda difference, products: -difference.square().sum(1))
    found, *_ = rounded(weight, products[None], len(x), to_half, sweeps=0)
    assert (found == expected).float().mean() > 0.98


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(list(CODES)),
    st.integers(1, 12),
    st.sampled_from((32, 48, 64, 192, 320, 512)),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_it_is_never_worse_than_nearest(storage, rows, columns, tokens, seed):
    codes = CODES[storage]
    if codes.why_not(columns):
        return
    weight, x = weight_of(rows, columns, seed), inputs(tokens, columns, seed) * 1e3
    products = Products.empty(columns, 256)
    products.add(x)
    group = codes.group(columns)
    turned, blocks = codes.turned(weight), products.blocks if group is None else products.rotated(group)
    params = codes.prepare(turned)
    found, before, after = rounded(turned, blocks, products.tokens, lambda values, at: codes.nearest(values, params, at)[1])
    near = codes.nearest(turned, params)[1]
    assert torch.isfinite(found).all() and after <= before
    assert torch.equal(codes.nearest(found, params)[1], found)  # numbers that the format has
    for which, difference in ((before, near - turned), (after, found - turned)):
        parts = difference.unflatten(1, (len(blocks), -1)).transpose(0, 1)
        torch.testing.assert_close((parts @ blocks * parts).sum(), which, rtol=2e-2, atol=1e-2 * float(before))


@pytest.mark.parametrize(("storage", "share"), [("int8", 0.8), ("fp8_e4m3fn", 0.8), ("w6a8", 0.8), ("w4a8", 0.8)])
def test_other_inputs_of_the_same_kind_gain_too(storage, share):
    mix = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 0, 256)
    x, other = (torch.randn(2048, 256, generator=torch.Generator().manual_seed(seed)) @ mix.T for seed in (4, 5))
    weight, codes = weight_of(96, 256), CODES[storage]
    products = Products.empty(256, 256)
    products.add(x)
    turned = codes.turned(weight)
    params = codes.prepare(turned)
    blocks = products.rotated(256) if codes.group(256) else products.blocks
    found, *_ = rounded(turned, blocks, products.tokens, lambda values, at: codes.nearest(values, params, at)[1])
    exact = other @ weight.T
    near, chosen = (relative_error(exact, other @ codes.turned(numbers).T) for numbers in (codes.nearest(turned, params)[1], found))
    assert chosen <= share * near


@pytest.mark.parametrize("columns", [16, 48, 64, 132, 256, 384, 1536, 3072, 8960, 13824, 4099])
@pytest.mark.parametrize("width", [256, 512, 1024])
def test_blocks_are_equal_and_no_group_of_the_rotation_is_cut(columns, width):
    from halfsafe.precision.formats.int8 import rotation_group

    found = block_width(columns, width)
    assert columns % found == 0 and found <= max(width, 256) and found % (rotation_group(columns) or 1) == 0


def test_the_products_are_turned_as_inputs_are():
    from halfsafe.precision.formats.int8 import rotated

    x, plain, turned = inputs(100, 512), Products.empty(512, 256), Products.empty(512, 256)
    plain.add(x)
    turned.add(rotated(x, 256))
    torch.testing.assert_close(plain.rotated(256), turned.blocks, rtol=1e-4, atol=1e-4 * float(turned.blocks.abs().max()))


def test_sums_in_parts_equal_one_run():
    x, once, parts = inputs(300, 64), *(Products.empty(64, 256) for _ in range(2))
    once.add(x)
    parts.add(x[:100])
    parts.add(x[100:])
    assert parts.tokens == once.tokens == 300
    torch.testing.assert_close(parts.blocks, once.blocks, rtol=1e-3, atol=1e-6 * float(once.blocks.max()))


@pytest.mark.parametrize("tokens", [8, 32, 128])
@pytest.mark.parametrize("storage", ["int8", "w4a8"])
def test_few_tokens_do_not_spoil_other_inputs(storage, tokens):
    """Inputs that go in every direction, of which few are seen: what is not seen must not pay for what is."""
    columns = 256
    mix = torch.randn(columns, columns, generator=torch.Generator().manual_seed(3)) * torch.logspace(-0.5, 0, columns)
    x, other = (torch.randn(count, columns, generator=torch.Generator().manual_seed(count)) @ mix.T for count in (tokens, 2000))
    weight, codes = weight_of(32, columns), CODES[storage]
    products = Products.empty(columns, 1024)
    products.add(x)
    turned = codes.turned(weight)
    params = codes.prepare(turned)
    found, *_ = rounded(turned, products.rotated(256), tokens, lambda values, at: codes.nearest(values, params, at)[1])
    exact = other @ weight.T
    near, chosen = (relative_error(exact, other @ codes.turned(numbers).T) for numbers in (codes.nearest(turned, params)[1], found))
    assert chosen <= 1.01 * near


def test_inputs_that_are_not_finite_are_counted_and_left_out():
    x, found, clean = inputs(10, 32), Products.empty(32, 256), Products.empty(32, 256)
    spoiled = x.clone()
    spoiled[3, 5], spoiled[7, 0] = float("nan"), float("inf")
    found.add(spoiled.view(2, 5, 32))
    clean.add(x[[0, 1, 2, 4, 5, 6, 8, 9]])
    assert (found.tokens, found.left_out) == (8, 2)
    torch.testing.assert_close(found.blocks, clean.blocks)


def test_columns_that_were_never_reached_are_rounded_to_nearest():
    x, weight = inputs(50, 32), weight_of(4, 32)
    x[:, 16:] = 0
    found, *_ = rounded(weight, (x.T @ x)[None], len(x), to_half)
    assert torch.equal(found[:, 16:], to_half(weight, None)[:, 16:])
    nothing, before, after = rounded(weight, torch.zeros(1, 32, 32), 0, to_half)
    assert torch.equal(nothing, to_half(weight, None)) and before == after == 0
