"""Rows of an attention in fp32, and the SNR of a kernel against them."""

import math

import pytest
import torch
from halfsafe.precision.check.attention import HEADS, LEAST_DB, ROWS, beside_fp32, farthest
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = {
    "self": ((2, 4, 70, 8), (2, 4, 70, 8)),
    "one query": ((1, 2, 1, 8), (1, 2, 5, 8)),
    "cross": ((1, 3, 90, 8), (1, 3, 7, 8)),
    "shared keys": ((2, 6, 20, 8), (2, 2, 20, 8)),
    "many heads": ((4, 24, 5, 8), (4, 24, 5, 8)),
}


def inputs(name: str) -> list[torch.Tensor]:
    of_q, of_kv = SHAPES[name]
    return [torch.randn(shape) for shape in (of_q, of_kv, of_kv)]


def masks(q: torch.Tensor, k: torch.Tensor) -> dict[str, torch.Tensor | None]:
    seen = torch.rand(1, 1, q.shape[2], k.shape[2]) > 0.3
    seen[..., 0] = True
    added = torch.randn(q.shape[0], 1, 1, k.shape[2])
    return {"none": None, "of keys": seen, "added": added}


def compared(q, k, v, mask, *results) -> list[tuple[float, float]]:
    """The powers of each result beside these rows."""
    of = beside_fp32(q, k, v, mask, 0.4)
    return [tuple(of(result).tolist()) for result in results]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["none", "of keys", "added"])
def test_the_rows_are_those_of_the_attention(name, kind) -> None:
    q, k, v = inputs(name)
    mask = masks(q, k)[kind]
    whole = scaled_dot_product_attention(q, k, v, mask, scale=0.4, enable_gqa=k.shape[1] != q.shape[1])
    first, last, none = whole.clone(), whole.clone(), whole.clone()
    first[0, 0, 0], last[-1, -1, -1] = 0, 0
    ((error, signal), *others) = compared(q, k, v, mask, none, first, last)
    assert error < 1e-8 * signal
    assert all(changed > 1e-5 * signal for changed, _ in others), "from the first query to the last, of each head"


def test_at_most_so_many_rows_are_compared() -> None:
    q = torch.randn(2, 20, 200, 4)
    zeros = torch.zeros_like(q)
    ((error, _),) = compared(zeros, zeros, zeros, None, torch.ones_like(q))
    assert error == HEADS * ROWS * 4


class Largest(TorchDispatchMode):
    """The most numbers that an operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func not in (torch.ops.aten.expand.default, torch.ops.aten.select.int):
            self.most = max(self.most, result.numel() if result.untyped_storage().nbytes() else 0)
        return result


def test_memory_does_not_grow_with_heads_and_queries() -> None:
    tokens = 4096
    q, k, v = (torch.randn(2, 12, tokens, 16, dtype=torch.bfloat16) for _ in range(3))
    with Largest() as made:
        beside_fp32(q, k, v, torch.zeros(1, 1, 1, tokens), 0.25)
    assert ROWS * tokens == made.most, "the scores of one head"


def test_noise_and_a_good_kernel_are_told_apart() -> None:
    q, k, v = inputs("self")
    whole = scaled_dot_product_attention(q, k, v, scale=0.4)
    results = [whole + share * whole.std() * torch.randn_like(whole) for share in (0.03, 1.0)]
    good, noise = compared(q, k, v, None, *results)
    assert farthest([good], [5])[0] > 25 > LEAST_DB > 3 > farthest([noise], [5])[0]
    assert farthest([good, noise], [5, 7])[1] == 7, "the worst is told"
    assert farthest([(math.nan, 1.0), (1.0, 0.0), (math.inf, 1.0)], [1, 1, 1]) is None
    assert farthest([(0.0, 1.0)], [1]) == (math.inf, 1)
