import pytest
import torch
from halfsafe.precision import dtypes
from halfsafe.precision.errors import HalfsafeError


@pytest.mark.parametrize(
    ("name", "largest"),
    [("fp8_e4m3fn", 448), ("fp8_e5m2", 57344), ("fp8_e4m3fnuz", 240), ("fp8_e5m2fnuz", 57344), ("fp16", 65504)],
)
def test_limits_are_those_of_the_formats(name, largest):
    assert dtypes.max_of(dtypes.dtype_named(name)) == largest


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2", "fp8_e4m3fnuz", "fp16"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_cast_saturates_on_every_torch_version(name, source):
    dtype = dtypes.dtype_named(name)
    values = torch.tensor([1e6, -1e6, 1.0, 0.0], dtype=source)
    assert dtypes.saturating_cast(values, dtype).float().tolist() == [dtypes.max_of(dtype), -dtypes.max_of(dtype), 1.0, 0.0]


def test_cast_keeps_nan_visible():
    assert dtypes.saturating_cast(torch.tensor([float("nan")]), torch.float8_e4m3fn).float().isnan().all()


def test_cast_from_fp8_goes_through_fp32():
    values = torch.tensor([448.0, -2.0]).to(torch.float8_e4m3fn)
    assert dtypes.saturating_cast(values, torch.float8_e4m3fnuz).float().tolist() == [240.0, -2.0]
    assert dtypes.saturating_cast(values, torch.bfloat16).tolist() == [448.0, -2.0]


def test_cast_to_the_same_dtype_is_the_tensor_itself():
    tensor = torch.ones(3)
    assert dtypes.saturating_cast(tensor, torch.float32) is tensor


def test_unknown_dtype_name_lists_the_known_ones():
    with pytest.raises(HalfsafeError, match=r"'fp4'.*fp8_e4m3fn"):
        dtypes.dtype_named("fp4")


def test_names_go_both_ways():
    assert [dtypes.name_of(dtypes.dtype_named(name)) for name in dtypes.DTYPES] == list(dtypes.DTYPES)
    assert dtypes.name_of(torch.int8) == "int8"
