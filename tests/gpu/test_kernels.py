"""The kernels the pack counts on, on a real device: results, calibration and what the flags do."""

import math

import pytest
import torch
from halfsafe.precision.arithmetic import flags
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from halfsafe.precision.arithmetic.linear import SafeOperation, has_wide_output
from halfsafe.precision.devices import probes
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.plan.accumulation import PARTS
from support.measures import relative_error
from support.plain_weights import plain_weights


def safe(module, x, calls=3):
    calibration = Calibration()
    operation = SafeOperation(module, calibration.scale("layer"), calibration, plain_weights)
    for _ in range(calls):
        result = calibration.run(lambda: operation(x))
    return result, calibration


@pytest.fixture
def linear(device):
    torch.manual_seed(0)
    return torch.nn.Linear(4096, 1024).to(device)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_a_product_with_fp16_operands_is_finite_and_close_at_any_size(device, linear, size):
    x = torch.randn(64, 4096, device=device) * size
    with torch.inference_mode():
        result, calibration = safe(linear, x)
        reference = linear.double()(x.double())
    assert result.dtype == torch.float32
    assert relative_error(reference, result) < 1e-3
    assert calibration.repeats == 0


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_a_convolution_too(device, size):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(64, 64, 3, padding=1).to(device)
    x = torch.randn(1, 64, 32, 32, device=device) * size
    with torch.inference_mode():
        result, _ = safe(conv, x)
        reference = conv.double()(x.double())
    assert relative_error(reference, result) < 2e-3


def test_wide_output_is_what_torch_gives(device):
    if device.type != "cuda" or not has_wide_output(device, "linear"):
        pytest.skip("this torch has no mm(out_dtype=...) here")
    left = torch.full((16, 1024), 16.0, device=device, dtype=torch.float16)
    result = torch.mm(left, left.t(), out_dtype=torch.float32)
    assert result.dtype == torch.float32 and (result == 16.0 * 16.0 * 1024).all(), "262144 does not fit fp16"


def linear_of(weight):
    module = torch.nn.Linear(*weight.t().shape, bias=False, device=weight.device)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def test_cublas_refuses_wide_output_while_sums_are_in_fp16_and_a_safe_product_is_exact(device):
    if not has_wide_output(device, "linear") or device.type != "cuda":
        pytest.skip("this torch has no mm(out_dtype=...) here")
    left, right = probes.accumulation_operands(device)
    with flags.flags_set({FP16_ACCUMULATION: True}), torch.inference_mode():
        with pytest.raises(RuntimeError, match="allowFP16AccumulationCuBLAS"):
            torch.mm(left, right, out_dtype=torch.float32)
        result, _ = safe(linear_of(right.t().contiguous()), left)
        assert flags.is_on(FP16_ACCUMULATION) is True
    assert (result == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_run_with_reduced_precision_reduction_off(device, dtype):
    left, right = (operand.to(dtype) for operand in probes.accumulation_operands(device))
    wanted = dict.fromkeys(PARTS["reduced_precision_reduction"], False)
    with flags.flags_set(wanted), torch.inference_mode():
        assert (left @ right == 0).all(), "without cublasLt's epilogue"
        assert (torch.bmm(left[None], right[None]) == 0).all()
        assert (torch.nn.functional.linear(left, right.t(), torch.zeros(64, device=device, dtype=dtype)) == 0).all()
        result, _ = safe(linear_of(right.t().contiguous()), left)
    assert (result == 0).all()


def test_the_probes_agree_with_the_profile(device):
    found = detect(device)
    for probe in probes.run_probes(device):
        assert probe.ok is not False or not found.capabilities.get(probe.name, False), f"{probe.name}: {probe.detail}"


def test_the_canaries_are_right(device):
    for name in ("fp16", "fp32"):
        ok, detail = probes.canary(device, name)
        assert ok, detail


def test_the_flag_for_fp16_sums_acts_where_the_probe_says_so(device):
    probe = next(probe for probe in probes.run_probes(device) if probe.name == "fp16_accumulation")
    if not probe.ok:
        pytest.skip(probe.detail)
    left, right = probes.accumulation_operands(device)
    before = flags.state_of(FP16_ACCUMULATION)
    with flags.flags_set({FP16_ACCUMULATION: True}):
        inside = left @ right
    assert not torch.isfinite(inside).all()
    assert flags.state_of(FP16_ACCUMULATION) == before and torch.isfinite(left @ right).all()


def test_an_fp8_product_with_a_dynamic_scale(device, capabilities):
    if not capabilities["fp8_matmul"]:
        pytest.skip("no fp8 products here")
    from halfsafe.precision.formats.fp8 import activation_scale

    torch.manual_seed(0)
    x = torch.randn(256, 256, device=device).bfloat16()
    x[:, 3] *= 1000
    scale = activation_scale(x, torch.float8_e4m3fn)
    assert math.isfinite(scale.item())
    data = (x.float() / scale).to(torch.float8_e4m3fn)
    weight = (torch.randn(128, 256, device=device) * 0.02).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    result = torch._scaled_mm(data, weight.t(), scale_a=scale, scale_b=one, out_dtype=torch.bfloat16)
    assert relative_error(x.double() @ weight.double().t(), result) < 0.03
