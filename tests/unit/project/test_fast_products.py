"""The products that host tests make in fp32 on a CPU: torch's own numbers, refusals and kernels, but for the time they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import fast_products
from support.measures import relative_error

pytestmark = pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch 2.8 hands out no kernel of its own")
FP16_STEP = 2.0**-10


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


PRODUCTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "mm": lambda dtype: rand(9, 40).to(dtype) @ rand(40, 24).to(dtype),
    "addmm": lambda dtype: torch.addmm(rand(24).to(dtype), rand(9, 40).to(dtype), rand(40, 24).to(dtype), beta=0.5, alpha=2),
    "bmm": lambda dtype: rand(3, 9, 40).to(dtype) @ rand(3, 40, 24).to(dtype),
    "baddbmm": lambda dtype: torch.baddbmm(rand(3, 9, 24).to(dtype), rand(3, 9, 40).to(dtype), rand(3, 40, 24).to(dtype)),
    "conv1d": lambda dtype: torch.conv1d(rand(2, 8, 20).to(dtype), rand(6, 8, 3).to(dtype), rand(6).to(dtype), padding=1),
    "conv2d": lambda dtype: torch.conv2d(rand(2, 8, 9, 9).to(dtype), rand(6, 4, 3, 3).to(dtype), None, 2, 1, 1, 2),
    "conv3d": lambda dtype: torch.conv3d(rand(1, 8, 3, 9, 9).to(dtype), rand(6, 8, 3, 3, 3).to(dtype), rand(6).to(dtype), padding=(0, 1, 1)),
}


@pytest.fixture
def own_and_fast():
    """Makes a result by torch's own kernels, and then by the fast ones."""

    def both(make: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        own, library = make(), fast_products.make_fast()
        try:
            return own, make()
        finally:
            library._destroy()

    return both


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_fast_products_are_those_of_torch(own_and_fast, name, dtype):
    own, fast = own_and_fast(lambda: PRODUCTS[name](dtype))
    assert fast.dtype == own.dtype == dtype and fast.shape == own.shape
    assert relative_error(own, fast) < (FP16_STEP if dtype == torch.float16 else 1e-6)
    if dtype == torch.float16:
        assert relative_error(PRODUCTS[name](torch.float64), fast.double()) < FP16_STEP


def test_a_sum_that_passes_fp16_is_inf_and_operands_of_two_dtypes_are_refused(own_and_fast):
    for found in own_and_fast(lambda: torch.full((2, 4), 300.0).half() @ torch.full((4, 2), 300.0).half()):
        assert found.isinf().all()
    library = fast_products.make_fast()
    try:
        with pytest.raises(RuntimeError, match="same dtype"):
            rand(2, 4) @ rand(4, 2).float()
    finally:
        library._destroy()
