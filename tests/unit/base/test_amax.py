"""The largest magnitude of a tensor on devices whose norm keeps NaN and on those whose norm loses it."""

import math

import pytest
import torch
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.base import amax as amax_module
from halfsafe.precision.base.amax import amax, amax_value
from halfsafe.precision.formats.fp8 import activation_scale
from halfsafe.precision.guard.localize import Localizer, first_bad_weight
from support.broken_arithmetic import NormsLoseNaN
from support.plain_weights import plain_weights

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALVES_AND_FLOAT = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(params=["norm keeps NaN", "norm loses NaN"])
def either_norm(request):
    if request.param == "norm loses NaN":
        request.getfixturevalue("as_on_mps")


def test_a_cpu_and_cuda_are_not_asked():
    assert not any(amax_module._norm_loses_nan(torch.device(kind)) for kind in ("cpu", "cuda", "meta"))


@pytest.fixture
def as_on_another_device(monkeypatch):
    """CPU tensors stand for those of a device that nothing is known of; what it is asked is counted."""
    asked, tensor = [], torch.tensor
    monkeypatch.setattr(amax_module, "KEEP_NAN", ())
    monkeypatch.setattr(amax_module, "_loses_nan", {})
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: asked.append(args) or tensor(*args, **kwargs))
    return asked


def test_any_other_device_is_asked_once(as_on_another_device):
    assert not amax_module._norm_loses_nan(torch.device("cpu")) and not amax_module._norm_loses_nan(torch.device("cpu"))
    assert len(as_on_another_device) == 1


def test_a_device_that_loses_nan_is_found_by_its_norm(as_on_another_device):
    with NormsLoseNaN():
        assert amax_module._norm_loses_nan(torch.device("cpu"))
    assert amax(torch.ones(2).log_().sub_(1).sqrt_()).isnan(), "what was found holds"


def test_a_graph_compiled_before_the_device_was_asked_keeps_nan(as_on_another_device):
    torch._dynamo.reset()
    found = torch.compile(amax, backend="eager", fullgraph=True)(torch.full((2,), math.nan))
    assert found.isnan() and not as_on_another_device


@pytest.mark.parametrize("dtype", HALVES_AND_FLOAT)
@pytest.mark.parametrize(("bad", "seen"), [(math.nan, math.isnan), (math.inf, math.isinf), (-math.inf, math.isinf)])
def test_amax_keeps_nan_and_inf_of_every_dtype(either_norm, dtype, bad, seen):
    values = torch.linspace(-3, 2, 1001).to(dtype)
    for place in (0, 500, 1000):
        spoiled = values.clone()
        spoiled[place] = bad
        found = amax(spoiled)
        assert (found.dim(), found.dtype) == (0, torch.float32)
        assert seen(found.item()) and seen(amax_value(spoiled))


@pytest.mark.parametrize("dtype", HALVES_AND_FLOAT)
def test_amax_is_the_largest_magnitude_in_fp32(either_norm, dtype):
    values = torch.tensor([[1.0, -7.0], [0.5, 6.0]], dtype=dtype)
    for shaped in (values, values.t(), values[:, 1:], values.expand(3, 2, 2)):
        found = amax(shaped)
        assert (found.item(), found.dtype, found.dim()) == (7.0, torch.float32, 0)


@pytest.mark.parametrize("dtype", HALVES_AND_FLOAT)
def test_amax_of_nothing_is_zero(either_norm, dtype):
    found = amax(torch.zeros(0, 3, dtype=dtype))
    assert (found.item(), found.dtype, found.dim()) == (0.0, torch.float32, 0)


def test_amax_value_of_fp8_and_fp64_keeps_nan(either_norm):
    for dtype in (torch.float64, E5M2, E4M3):
        assert math.isnan(amax_value(torch.tensor([1.0, math.nan]).to(dtype)))
    assert math.isnan(amax_value(torch.tensor([1.0, complex(0, math.nan)])))


def test_a_weight_with_nan_is_found_where_norms_lose_it(as_on_mps):
    layer = torch.nn.Linear(4, 4).half()
    with torch.no_grad():
        layer.bias[2] = math.nan
    assert first_bad_weight(layer) == "bias"


def test_an_operation_that_makes_nan_is_named_where_norms_lose_it(as_on_mps):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model[1].forward = lambda x: torch.log(-1 - x.abs())
    localizer = Localizer(model)
    with localizer.watching():
        result = model(torch.ones(1, 4))
    origin = localizer.origin(result)
    assert (origin.layer, origin.op, origin.kind) == ("1", "log", "overflow")


def test_an_fp8_scale_shows_nan_where_norms_lose_it(as_on_mps):
    assert not activation_scale(torch.tensor([1.0, math.nan]), E4M3).isfinite()


def test_a_call_with_nan_in_it_is_repeated_where_norms_lose_it(as_on_mps):
    calibration, layer = Calibration(), torch.nn.Linear(8, 8)
    operation = SafeOperation(layer, calibration.scale("layer"), calibration, plain_weights)
    for x in (torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 8).index_fill(0, torch.tensor([1]), math.nan)):
        calibration.run(lambda x=x: operation(x))
    assert calibration.repeats == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([1.0, -3.0]), 3.0),
        (torch.tensor([1.0, math.inf]), math.inf),
        (torch.tensor([1, 2]), 0.0),
        (torch.empty(0), 0.0),
        (torch.empty(2, device="meta"), 0.0),
        (torch.tensor([1.0, -1e300], dtype=torch.float64), 1e300),
        (torch.tensor([3 + 4j]), 4.0),
        (torch.tensor([1.0, -2.0]).to(torch.float8_e5m2), 2.0),
    ],
)
def test_amax_value_is_the_largest_magnitude(values, expected):
    assert amax_value(values) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, E4M3, E5M2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_amax_value_sees_nan_and_inf(dtype, bad):
    values = torch.linspace(-3, 2, 1000).to(dtype)
    assert amax_value(values) == 3.0
    values[777] = (
        math.nan if dtype == E4M3 else bad
    )  # which has no inf: torch's cast gives NaN for it, or from 2.12 on 448
    found = amax_value(values)
    assert not math.isfinite(found)


def test_amax_value_sees_the_only_nan_of_fnuz():
    values = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fnuz)
    assert amax_value(values) == 2.0
    assert math.isnan(amax_value(torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fnuz)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_amax_value_finds_a_negative_number_at_every_place(dtype):
    for position in range(0, 50, 7):
        values = torch.zeros(50).to(dtype)
        values[position] = -5.0
        assert amax_value(values) == 5.0
    assert amax_value(torch.zeros(0, dtype=dtype)) == 0.0 and amax_value(torch.full((9,), -0.0).to(dtype)) == 0.0
