"""A layer whose result is smaller than its operand measures the result, if nothing can have hidden an overflow between."""

import math

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.bounds.known_values import SAMPLED
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from support.leaf_operations import LeafOperations
from support.plain_weights import plain_weights

WIDTH, HIDDEN, TOKENS = 64, 512, 8
WAYS = {
    "gelu": lambda h, other: F.gelu(h, approximate="tanh"),
    "silu": lambda h, other: F.silu(h),
    "module": lambda h, other: torch.nn.GELU()(h),
    "gated": lambda h, other: h[..., : HIDDEN // 2] * F.gelu(h[..., HIDDEN // 2 :]),
    "chunks": lambda h, other: h.chunk(2, dim=-1)[0] * F.silu(h.chunk(2, dim=-1)[1]),
    "cat": lambda h, other: torch.cat((other, F.gelu(h)), dim=-1),
}


class Measured(LeafOperations):
    """List how many numbers each reduction of a call reads."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def leaf(self, func, args, kwargs):
        if func.name().startswith(("aten::linalg_vector_norm", "aten::amax")):
            self.sizes.append(args[0].numel())
        return func(*args, **kwargs)


class Mlp:
    """Two layers with something between, and a last one that is measured whatever it is."""

    def __init__(self, way, wide=False):
        torch.manual_seed(0)
        self.calibration, self.way, self.after = Calibration(), way, lambda y: y
        self.calibration.results.allowed = True
        width = way(torch.zeros(1, HIDDEN), torch.zeros(1, WIDTH)).shape[-1]
        sizes = {"other": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (width, WIDTH), "last": (WIDTH, WIDTH)}
        self.linears = {name: torch.nn.Linear(*size).requires_grad_(False) for name, size in sizes.items()}
        largest = {"other": 128.0, "up": 128.0, "down": None if wide else 65504.0, "last": None}
        self.layers = {
            name: SafeOperation(linear, self.calibration.scale(name), self.calibration, plain_weights, largest_fp16=largest[name])
            for name, linear in self.linears.items()
        }
        self.x = torch.randn(1, TOKENS, WIDTH)

    def once(self):
        other, hidden = self.layers["other"](self.x), self.layers["up"](self.x * 1.0)
        return self.layers["last"](self.x + self.after(self.layers["down"](self.way(hidden, other))))

    def call(self):
        with torch.inference_mode(), Measured() as self.seen:
            return self.calibration.run(self.once).float()

    def error(self, result) -> float:
        of = self.linears
        expected = of["last"](self.x + of["down"](self.way(of["up"](self.x), of["other"](self.x))))
        return ((result - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("wide", [False, True], ids=["fp16 result", "fp32 result"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_smaller_of_operand_and_result_is_measured(way, wide):
    mlp = Mlp(way, wide)
    mlp.call()
    assert mlp.error(mlp.call()) < 2e-3 and mlp.calibration.repeats == 0
    assert max(mlp.seen.sizes) == WIDTH * TOKENS


def test_one_call_of_some_measures_the_operand():
    mlp = Mlp(WAYS["gelu"])
    mlp.call()
    largest = []
    for _ in range(SAMPLED):
        mlp.call()
        largest.append(max(mlp.seen.sizes))
    assert largest == [WIDTH * TOKENS] * (SAMPLED - 1) + [HIDDEN * TOKENS]


@pytest.mark.parametrize("way", [WAYS["gelu"], WAYS["gated"], WAYS["cat"]], ids=["gelu", "gated", "cat"])
@pytest.mark.parametrize("growth", [30.0, 3e3, 3e4, 1e6, math.inf, math.nan])
def test_whatever_overflows_has_the_call_repeated(way, growth):
    mlp = Mlp(way)
    mlp.call()
    mlp.x = mlp.x * growth
    result = mlp.call()
    if math.isfinite(growth):
        assert torch.isfinite(result).all() and mlp.error(result) < 1e-2
        assert mlp.calibration.repeats == (growth > 1e3)
    else:
        assert mlp.calibration.repeats == 1


@pytest.mark.parametrize(
    "hide",
    [
        lambda h, other: torch.nan_to_num(h * (h * 1e4), posinf=6e4, neginf=-6e4),
        lambda h, other: (h * 300).clamp(-5e4, 5e4),
        lambda h, other: torch.where(h.abs() < 1, h, torch.zeros(())),
        lambda h, other: F.relu(h),
        lambda h, other: F.gelu(h).nan_to_num_(0.0),
        lambda h, other: F.gelu(h).mul_(2.0),
    ],
    ids=["nan_to_num", "clamp", "where", "relu", "in place", "in place, harmless"],
)
def test_behind_what_can_hide_an_overflow_the_operand_is_measured(hide):
    mlp = Mlp(hide)
    mlp.call()
    mlp.call()
    assert HIDDEN * TOKENS in mlp.seen.sizes and not mlp.layers["down"].scale.by_result


@pytest.mark.parametrize("wide", [False, True], ids=["fp16 result", "fp32 result"])
def test_a_product_that_overflows_shows_in_the_result_though_model_code_hides_it_later(wide):
    mlp = Mlp(WAYS["gated"], wide)
    mlp.after = lambda y: y.nan_to_num(0.0, 0.0, 0.0)
    mlp.call()
    mlp.x = mlp.x * 400
    assert mlp.layers["up"].scale.holds(mlp.x.abs().max().item()) and mlp.layers["down"].scale.by_result
    assert mlp.error(mlp.call()) < 1e-2 and mlp.calibration.repeats == 1


def test_what_hides_an_overflow_in_some_calls_is_measured_in_these():
    mlp = Mlp(WAYS["gelu"])
    mlp.call()
    mlp.call()
    assert HIDDEN * TOKENS not in mlp.seen.sizes
    mlp.way = lambda h, other: F.gelu(h).clamp(-1e4, 1e4)
    mlp.call()
    assert HIDDEN * TOKENS in mlp.seen.sizes and mlp.calibration.repeats == 0


@pytest.mark.parametrize("function", [F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu])
def test_no_number_grows_by_what_keeps_a_bound(function):
    x = torch.cat([torch.linspace(-40, 40, 20001), torch.tensor([6e4, -6e4, 1e-7, -1e-7, 0.0])])
    assert (function(x).abs() <= x.abs()).all() and (function(x.half()).abs() <= x.half().abs()).all()


def test_an_operand_far_smaller_than_measured_is_found_by_the_sample():
    mlp = Mlp(WAYS["gelu"])
    mlp.call()
    mlp.x = mlp.x * 1e-6
    mlp.linears["up"].bias.data.mul_(1e-6)
    for _ in range(SAMPLED + 1):
        mlp.call()
    assert mlp.calibration.repeats >= 1


def test_a_compiled_part_between_two_layers_is_compiled_once():
    """As blocks that are compiled alone, whose modulation begins with the SiLU of a layer's result."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    part = torch.compile(lambda h: F.silu(h), backend=backend, fullgraph=True)
    mlp, made = Mlp(WAYS["silu"]), []
    mlp.way = lambda h, other: part(h)
    for _ in range(5):
        with torch.inference_mode():
            assert torch.isfinite(mlp.calibration.run(mlp.once)).all()
        made.append(len(graphs))
    assert made[2:] == [made[2]] * 3 and made[2] <= 2 and mlp.layers["down"].scale.by_result
