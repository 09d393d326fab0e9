"""Low-rank changes beside a product: the right sum at every magnitude, in every dtype, without overflow."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic import low_rank
from halfsafe.precision.arithmetic.low_rank import (
    LARGEST_SUM,
    add_outer_product,
    fitting_factor,
    hadamard_factors,
    inner_product,
    joined,
    kronecker_factors,
    normalized,
    row_sizes,
    scaled_down,
)
from hypothesis import given
from hypothesis import strategies as st
from support.cuda_rules import CudaRules
from support.fake_cuda import NO_KERNEL
from support.fake_tensors import fake_cuda_tensors
from support.leaf_operations import LeafOperations
from support.measures import relative_error
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


def factors(rank=4, outputs=48, inputs=96, size=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, inputs, generator=generator) * size, torch.randn(outputs, rank, generator=generator) * size


def added(x, base, made):
    """In the dtype of the factors; in fp16 with rows brought to a largest magnitude of 1."""
    if made.down.dtype != torch.float16:
        h = inner_product(x.to(made.down.dtype), made.down, made.scale)
        return add_outer_product(base.clone(), h, made.up)
    size, factor = row_sizes(x), fitting_factor(made.gain)
    h = inner_product(scaled_down(x, size), made.down, made.scale / factor)
    return add_outer_product(base.clone(), h, made.up, factor, size)


def added_to_operand(x, base, made, largest):
    """To the product of an fp16 operand that is no larger than ``largest``."""
    factor = fitting_factor(largest * made.gain)
    h = inner_product(x, made.down, made.scale / factor, wide=True)
    return add_outer_product(base.clone(), h, made.up, factor)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 100.0])
def test_the_sum_is_right(dtype, given, size):
    down, up = factors(size=size**0.5)
    x, base = torch.randn(3, 7, 96).to(given), torch.zeros(3, 7, 48, dtype=torch.float32)
    expected = x.double() @ down.double().T @ up.double().T
    result = added(x, base, normalized(down, up, dtype))
    assert result.dtype == base.dtype and relative_error(expected, result) < ROUNDING[dtype]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_fp16_operands_hold_every_fp32_input(scale):
    down, up = factors()
    x = torch.randn(5, 96) * scale
    result = added(x, torch.zeros(5, 48), normalized(down, up, torch.float16))
    assert relative_error(x.double() @ down.double().T @ up.double().T, result) < 2e-3


def test_no_partial_sum_of_fp16_operands_can_overflow():
    down, up = factors(rank=64, inputs=4096, size=1e3)
    made = normalized(down, up, torch.float16)
    worst = torch.full((1, 4096), 65504.0)
    assert (made.down.float().abs().sum(1) <= 1.001 * LARGEST_SUM).all() and (made.up.float().abs() <= 2).all()
    for signs in (torch.ones(4096), made.down[0].sign(), made.down[63].sign()):
        met = []
        with mock.patch.object(low_rank, "_product", lambda a, b, wide=False, met=met: met.append((a, b)) or F.linear(a.float(), b.float())):
            added((worst * signs).half(), torch.zeros(1, 48), made)
        assert [a.dtype for a, _ in met] == [torch.float16] * 2 and met[0][0].abs().max() <= 1
        assert all((a.float().abs() @ b.float().abs().T).max() <= 65504 / 2 for a, b in met)
    base = torch.full((1, 48), -60000.0, dtype=torch.float16)
    x = worst.half()
    change = worst @ (up.double() @ down.double()).float().T
    assert torch.isinf(added(x, base, made)[change > 2e5]).all(), "only what does not fit fp16 is lost"


def test_the_result_is_rounded_once_in_the_dtype_of_the_layers_own():
    """A change that takes back what would pass fp16's range is no infinity on the way."""
    made = normalized(torch.ones(1, 16), torch.full((8, 1), -1.0), torch.float16)
    x = torch.full((2, 16), 4000.0, dtype=torch.float16)
    base = torch.full((2, 8), 65504.0, dtype=torch.float16)
    result = added(x, base, made)
    assert result.dtype == torch.float16 and torch.allclose(result.float(), torch.tensor(65504.0 - 64000), atol=32)


@pytest.mark.parametrize("given", [torch.float16, torch.float32])
@pytest.mark.parametrize("inputs", [1024, 14336])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_matrix_units_that_flush_subnormal_numbers_lose_nothing(monkeypatch, given, inputs, size):
    """As those of MI200 do, in fp16 operands and results."""
    monkeypatch.setattr(low_rank, "_product", lambda a, b, wide=False: flushed(F.linear(flushed(a).float(), flushed(b).float())))
    down, up = factors(rank=4, inputs=inputs, size=size)
    x = torch.randn(5, inputs).to(given)
    result = added(x, torch.zeros(5, 48), normalized(down, up, torch.float16))
    assert relative_error(x.double() @ down.double().T @ up.double().T, result) < 2e-3


def flushed(tensor):
    half = tensor.half()
    return torch.where(half.abs() < torch.finfo(torch.float16).tiny, 0, half)


class _Launches(LeafOperations):
    """Names of the operations that launch a kernel."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def leaf(self, func, args, kwargs):
        if not func.is_view and func not in NO_KERNEL and func.namespace == "aten":
            self.seen.append(func.name())
        return func(*args, **kwargs)


def test_bf16_takes_three_kernels():
    """Two products, of which one adds, and one kernel for the scale; nothing as large as the result is made."""
    made, x, base = normalized(*factors(), torch.bfloat16), torch.randn(3, 7, 96).bfloat16(), torch.zeros(3, 7, 48, dtype=torch.bfloat16)
    with torch.inference_mode(), _Launches() as launches:
        assert add_outer_product(base, inner_product(x, made.down, made.scale), made.up) is base
    assert launches.seen == ["aten::mm", "aten::mul.out", "aten::addmm_"] and base.any()


@pytest.mark.parametrize(("result", "adds"), [(torch.float16, "aten::addmm_"), (torch.float32, "aten::addmm.dtype_out")])
def test_an_operand_that_is_bounded_takes_three_kernels_on_cuda(result, adds):
    made = normalized(*factors(), torch.float16)
    with fake_cuda_tensors() as fake, CudaRules():
        x, base = torch.empty(3, 7, 96, dtype=torch.float16, device="cuda"), torch.empty(3, 7, 48, dtype=result, device="cuda")
        down, up, scale = (torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for tensor in (made.down, made.up, made.scale))
        with _Launches() as launches, fake:
            assert add_outer_product(base, inner_product(x, down, scale, wide=True), up, 2.0) is base
    assert launches.seen == ["aten::mm.dtype", "aten::mul.out", adds]


@pytest.mark.parametrize("magnitude", [2.0**-12, 1e-2, 1.0, 300.0, 65504.0])
@pytest.mark.parametrize("result", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_the_change_of_a_bounded_operand_is_right(magnitude, result, size):
    """As exact as with rows brought to 1, though the operand may be 64 times as large as it is here."""
    made = normalized(*factors(rank=16, inputs=4096, size=size), torch.float16)
    x = torch.randn(64, 4096)
    x = (x / x.abs().amax() * magnitude).half()
    exact = x.double() @ (made.up.double() @ (made.scale.double()[:, None] * made.down.double())).T
    if result == torch.float16 and exact.abs().amax() > 3e4:
        return
    base = torch.zeros(64, 48, dtype=result)
    mine, other = (relative_error(exact, changed) for changed in (added_to_operand(x, base, made, 64 * magnitude), added(x, base, made)))
    assert mine <= max(1.1 * other, relative_error(exact, exact.to(result)) + 5e-4)


@given(seed=st.integers(0, 2**32), rank=st.integers(1, 8), outlier=st.floats(1.0, 1e4), largest=st.floats(2.0**-12, 65504.0))
def test_no_operand_within_its_bound_overflows(seed, rank, outlier, largest):
    """The worst operand of each rank is the signs of its row; nothing that is rounded to fp16 passes half of its range."""
    down, up = factors(rank, 12, 32, seed=seed)
    down[0], up[:, -1] = down[0] * outlier, up[:, -1] / outlier
    made = normalized(down, up, torch.float16)
    factor = fitting_factor(largest * made.gain)
    x = made.down.sign() * torch.tensor(largest).half()
    h = inner_product(x, made.down, made.scale / factor, wide=True)
    assert h.abs().max() <= 65504 / 2
    change = add_outer_product(torch.zeros(len(x), 12), h, made.up, factor)
    assert change.abs().max() <= largest * made.gain and torch.isfinite(change).all()


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_the_scale_is_applied_in_fp32_and_rounded_once(monkeypatch, device):
    """The same bits where results are rounded by the kernel that multiplies, and where not."""
    monkeypatch.setattr(low_rank, "converts_results", lambda _: device == "cuda")
    made, x = normalized(*factors(rank=16), torch.bfloat16), torch.randn(64, 96).bfloat16()
    scale = torch.rand(16) + 0.5
    h = inner_product(x, made.down, scale)
    assert h.dtype == torch.bfloat16 and torch.equal(h, (F.linear(x, made.down).float() * scale).bfloat16())


class _Results(TorchDispatchMode):
    """(size, dtype) of every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen.add((result.numel(), result.dtype))
        return result


def test_an_fp16_input_is_copied_in_fp16_alone(monkeypatch):
    monkeypatch.setattr(low_rank, "_product", lambda a, b, wide=False: a[..., :4] * b[:, 0])
    x, made = torch.randn(3, 7, 96).half(), normalized(*factors(), torch.float16)
    with _Results() as results:
        inner_product(scaled_down(x, row_sizes(x)), made.down, made.scale)
    assert {dtype for size, dtype in results.seen if size == x.numel()} == {torch.float16}


@pytest.mark.parametrize("exponent", range(-24, 17, 4))
def test_an_fp16_input_is_divided_as_in_fp32(exponent):
    """The same bits: zeros, subnormal numbers and the largest number included."""
    x = (torch.randn(64, 96) * 2.0**exponent * torch.exp2(-40 * torch.rand(64, 96))).clamp(-65504, 65504).half()
    x[0], x[1], x[2, 0] = 0.0, 2.0**-24, 65504.0
    size = row_sizes(x)
    assert size.dtype == torch.float32 and torch.equal(size, x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-24))
    assert torch.equal(scaled_down(x, size), (x.float() / size).half())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_one_bad_row_spoils_no_other(bad, dtype):
    down, up = factors()
    x = torch.randn(4, 96)
    x[2, 5] = bad
    finite = torch.isfinite(added(x, torch.zeros(4, 48), normalized(down, up, dtype))).all(1)
    assert finite.tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_factor_that_is_not_finite_shows(dtype):
    down, up = factors()
    up[3, 1] = float("nan")
    result = added(torch.randn(4, 96), torch.zeros(4, 48), normalized(down, up, dtype))
    assert torch.isnan(result[:, 3]).all() and torch.isfinite(result[:, 4]).all()


def test_zeros_change_nothing():
    made = normalized(torch.zeros(2, 96), torch.zeros(48, 2), torch.float16)
    base = torch.randn(3, 48)
    assert torch.equal(added(torch.randn(3, 96), base, made), base)
    assert torch.equal(added(torch.zeros(3, 96), base, normalized(*factors(), torch.float16)), base)


def test_changes_are_joined():
    parts = [factors(rank, seed=rank) for rank in (2, 5)]
    made = joined([normalized(*part, torch.float32) for part in parts])
    expected = sum(up @ down for down, up in parts)
    assert relative_error(expected, made.up @ (made.scale[:, None] * made.down)) < 1e-6


@pytest.mark.parametrize(("make", "whole"), [(hadamard_factors, torch.mul), (kronecker_factors, torch.kron)])
def test_products_of_factored_weights_are_factored(make, whole):
    (down1, up1), (down2, up2) = factors(2, 6, 8), factors(3, 6, 8, seed=1)
    down, up = make([down1, down2], [up1, up2])
    assert len(down) == 6 and relative_error(whole(up1 @ down1, up2 @ down2), up @ down) < 1e-6
