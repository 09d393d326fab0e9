"""The benchmark of errors in dB multiplies as the kernels do that layers are bound to."""

import pytest
import torch
from halfsafe.nodes.host.comfyui.weights import dequantized
from halfsafe.nodes.host.compute.bound import Fp8Linear, Int8Linear
from support.families import load
from support.inprocess import benchmark

KERNELS = {
    "int8": (Int8Linear, "int8", 80),
    "fp8_e4m3fn": (Fp8Linear, "fp8_e4m3fn", 50),
    "fp8_e5m2": (Fp8Linear, "fp8_e4m3fn", 50),
}
"""Storage -> kernel, product of the benchmark, and dB between them: the kernel's result in fp8 is bf16, which is 53 dB."""


@pytest.mark.parametrize("storage", KERNELS)
@torch.inference_mode()
def test_an_emulated_product_is_that_of_the_kernel(comfy, wan, monkeypatch, storage):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    rounding = benchmark("rounding")
    kernel, product, least = KERNELS[storage]
    module = load(comfy, wan, storage, "bf16").model.diffusion_model.blocks[0].ffn[0]
    # The kernel rounds fp32 to bf16 first, and a value that is rounded twice may end one step of fp8 away.
    x = torch.randn(64, module.in_features, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    weight = dequantized(module.weight, torch.float32)
    emulated = rounding.PRODUCTS[product](x, weight, module.bias.float())
    exact = torch.nn.functional.linear(x, weight, module.bias.float())
    found = rounding.snr(emulated, kernel(module)(x))
    assert found > least and found > rounding.snr(exact, emulated) + 10, found
