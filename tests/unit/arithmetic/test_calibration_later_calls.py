"""Overflow planted in a later call: seen, and the call repeated, wherever model code may hide it."""

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.hiding import HidingCode, own_arithmetic
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.base.dtypes import FP16_MAX
from support.measures import relative_error
from support.plain_weights import plain_weights

LARGE = 3e4
"""A numerator that makes a quotient by an overflowing result matter."""


def size(x):
    """The mean magnitude of each row and one: near no zero, so that a quotient by it is well conditioned."""
    return x.abs().mean(-1, keepdim=True) + 1


HIDDEN = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "relu6": F.relu6,
    "softmax": lambda x: x.softmax(-1),
    "exp": lambda x: torch.exp(-x.abs()),
    "clamp": lambda x: x.clamp(-50, 50),
    "clip": lambda x: x.clip(-50, 50),
    "clamp_": lambda x: x.clone().clamp_(-50, 50),
    "maximum": lambda x: torch.minimum(
        torch.maximum(x, torch.tensor(-50.0, dtype=x.dtype)), torch.tensor(50.0, dtype=x.dtype)
    ),
    "nan_to_num": torch.nan_to_num,
    "nan_to_num as ComfyUI's": lambda x: (
        torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x
    ),
    "nan_to_num_": lambda x: x.clone().nan_to_num_(0.0),
    "where finite": lambda x: torch.where(torch.isfinite(x), x, torch.zeros_like(x)),
    "where not NaN": lambda x: torch.where(x == x, x, torch.zeros_like(x)).clamp(-1e4, 1e4),
    "the best two": lambda x: x.topk(2, -1).values.sign() * x.mean(),
    "masked": lambda x: x.masked_fill(x.isnan() | x.isinf(), 0.0),
    "reciprocal": lambda x: torch.reciprocal(size(x)) * LARGE,
    "below a fraction bar": lambda x: torch.full_like(x, LARGE) / size(x),
    "a scalar divided": lambda x: LARGE / size(x),
    "div": lambda x: torch.div(torch.full_like(x, LARGE), size(x)),
    "div_": lambda x: torch.full_like(x, LARGE).div_(size(x)),
    "a negative power": lambda x: size(x) ** -1.0 * LARGE,
    "a power of keywords": lambda x: torch.pow(input=size(x), exponent=-1) * LARGE,
    "a power of a number": lambda x: 2.0 ** (-size(x) / LARGE),
    "addcdiv": lambda x: torch.addcdiv(torch.zeros_like(x), torch.full_like(x, LARGE), size(x)),
    "rsqrt": lambda x: torch.rsqrt(size(x)) * LARGE,
    "the second of two": lambda x: torch.minimum(torch.full_like(x, 50.0), x),
    "glu": lambda x: F.glu(torch.cat([torch.ones_like(x), x], -1)),
    "erf": torch.erf,
    "atan": torch.atan,
    "elu": lambda x: F.elu(-x.abs()),
    "selu": lambda x: F.selu(-x.abs()),
    "celu": lambda x: F.celu(-x.abs()),
    "softplus": lambda x: F.softplus(-x.abs()),
    "log_sigmoid": lambda x: F.logsigmoid(x.abs()),
    "expm1": lambda x: torch.expm1(-x.abs()),
    "exp2": lambda x: torch.exp2(-x.abs()),
    "fmin": lambda x: torch.fmin(x, torch.full_like(x, 50.0)),
}


class Gated(torch.nn.Module):
    """Two blocks: a layer, what may hide its overflow, and a layer that goes on with the result."""

    def __init__(self, hide, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Linear(width, width, bias=False) for name in ("gate", "value", "out")})
            for _ in range(2)
        )
        self.hide = hide

    def forward(self, x, loud):
        for block in self.blocks:
            gate = self.hide(block["gate"](x * loud))
            x = x + block["out"](F.layer_norm(block["value"](x) * gate.mean(-1, keepdim=True), (64,)))
        return x


def planned(model):
    """The model with its layers in ``fp16_safe``, and its calibration."""
    calibration = Calibration()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = SafeOperation(module, calibration.scale(name), calibration, plain_weights).__call__
    return calibration


@pytest.mark.parametrize("how", HIDDEN)
def test_an_operand_that_overflows_later_is_seen_behind_what_hides_it(how):
    exact, model = Gated(HIDDEN[how]), Gated(HIDDEN[how])
    calibration, x = planned(model), torch.randn(4, 64)
    with torch.inference_mode():
        for loud in (1.0, 1.0, 1e5, 3e6, 1.0):
            result = calibration.run(lambda loud=loud: model(x, loud))
            assert relative_error(exact(x, loud), result) < 5e-3, loud
    assert calibration.repeats >= 1


@pytest.mark.parametrize("how", HIDDEN)
def test_one_element_that_overflows_later_is_seen_behind_what_hides_it(how):
    """It makes Inf of a row and no NaN, so that nothing behind a division tells of it."""
    exact, model = Gated(HIDDEN[how]), Gated(HIDDEN[how])
    calibration, x = planned(model), torch.randn(1, 64)
    loud = torch.ones(1, 64)
    with torch.inference_mode():
        calibration.run(lambda: model(x, loud))
        loud[0, 5] = 1e5 / x[0, 5].abs()
        result = calibration.run(lambda: model(x, loud))
        assert relative_error(exact(x, loud), result) < 5e-3


@pytest.mark.parametrize("how", [how for how in HIDDEN if "nan" in how or "finite" in how or "mask" in how])
def test_nan_is_seen_behind_what_replaces_it_blocks_later(how):
    """What replaces NaN stands at the end of the model, and no layer is behind it."""
    exact, model = (Gated(lambda x: x) for _ in range(2))
    calibration, x = planned(model), torch.randn(4, 64)
    with torch.inference_mode():
        for loud in (1.0, 1.0, 1e6):
            result = calibration.run(lambda loud=loud: HIDDEN[how](model(x, loud)))
            assert relative_error(HIDDEN[how](exact(x, loud)), result) < 5e-3
    assert calibration.repeats == 1


@pytest.mark.parametrize("row", range(3))
def test_one_row_of_a_batch_is_enough(row):
    model, exact = Gated(torch.tanh), Gated(torch.tanh)
    calibration, loud = planned(model), torch.ones(3, 1)
    x = torch.randn(3, 64)
    with torch.inference_mode():
        calibration.run(lambda: model(x, loud))
        loud[row] = 1e6
        assert relative_error(exact(x, loud), calibration.run(lambda: model(x, loud))) < 5e-3
    assert calibration.repeats == 1


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("place", [(0, 0, 0), (7, 8, 8), (3, 4, 0)])
def test_one_element_of_a_convolution_s_operand_is_enough(groups, place):
    torch.manual_seed(0)
    module = torch.nn.Conv2d(8, 8, 3, padding=1, groups=groups)
    calibration = Calibration()
    operation = SafeOperation(module, calibration.scale("blocks.0.conv"), calibration, plain_weights)
    x = torch.randn(2, 8, 9, 9)
    with torch.inference_mode():
        calibration.run(lambda: operation(x).tanh())
        x[(1, *place)] = 1e6
        assert relative_error(module(x), calibration.run(lambda: operation(x).clamp(-1e9, 1e9))) < 1e-3
    assert calibration.repeats == 1


def sdpa(q, k, v, heads, mask=None, **kwargs):
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_an_element_of_an_attention_that_overflows_later_changes_no_result(which, sign, fused):
    """A score of -Inf is hidden by softmax: every key has the same sign in the channel that overflows."""
    torch.manual_seed(0)
    given = {name: torch.randn(1, 6, 32).abs() for name in "qkv"}
    calibration = Calibration()
    attention = SafeAttention(calibration)

    def call():
        attention.begin()
        return attention(Kernels(sdpa, sdpa, fused=fused), *given.values(), 2)

    calibration.run(call)
    for size in (FP16_MAX * 1.01, 1e6):
        given[which][0, 2, 5] = sign * size
        assert relative_error(sdpa(*given.values(), 2), calibration.run(call)) < 2e-3


QUERIES = {
    "of a norm with a large weight": lambda x, loud: F.layer_norm(x, (32,)) * loud,
    "scaled in place": lambda x, loud: F.layer_norm(x, (32,)).mul_(loud),
    "of no norm": lambda x, loud: x * loud,
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_that_overflows_later_is_seen_whatever_the_order_of_attentions(name):
    """All keys have the sign in its channel that leaves zeros behind. A later call has another attention after it and not before."""
    x, loud = torch.randn(1, 6, 32), torch.ones(32)
    k, x[..., 5], calibration = torch.randn(1, 12, 32).abs(), -3.0, Calibration()
    attention, calibration.in_fp16 = SafeAttention(calibration), True  # as layers beside it make it

    def call(order):
        attention.begin()
        return [
            attention(Kernels(sdpa, sdpa), q, k, k, 2)
            for q in (F.layer_norm(x, (32,)), QUERIES[name](x, loud))[::order]
        ]

    with torch.inference_mode():
        calibration.run(lambda: call(1))
        loud[5] = 1e6
        result, _ = calibration.run(lambda: call(-1))
        assert relative_error(sdpa(QUERIES[name](x, loud), k, k, 2), result) < 2e-3


def overflows(q, k, v, heads, **kwargs):
    """As a kernel with sums of p * v in fp16 before they are divided."""
    return sdpa(q, k, v, heads) * (3e5 if q.dtype == torch.float16 and v.abs().amax() > 10 else 1.0)


@pytest.mark.parametrize("later", [False, True])
def test_a_foreign_kernel_that_overflows_runs_in_fp32_in_the_same_call(later):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 32) for _ in range(3))
    calibration = Calibration()
    attention = SafeAttention(calibration)

    def call(v):
        attention.begin()
        return attention(Kernels(overflows, sdpa, foreign=True), q, k, v, 2)

    if later:
        calibration.run(lambda: call(v))
    for _ in range(3):
        assert relative_error(sdpa(q, k, v * 20, 2), calibration.run(lambda: call(v * 20))) < 2e-3
    assert calibration.repeats == later


def test_a_calibration_inside_another_leaves_the_outer_one_watching() -> None:
    outer, inner = HidingCode(), HidingCode()
    with outer:
        with inner, own_arithmetic():
            assert (outer.paused, inner.paused) == (0, 1)
        with own_arithmetic():
            assert (outer.paused, inner.paused) == (1, 0)
    with own_arithmetic():
        assert (outer.paused, inner.paused) == (0, 0)
