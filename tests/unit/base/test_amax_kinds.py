"""What reads tensors that other code made, over each dtype, layout and class of tensor, judged by the same values in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from halfsafe.precision.arithmetic.attention_bounds import AttentionCall
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.arithmetic.proofs import AmaxBuffer, Proof
from halfsafe.precision.base.amax import amax, amax_value, finite
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.check.drift import row_decibels, sampled
from halfsafe.precision.guard.inputs import (
    inputs_not_finite,
    is_finite,
    not_finite,
    rows_not_finite,
    with_nan,
    without_nan,
    zeroed,
)
from halfsafe.precision.guard.localize import Localizer, first_bad_weight
from halfsafe.precision.report.images import compare, difference_image
from support.plain_weights import plain_weights

VALUES = torch.tensor([[1.0, -4.0], [0.5, 2.0], [3.0, -8.0]], dtype=torch.float64)
ROW = 1
FP32_MAX = torch.finfo(torch.float32).max
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WIDE = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WITHOUT_INF = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz")


class Subclass(torch.Tensor):
    """As those of torchvision, and of loaders that keep packed weights."""


DENSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{str(dtype).removeprefix("torch."): lambda values, dtype=dtype: values.to(dtype) for dtype in WIDE + FP8},
    "complex64": lambda values: torch.complex(values.float() / 2, values.float()),
    "complex128 conjugate": lambda values: torch.complex(values / 2, values).conj(),
    "subclass": lambda values: values.float().as_subclass(Subclass),
    "parameter": lambda values: torch.nn.Parameter(values.float()),
    "float64 that wants gradients": lambda values: (values * 1.0).requires_grad_(),
    "transposed float64": lambda values: values.t().contiguous().t(),
    "expanded": lambda values: values.half()[:, :, None].expand(3, 2, 4),
}
OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda values: values.float().to_sparse(),
    "sparse rows": lambda values: values.to_sparse_csr(),
    "nested": lambda values: torch.nested.nested_tensor([*values], layout=torch.jagged),
}
"""Layouts that no model of ComfyUI takes, and that an output of a node may have."""
BAD = {"finite": None, "NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}
of_any_kind = pytest.mark.parametrize("kind", [*DENSE, *OTHERS])
of_dense_kinds = pytest.mark.parametrize("kind", DENSE)
spoiled = pytest.mark.parametrize("bad", BAD)
NUMBERLESS = [
    torch.tensor([[3, -9]]),
    torch.tensor([[True]]),
    torch.tensor([[7]], dtype=torch.uint8),
    torch.quantize_per_tensor(torch.ones(1, 2), 0.1, 0, torch.qint8),
    torch.empty(0, 2, dtype=torch.float64),
    torch.empty(0, dtype=torch.complex64),
    torch.empty(0, 2, dtype=torch.float8_e5m2),
]


def made(kind: str, bad: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of a kind with one value in its second row that may be NaN or Inf, and its values in float64."""
    exact = VALUES.clone()
    if BAD[bad] is not None:
        exact[ROW, 1] = math.nan if kind in WITHOUT_INF else BAD[bad]
    return (DENSE | OTHERS)[kind](exact), exact


def is_largest(found: float, exact: torch.Tensor) -> bool:
    largest = exact.abs().max().item()
    return found == largest or (math.isnan(found) and math.isnan(largest))


@spoiled
@of_any_kind
def test_the_largest_magnitude_is_that_of_the_values(kind, bad):
    tensor, exact = made(kind, bad)
    on_device = amax(tensor)
    assert (on_device.dim(), on_device.dtype) == (0, torch.float32)
    assert is_largest(on_device.item(), exact) and is_largest(amax_value(tensor), exact)


@spoiled
@of_any_kind
def test_a_record_is_the_largest_magnitude(kind, bad):
    tensor, exact = made(kind, bad)
    buffer, proof = AmaxBuffer(1, tensor.device), Proof("result")
    proof.entries = buffer.entries
    for _ in ("first", "second"):
        proof.record_amax(tensor)
        assert is_largest(buffer.read()[0], exact)


@spoiled
@of_any_kind
def test_what_is_not_finite_is_told_with_its_row(kind, bad):
    tensor, exact = made(kind, bad)
    rows = set() if exact.isfinite().all() else {ROW}
    assert is_finite(tensor) is bool(finite(tensor).all()) is (not rows)
    assert rows_not_finite([tensor]) == rows
    told = not_finite({"samples": tensor})
    assert [text.rpartition("batch rows ")[2] for _, text in told] == [str(row) for row in rows]


@spoiled
@of_any_kind
def test_an_input_is_blamed_for_what_it_holds(kind, bad):
    tensor, exact = made(kind, bad)
    named = [("conditioning", {"cond": [tensor]})]
    assert bool(inputs_not_finite(named)) is not bool(exact.isfinite().all())
    blamed = [one.nan_rows(len(VALUES)) for one in inputs_not_finite(named) if one.has_nan]
    assert blamed == [{ROW}] * bool(exact.isnan().any())


@spoiled
@of_dense_kinds
def test_evidence_has_zeros_in_place_of_what_is_not_finite(kind, bad):
    tensor, exact = made(kind, bad)
    assert is_finite(zeroed(tensor)) and zeroed(tensor).dtype == tensor.dtype
    nan_to_zero, infinite = without_nan(inputs_not_finite([("latent", tensor)]))
    assert not math.isnan(amax_value(nan_to_zero(tensor)))
    assert bool(infinite) is bool(exact.isinf().any())


@pytest.mark.parametrize("tensor", NUMBERLESS, ids=lambda each: f"{each.dtype} {tuple(each.shape)}")
def test_what_holds_no_floats_is_finite_and_zero(tensor):
    assert (amax(tensor).item(), amax_value(tensor)) == (0.0, 0.0)
    assert is_finite(tensor) and not rows_not_finite([tensor]) and not not_finite({"mask": tensor})


@pytest.mark.parametrize("large", [FP32_MAX * 2.0, 1e300])
def test_a_finite_float64_beyond_fp32_stays_finite(large):
    tensor = torch.tensor([[1.0], [-large]], dtype=torch.float64)
    assert amax(tensor).item() == pytest.approx(FP32_MAX) and amax_value(tensor) == large
    assert is_finite(tensor) and not not_finite(tensor) and not inputs_not_finite([("latent", tensor)])
    calibration, calls = calibrated()
    for _ in range(2):
        calibration.run(lambda: calls(tensor))
    assert calibration.repeats == 0, "a result that is finite was taken for Inf"


def test_a_tensor_without_values_is_refused_by_name():
    with pytest.raises(HalfsafeError, match="'samples'.*meta device"):
        not_finite({"samples": torch.empty(1, device="meta")})


def calibrated() -> tuple[Calibration, Callable]:
    """A calibration after its first call, whose later calls return what they are given."""
    calibration, layer = Calibration(), torch.nn.Linear(2, 2)
    operation = SafeOperation(layer, calibration.scale("layer"), calibration, plain_weights)

    def call(result: torch.Tensor) -> torch.Tensor:
        operation(torch.ones(1, 2))
        return result

    calibration.run(lambda: call(torch.ones(1)))
    return calibration, call


@spoiled
@of_dense_kinds
def test_the_result_of_a_call_is_looked_at(kind, bad):
    tensor, exact = made(kind, bad)
    calibration, call = calibrated()
    calibration.run(lambda: call(tensor))
    assert calibration.repeats == (0 if exact.isfinite().all() else 1)


@pytest.mark.parametrize("dtype", [*WIDE, *FP8])
def test_a_weight_of_any_dtype_with_nan_is_found(dtype):
    layer = torch.nn.Module()
    layer.register_buffer("sound", VALUES.to(dtype))
    assert first_bad_weight(layer) is None
    layer.register_buffer("bad", made("float64", "NaN")[0].to(dtype))
    assert first_bad_weight(layer) == "bad"


def test_an_operation_in_float64_is_located():
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())
    model[1].forward = lambda x: torch.log(-x.double().abs())
    localizer = Localizer(model)
    with localizer.watching():
        result = model(torch.ones(1, 4))
    origin = localizer.origin(result)
    assert (origin.layer, origin.op, origin.dtype) == ("1", "log", "fp64")


@pytest.mark.parametrize("dtype", WIDE)
def test_a_row_norm_of_any_dtype_is_that_of_float64(dtype):
    values = VALUES.to(dtype)
    found, _ = AttentionCall(values, values, values, 1, (), {}).norms()
    assert (found.dim(), found.dtype) == (0, torch.float32)
    assert found.item() == pytest.approx(VALUES.norm(dim=-1).max().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", WIDE)
def test_the_error_of_a_result_does_not_round_it(dtype):
    """A result in float64 that differs by less than fp32 tells apart is not equal, and an fp16 one is not rounded further."""
    exact = torch.full((2, 3), 1.0, dtype=torch.float64)
    step = torch.finfo(dtype).eps
    snr = row_decibels((exact + step).to(dtype), exact, torch.zeros_like(exact))
    assert snr == pytest.approx([-20 * math.log10(step)] * 2, abs=0.01)


@of_any_kind
def test_samples_of_a_block_are_its_numbers_in_fp32(kind):
    taken = sampled({"img": made(kind, "finite")[0]})
    assert taken.dtype == torch.float32 and taken.abs().max().item() == 8.0


def test_a_given_up_row_is_nan_in_floats_alone():
    cond, pooled, mask = VALUES.clone(), VALUES[:, 0].half(), torch.ones(3, 4, dtype=torch.long)
    lost = with_nan([[cond, {"pooled_output": pooled, "attention_mask": mask, "strength": torch.tensor(1.0)}]], [ROW])
    assert rows_not_finite(lost) == {ROW} and rows_not_finite([lost[0][1]["pooled_output"]]) == {ROW}
    assert torch.equal(lost[0][1]["attention_mask"], mask)


def test_nan_in_a_second_part_is_told_with_its_row():
    sound, noise = VALUES.clone(), VALUES.clone()
    sound[0, 0], noise[2, 0] = math.nan, math.inf
    assert rows_not_finite([sound, noise, torch.full((5,), math.nan)]) == {0, 2}


IMAGE = torch.rand(1, 4, 4, 3, generator=torch.Generator().manual_seed(1))


def test_a_difference_that_float64_alone_tells_apart_is_drawn():
    picture, gain = difference_image(IMAGE.double(), IMAGE.double() + 1e-12)
    assert gain == 255.0 and picture.dtype == torch.float32 and picture.max() > 0


@pytest.mark.parametrize(
    ("image", "named"),
    [
        (IMAGE.to(torch.complex64), "complex64"),
        (IMAGE.to_sparse(), "sparse"),
        (IMAGE.to("meta"), "meta"),
        (torch.nested.nested_tensor([*IMAGE]), "4-D"),
        (IMAGE[0], "3-D"),
        (torch.tensor(1.0), "0-D"),
        ([IMAGE], "list"),
        (torch.quantize_per_tensor(IMAGE, 0.1, 0, torch.qint8), "qint8"),
    ],
    ids=["complex", "sparse", "meta", "nested", "3-D", "0-D", "list", "quantized"],
)
def test_what_is_no_image_is_refused_by_name(image, named):
    for given in ((IMAGE, image), (image, IMAGE)):
        with pytest.raises(HalfsafeError, match=f"is no image.*({named})"):
            compare(*given)
