"""Whether a tensor of any dtype holds NaN is asked without a copy in a wider one."""

import math

import pytest
import torch
from halfsafe.nodes.host.guard.asked import holds_nan

WIDE = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
CODES = {
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e5m2: (0x7E, 0xFD),
    torch.float8_e4m3fnuz: (0x80,),
    torch.float8_e8m0fnu: (0xFF,),
}
"""Dtype of a byte -> some of its codes of NaN."""


@pytest.mark.parametrize("dtype", WIDE)
def test_nan_of_a_wide_dtype(dtype):
    numbers = torch.tensor([1.0, -3.0, math.inf]).to(dtype)
    assert not holds_nan([numbers, torch.zeros(0, dtype=dtype)])
    numbers[1] = math.nan
    assert holds_nan([torch.ones(2), numbers])


@pytest.mark.parametrize(("dtype", "code"), [(dtype, code) for dtype, codes in CODES.items() for code in codes])
def test_nan_of_a_byte(dtype, code):
    codes = torch.tensor([0, 1, 0x3C], dtype=torch.uint8)
    assert not holds_nan([codes.view(dtype)])
    codes[1] = code
    assert holds_nan([codes.view(dtype)])


def test_what_holds_no_floats_holds_no_nan():
    assert not holds_nan([torch.ones(3, dtype=torch.int8), torch.ones(2, dtype=torch.bool)])
