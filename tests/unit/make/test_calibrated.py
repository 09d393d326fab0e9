"""Codes chosen by a layer's inputs: against every possibility of tiny weights, and never worse than rounding to nearest."""

import itertools

import pytest
import torch
from halfsafe.precision.formats.int8 import rotated, rotation_group
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.make.calibrated import rounded
from halfsafe.precision.make.calibration import Products
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measures import relative_error

WRITTEN = [name for name, row in FORMAT_OF_STORAGE.items() if row.can_write and row.calibrates]
"""With the comfy-kitchen at hand; ``formats/test_w4a8.py`` runs this file with a newer one."""


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


def chosen_for(storage, weight, products):
    """The turned weight, its nearest numbers and those chosen by the products, and the squared errors of both."""
    row = FORMAT_OF_STORAGE[storage]
    shared = row.scale_for(weight.abs().max().item()) if row.by_largest else row.shared([weight])
    params, turned = {**row.encode(weight, shared), **shared}, row.turned(weight)
    blocks = products.turned(row)
    found, before, after = rounded(turned, blocks, products.tokens, lambda values, at: row.nearest(values, params, at))
    assert torch.equal(row.nearest(found, params), found), "numbers that the format has"
    return turned, row.nearest(turned, params), found, before, after, blocks


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


@pytest.mark.parametrize("seed", range(3))
def test_it_comes_near_the_best_of_all_on_tiny_problems(seed):
    x, weight = inputs(64, 4, seed), weight_of(8, 4, seed)
    blocks = (x.T @ x)[None]
    found, before, after = rounded(weight, blocks, len(x), to_half)
    best = best_of_all(weight, x)
    torch.testing.assert_close(error(found, weight, x), after, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(error(to_half(weight, None), weight, x), before, rtol=1e-3, atol=1e-3)
    assert best * 0.999 <= after <= before
    assert after - best <= 0.35 * (before - best)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(WRITTEN),
    st.integers(1, 12),
    st.sampled_from((32, 48, 64, 192, 320, 512)),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_it_is_never_worse_than_nearest(storage, rows, columns, tokens, seed):
    if FORMAT_OF_STORAGE[storage].why_not(rows, columns):
        return
    weight, products = weight_of(rows, columns, seed), Products.empty(columns, 256)
    products.add(inputs(tokens, columns, seed) * 1e3)
    turned, near, found, before, after, blocks = chosen_for(storage, weight, products)
    assert torch.isfinite(found).all() and after <= before
    for which, difference in ((before, near - turned), (after, found - turned)):
        parts = difference.unflatten(1, (len(blocks), -1)).transpose(0, 1)
        torch.testing.assert_close((parts @ blocks * parts).sum(), which, rtol=2e-2, atol=1e-2 * float(before))


@pytest.mark.parametrize(
    ("tokens", "spread", "share"), [(2048, -2, 0.8), (8, -0.5, 1.01), (32, -0.5, 1.01), (128, -0.5, 1.01)]
)
@pytest.mark.parametrize("storage", WRITTEN)
def test_other_inputs_of_the_same_kind_gain_and_few_tokens_spoil_nothing(storage, tokens, spread, share):
    """With few tokens most directions were never met: what is not seen must not pay for what is."""
    if tokens < 256 and storage.startswith("fp8"):
        return  # fp8 does not rotate
    mix = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) * torch.logspace(spread, 0, 256)
    x, other = (
        torch.randn(count, 256, generator=torch.Generator().manual_seed(count)) @ mix.T for count in (tokens, 2000)
    )
    weight, row, products = weight_of(64, 256), FORMAT_OF_STORAGE[storage], Products.empty(256, 256)
    products.add(x)
    _, near, found, *_ = chosen_for(storage, weight, products)
    exact = other @ weight.T
    near, found = (relative_error(exact, other @ row.turned(numbers).T) for numbers in (near, found))
    assert found <= share * near


@pytest.mark.parametrize("columns", [16, 132, 384, 3072, 13824, 4099])
@pytest.mark.parametrize("width", [256, 1024])
def test_blocks_are_equal_and_no_group_of_the_rotation_is_cut(columns, width):
    found = Products.empty(columns, width).width
    assert columns % found == 0 and found <= max(width, 256) and found % (rotation_group(columns) or 1) == 0


def test_the_products_are_turned_as_inputs_are():
    x, plain, turned = inputs(100, 512), Products.empty(512, 256), Products.empty(512, 256)
    plain.add(x)
    turned.add(rotated(x, 256))
    found = plain.turned(FORMAT_OF_STORAGE["int8"])
    torch.testing.assert_close(found, turned.blocks, rtol=1e-4, atol=1e-4 * float(turned.blocks.abs().max()))


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
