import pytest
import torch
from halfsafe.precision.base import dtypes
from halfsafe.precision.base.errors import HalfsafeError


@pytest.mark.parametrize(
    ("name", "largest"),
    [("fp8_e4m3fn", 448), ("fp8_e5m2", 57344), ("fp8_e4m3fnuz", 240), ("fp8_e5m2fnuz", 57344), ("fp16", 65504)],
)
def test_limits_are_those_of_the_formats(name, largest):
    assert dtypes.max_of(dtypes.dtype_named(name)) == largest


def test_unknown_dtype_name_lists_the_known_ones():
    with pytest.raises(HalfsafeError, match=r"'fp4'.*fp8_e4m3fn"):
        dtypes.dtype_named("fp4")


def test_names_go_both_ways():
    assert [dtypes.name_of(dtypes.dtype_named(name)) for name in dtypes.DTYPES] == list(dtypes.DTYPES)
    assert dtypes.name_of(torch.int8) == "int8"
