"""Rotated q and k are known to fit, for matrices that are measured once a call."""

import contextlib
import math
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.bounds import followed
from halfsafe.precision.arithmetic.bounds.known_norm import KnownNorm
from halfsafe.precision.arithmetic.bounds.known_values import SAMPLED, KnownValues
from halfsafe.precision.arithmetic.bounds.rotation import Rotation
from halfsafe.precision.arithmetic.bounds.value_bounds import ValueBound
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from hypothesis import given, settings
from hypothesis import strategies as st
from support.leaf_operations import Reductions

WIDTH, HEADS, TOKENS = 128, 2, 16
SIZE = WIDTH // HEADS


def turned(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours of (..., size) by matrices (..., size / 2, 2, 2)."""
    if torch.overrides.has_torch_function((x, matrices)):
        return torch.overrides.handle_torch_function(turned, (x, matrices), x, matrices)
    pairs = x.float().unflatten(-1, (-1, 2))
    return (matrices * pairs.unsqueeze(-2)).sum(-1).flatten(-2).contiguous().to(x.dtype)


def both_turned(q: torch.Tensor, k: torch.Tensor, matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.overrides.has_torch_function((q, k, matrices)):
        return torch.overrides.handle_torch_function(both_turned, (q, k, matrices), q, k, matrices)
    return turned(q, matrices), turned(k, matrices)


def rotations(tokens: int = TOKENS, scale: float = 1.0) -> torch.Tensor:
    angles = torch.arange(tokens)[:, None] * 0.3 ** torch.arange(SIZE // 2)
    rows = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
    return scale * rows.unflatten(-1, (2, 2))[None, :, None]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.floats(0.1, 30), st.booleans())
def test_no_row_within_its_bound_passes_that_of_its_rotation(seed, scale, rotates):
    torch.manual_seed(seed)
    matrices = rotations(7, scale) if rotates else torch.randn(1, 7, 1, SIZE // 2, 2, 2) * scale
    x = torch.randn(1, 7, 3, SIZE) * torch.logspace(-2, 2, SIZE)[torch.randperm(SIZE)]
    rotation = Rotation("rotation")
    rotation.measure(matrices)
    bound = rotation.of(ValueBound(x.abs().max().item(), x.norm(dim=-1).max().item()))
    found = turned(x, matrices)
    assert found.abs().max() <= bound.largest and found.norm(dim=-1).max() <= bound.norm


def test_a_pair_comes_close_to_the_bounds_of_its_rotation():
    x, half = torch.ones(1, 1, 1, SIZE), math.sqrt(0.5)
    for rows in ([[half, half], [-half, half]], [[half, half], [half, half]]):
        matrices = torch.tensor(rows).expand(1, 1, 1, SIZE // 2, 2, 2)
        rotation = Rotation("rotation")
        rotation.measure(matrices)
        bound, found = rotation.of(ValueBound(1.0, 8.0)), turned(x, matrices)
        assert bound.largest / 1.03 <= found.max() <= bound.largest
        assert found.norm() <= bound.norm
    assert found.norm() >= bound.norm / 1.03


def weights(module, x, dtype, bias_dtype=None):
    bias = getattr(module, "bias", None)
    return contextlib.nullcontext((module.weight.to(dtype), None if bias is None else bias.to(bias_dtype or torch.float32)))


def sdpa(q, k, v, heads, **_):
    dtype = q.dtype
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q.float(), k.float(), v.float()))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).to(dtype)


class Blocks:
    """Three blocks whose q and k are normalized, all of a row or by head, and rotated by the same matrices."""

    def __init__(self, by_head: bool = False, together: bool = False):
        torch.manual_seed(0)
        self.by_head, self.together = by_head, together
        self.calibration = Calibration()
        self.calibration.results.allowed = True
        self.norm = self.normalized(torch.nn.LayerNorm(WIDTH))
        self.norms = [[self.normalized(torch.nn.RMSNorm(SIZE if by_head else WIDTH)) for _ in "qk"] for _ in range(3)]
        self.layers = [{name: self.layer(f"blocks.{n}.{name}") for name in "qkvo"} for n in range(3)]
        self.last = self.layer("last")
        self.attention = SafeAttention(self.calibration)
        self.x, self.matrices = torch.randn(1, TOKENS, WIDTH), rotations()
        self.after = lambda matrices: matrices

    def normalized(self, module):
        module.requires_grad_(False).weight.data.uniform_(0.5, 1.5)
        known = KnownNorm(module, module.forward, self.calibration, weights)
        known.inner = lambda x: known._normalized(x, *(None if p is None else p.to(x.dtype) for p in (module.weight, getattr(module, "bias", None))))
        return known

    def layer(self, name):
        module = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        return SafeOperation(module, self.calibration.scale(name), self.calibration, weights, largest_fp16=128.0)

    def once(self):
        self.attention.begin()
        x, matrices = self.x, self.matrices.clone()
        for norms, layers in zip(self.norms, self.layers, strict=True):
            n = self.norm(x)
            q, k = (self.head(norm, layers[name](n)) for norm, name in zip(norms, "qk", strict=True))
            q, k = both_turned(q, k, matrices) if self.together else (turned(q, matrices), turned(k, matrices))
            matrices = self.after(matrices)
            x = x + layers["o"](self.attention(Kernels(sdpa, sdpa), *(t.view(1, TOKENS, -1) for t in (q, k)), layers["v"](n), HEADS))
        return self.last(x * torch.ones(()))

    def head(self, norm, x):
        return norm(x.view(1, -1, HEADS, SIZE)) if self.by_head else norm(x).view(1, -1, HEADS, SIZE)

    def call(self):
        with torch.inference_mode(), Reductions() as seen:
            result = self.calibration.run(self.once)
        self.seen = seen.count
        return result.float()


@pytest.fixture(autouse=True)
def rotating(monkeypatch):
    monkeypatch.setattr(followed, "ROTATES", {turned, both_turned})


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_rotated_q_and_k_are_not_measured(by_head, together):
    blocks = Blocks(by_head, together)
    blocks.call()
    blocks.call()
    assert blocks.seen == 1 + 2 and blocks.calibration.repeats == 0  # the last operand; the matrices, once


def test_what_is_known_changes_no_result(monkeypatch):
    blocks = Blocks()
    blocks.call()
    known = blocks.call()
    monkeypatch.setattr(followed, "ROTATES", set())
    assert torch.equal(known, blocks.call()) and blocks.seen == 1 + 2 * 3


def test_one_call_of_some_measures_all():
    blocks, counts = Blocks(), []
    blocks.call()
    for _ in range(SAMPLED + 1):
        blocks.call()
        counts.append(blocks.seen)
    assert [place for place, count in enumerate(counts, 1) if count > min(counts)] == [SAMPLED]
    assert blocks.calibration.repeats == 0


@pytest.mark.parametrize("factor", [3.0, 1e4])
def test_matrices_that_do_more_than_rotate_are_calibrated_for(factor):
    blocks = Blocks()
    blocks.call()
    blocks.matrices = blocks.matrices * factor
    first = blocks.call()
    assert blocks.calibration.repeats == 1 and torch.isfinite(first).all()
    assert torch.equal(first, blocks.call()) and blocks.calibration.repeats == 1


def test_more_matrices_than_were_met_are_not_known():
    blocks = Blocks()
    blocks.call()
    blocks.after = lambda matrices: matrices * 1e4  # of the second block on
    result = blocks.call()
    assert torch.isfinite(result).all() and blocks.calibration.repeats == 1
    assert len(blocks.calibration.values.rotations) == 3


def test_matrices_that_a_block_makes_for_itself_are_freed_with_it():
    values, blocks, kept = KnownValues(), Blocks(), []
    values.begin(calibrating=True)
    for _ in range(3):
        matrices = rotations()
        kept.append(weakref.ref(matrices))
        assert values.rotation(matrices) is values.rotation(matrices)
    assert len(values.rotations) == 3 and [ref() is None for ref in kept] == [True, True, False]
    blocks.after = lambda matrices: matrices.clone()
    for _ in range(3):
        blocks.call()
    assert blocks.calibration.repeats == 0 and len(blocks.calibration.values.rotations) == 3
    pickle.loads(pickle.dumps(blocks.calibration.values))


def test_parts_put_together_along_their_tokens_keep_what_is_known_of_their_rows():
    values = KnownValues()
    values.begin(calibrating=True)
    with torch.no_grad():
        parts = [torch.zeros(1, n, 8) for n in (2, 3)]
        for part, bound in zip(parts, (ValueBound(2.0, 3.0, 2.5, 4.0), ValueBound(1.0, 5.0, 2.0, 3.0)), strict=True):
            values.note(part, bound)
            followed.follow(part, values)
        assert values.of(torch.cat(parts, dim=1)) == ValueBound(2.0, 5.0, 2.5)
        assert values.of(torch.cat(parts, 1)) == values.of(torch.cat(parts, dim=-2))
        assert values.of(torch.cat([parts[0], parts[0]], dim=-1)) == ValueBound(2.0) == values.of(torch.cat([parts[0]] * 2, 2))
        assert values.of(torch.cat([parts[0]] * 2, dim=np.int64(2))) == ValueBound(2.0)
        assert values.of(torch.cat([parts[0], parts[0]])) == ValueBound(2.0, 3.0, 2.5)
    values.end()


def test_a_copy_in_order_keeps_its_bound_and_a_tensor_in_order_is_itself():
    values = KnownValues()
    values.begin(calibrating=True)
    with torch.no_grad():
        x = torch.zeros(2, 3, 4)
        tag = values.note(x, ValueBound(2.0, 3.0))
        followed.follow(x, values)
        assert x.contiguous() is x and values.tag_of(x)[0] is tag
        assert values.of(x.movedim(1, 2).contiguous()) == ValueBound(2.0)
    values.end()
