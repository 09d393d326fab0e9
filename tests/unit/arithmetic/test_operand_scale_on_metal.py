"""Scaled operations on an Apple GPU, whose rules a CPU raises."""

import pytest
import torch
from halfsafe.precision.arithmetic import operand_scale as operand_scale_module
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.arithmetic.operand_scale import OperandScale
from support.measures import relative_error
from support.metal_rules import MetalRules
from support.plain_weights import plain_weights
from torch._subclasses.fake_tensor import FakeTensorMode

LAYERS = {
    "linear": (lambda: torch.nn.Linear(256, 64), (8, 256)),
    "conv": (lambda: torch.nn.Conv2d(8, 8, 3), (1, 8, 16, 16)),
    "transposed": (lambda: torch.nn.ConvTranspose1d(64, 6, 4), (2, 64, 9)),
}


@pytest.fixture
def as_on_metal(monkeypatch):
    """CPU tensors stand for those of a Mac."""
    monkeypatch.setattr(operand_scale_module, "converts_results", lambda device: False)
    with MetalRules():
        yield


def test_the_rule_raises_for_a_result_in_another_dtype_only():
    x = torch.ones(2)
    with MetalRules():
        for refused in (
            lambda: torch.mul(x, 0.5, out=torch.empty(2, dtype=torch.float16)),
            lambda: torch.maximum(x, x, out=torch.empty(2, dtype=torch.float16)),
            lambda: torch.ones(2, dtype=torch.float16).add_(x, alpha=2),
        ):
            with pytest.raises(RuntimeError, match="Failed to create function state object for: .*_dense_half_float"):
                refused()
        torch.mul(x, 0.5, out=torch.empty(2))
        torch.add(x, x.half(), alpha=2)
        x.mul_(0.5).add_(x.half())


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5, 1e9])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_scaled_layer_runs_on_metal(as_on_metal, layer, size):
    torch.manual_seed(0)
    build, shape = LAYERS[layer]
    module, calibration, x = build(), Calibration(), torch.randn(shape) * size
    operation = SafeOperation(module, calibration.scale("layer"), calibration, plain_weights)
    operation._is_wide = lambda x: False
    with torch.inference_mode():
        exact = module(x)
        for _ in range(2):
            assert relative_error(exact, calibration.run(lambda: operation(x))) < 1e-3
    assert x.abs().max() < 65504 or operation.scale.exponent > 0


def test_a_tensor_of_an_apple_gpu_is_scaled_as_metal_can():
    scale = OperandScale("layer")
    scale.calibrate(1e6)
    with FakeTensorMode(), MetalRules():
        scaled = scale.scaled(torch.empty(4, 4, device="mps"))
    assert (scaled.dtype, scaled.device.type) == (torch.float16, "mps")
