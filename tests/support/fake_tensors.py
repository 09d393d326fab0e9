"""Fake tensors of a CUDA device that is not there, where torch can make them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_cuda_tensors() -> FakeTensorMode:
    """Return the mode in which there are CUDA tensors without numbers, or skip the test."""
    if missing := _missing():
        pytest.skip(missing)
    return FakeTensorMode(allow_non_fake_inputs=True)


@functools.cache
def _missing() -> str:
    """Why this torch's fake tensors cannot stand for CUDA's: 2.8 asks the driver before it copies in place, and knows no shape of ``mm(out_dtype=)``."""
    try:
        with FakeTensorMode():
            x = torch.empty(1, 1, dtype=torch.float16, device="cuda")
            torch.mm(x.copy_(x), x, out_dtype=torch.float32)
    except (RuntimeError, TypeError) as error:
        return f"fake CUDA tensors: {str(error).splitlines()[0]}"
    return ""
