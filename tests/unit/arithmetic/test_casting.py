"""Code of others that holds 16-bit tensors, on activations in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.casting import promoting

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).half()
MIXED = {
    "linear": lambda: F.linear(X, W),
    "matmul": lambda: X @ W,
    "method": lambda: X.matmul(W),
    "norm": lambda: F.layer_norm(X, (8,), W[0]),
    "convolution": lambda: F.conv1d(X, W[:4, :4].unsqueeze(-1)),
    "attention": lambda: F.scaled_dot_product_attention(X, X.half(), X.half()),
}


@pytest.mark.parametrize("name", MIXED)
def test_operations_that_refuse_two_dtypes_run_in_the_wider(name):
    with pytest.raises(RuntimeError):
        MIXED[name]()
    assert promoting(MIXED[name], results="computed")().dtype == torch.float32


def test_what_is_of_one_dtype_stays_so_and_targets_keep_theirs():
    def written(target):
        target.copy_(X)
        target[0] = X[0]
        target += X
        return target

    assert promoting(F.linear, results="computed")(X.half(), W).dtype == torch.float16
    target = promoting(written, results="computed")(torch.zeros(2, 4, 8, dtype=torch.float16))
    assert target.dtype == torch.float16 and torch.equal(target[1], (X[1].half().float() + X[1]).half())


def test_what_a_function_returns_is_in_fp32():
    run = promoting(lambda block: {**block, "img": W, "ids": torch.arange(2)})
    result = run({"img": X})
    assert result["img"].dtype == torch.float32 and result["ids"].dtype == torch.int64


def test_results_may_keep_their_dtype():
    run = promoting(lambda x: (x, F.linear(X, W)), results="computed")
    kept, mixed = run(W)
    assert kept.dtype == torch.float16 and mixed.dtype == torch.float32


def test_results_as_given_are_in_the_16_bit_dtype_of_the_first_tensor():
    wide = X.clone()
    run = promoting(lambda x, y: {"x": x, "y": y, "out": x + F.linear(X, W), "ids": torch.arange(2)}, results="given")
    found = {name: each.dtype for name, each in run(X.bfloat16(), wide).items()}
    assert found == {"x": torch.bfloat16, "y": torch.float32, "out": torch.bfloat16, "ids": torch.int64}
    assert run(X, W)["out"].dtype == torch.float32


def test_operators_of_other_libraries_and_private_functions_keep_their_operands(monkeypatch):
    """Their scales are fp32, and other operands are not."""
    met = []
    library = torch.library.Library("halfsafe_casting_test", "DEF")
    library.define("scaled(Tensor x, Tensor scale) -> Tensor")
    library.impl("scaled", lambda x, scale: met.append(x.dtype) or x.clone(), "CompositeExplicitAutograd")
    scale = torch.ones(8)

    def multiplied():
        torch.ops.halfsafe_casting_test.scaled(W, scale)
        torch.ops.halfsafe_casting_test.scaled.default(W, scale)
        assert torch.ops.aten.mul(W, scale).dtype == torch.float32

    promoting(multiplied, results="computed")()
    library._destroy()
    assert met == [torch.float16] * 2
