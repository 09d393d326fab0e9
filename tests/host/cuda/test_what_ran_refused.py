"""A product that CUDA refuses raises CUDA's exception in a model's call on a CPU, without a mode around it: `support/cuda_rules.py` holds it in the kernels."""

import pytest
import torch
from support import families

REFUSED = {
    "two dtypes": (lambda: torch.ones(16, 16).half() @ torch.ones(16, 16), "expected mat1 and mat2 to have the same dtype"),
    "two dtypes in a layer": (lambda: torch.nn.functional.linear(torch.ones(2, 16, 16).half(), torch.ones(16, 16), torch.ones(16)), "expected mat1 and mat2 to have the same dtype"),
    "rows of int8": (lambda: torch._int_mm(torch.ones(16, 16, dtype=torch.int8), torch.ones(16, 16, dtype=torch.int8).t()), "greater than 16"),
    "wide sums in fp16": (lambda: torch.mm(torch.ones(16, 16).half(), torch.ones(16, 16).half(), out_dtype=torch.float64), "out_dtype must be the same"),
    "fp8": (lambda: torch.mm(*[torch.ones(16, 16).to(torch.float8_e4m3fn)] * 2), "not implemented for 'Float8_e4m3fn'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_raises_in_a_model_s_call(comfy, base, call, name):
    product, words = REFUSED[name]
    modes = []

    def multiply(*_):
        modes.append(torch._C._len_torch_dispatch_stack())
        product()

    hook = base.model.diffusion_model.blocks[0].register_forward_pre_hook(multiply)
    try:
        with pytest.raises(RuntimeError, match=words):
            families.replay(base, call)
    finally:
        hook.remove()
    assert modes == [0]


def test_a_product_that_a_cpu_lacks_runs_in_a_model_s_call_alone(comfy, base, call):
    half, made = torch.ones(16, 16).half(), []
    with pytest.raises(NotImplementedError):
        torch.mm(half, half, out_dtype=torch.float32)
    hook = base.model.diffusion_model.blocks[0].register_forward_pre_hook(
        lambda *_: made.append(torch.mm(half, half, out_dtype=torch.float32))
    )
    families.replay(base, call)
    hook.remove()
    assert made[0].dtype == torch.float32 and (made[0] == 16).all()
