"""Settings that a GPU refuses or obeys and a CPU ignores: sums, `--fast`, fp8 formats, compiled graphs."""

import pytest
import torch
from halfsafe.nodes.host.run.compute import compute_of
from halfsafe.precision.arithmetic import flags
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from halfsafe.precision.arithmetic.linear import SafeOperation, has_wide_output
from halfsafe.precision.devices.detect import PROFILE_VARIABLE, detect
from support import families, tiny_models
from support.families import load
from support.guarding import guarded, plain_fp16, report_of
from support.measures import relative_error
from support.plain_weights import plain_weights
from support.summing import accumulation, products, spied, started_with, states

REDUCTIONS = ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction")


@pytest.fixture(scope="module")
def clean(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "gpu_settings.safetensors")


@pytest.fixture(scope="module")
def overflowing(models_dir):
    return tiny_models.wan_overflowing(models_dir / "diffusion_models" / "gpu_settings_overflowing.safetensors")


@pytest.fixture
def as_nvidia(device, monkeypatch):
    """In a dry run, decisions as for a device with fp8 products, as the pack sets nothing for a CPU."""
    if device.type == "cpu":
        monkeypatch.setenv(PROFILE_VARIABLE, "sm_89")


def safe_linear(device):
    torch.manual_seed(0)
    layer = torch.nn.Linear(1024, 256, bias=False).to(device)
    calibration = Calibration()
    return layer, calibration, SafeOperation(layer, calibration.scale("layer"), calibration, plain_weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_run_while_reduced_precision_reduction_is_off(device, dtype):
    """Without split-k cuBLAS refuses every product that cuBLASLt does not take: those without a bias, and batched ones."""
    x, weight = torch.randn(64, 1024, device=device, dtype=dtype), torch.randn(256, 1024, device=device, dtype=dtype)
    exact = x.double() @ weight.double().t()
    with flags.flags_set(dict.fromkeys(REDUCTIONS, False)):
        results = [
            torch.nn.functional.linear(x, weight),
            torch.mm(x, weight.t()),
            torch.bmm(x[None], weight.t()[None])[0],
            torch.baddbmm(torch.zeros_like(exact, dtype=dtype)[None], x[None], weight.t()[None])[0],
        ]
    assert all(relative_error(exact, result) < 0.01 for result in results)


def test_a_product_with_a_wide_output_runs_while_reduced_precision_reduction_is_off(device):
    layer, calibration, operation = safe_linear(device)
    x = torch.randn(64, 1024, device=device)
    with torch.inference_mode(), flags.flags_set(dict.fromkeys(REDUCTIONS, False)):
        results = [calibration.run(lambda: operation(x)) for _ in range(2)]
    exact = layer.weight.double() @ x.double().t()
    assert all(relative_error(exact.t(), result) < 1e-3 for result in results)


def test_the_node_turns_it_off_around_a_whole_model(comfy, clean, as_nvidia):
    expected = families.sample(load(comfy, clean, "fp32", "fp32"), "wan").cpu()
    for compute in ("fp16", "bf16", "fp16_safe"):
        seen = []
        model = accumulation(comfy, load(comfy, clean, "as_file", compute), reduced_precision_reduction="off")
        model = spied(model, lambda seen=seen: seen.append(flags.is_on(REDUCTIONS[0])))
        assert relative_error(expected, families.sample(model, "wan").cpu()) < 0.05
        assert seen and not any(seen)


def test_fp16_operands_with_a_wide_output_under_the_flag_of_fast(device):
    """``--fast`` sets the flag for the whole process."""
    layer, calibration, operation = safe_linear(device)
    x = torch.randn(64, 1024, device=device)
    with started_with([FP16_ACCUMULATION], True), torch.inference_mode():
        results = [calibration.run(lambda: operation(x)) for _ in range(2)]
    exact = layer.weight.double() @ x.double().t()
    assert all(relative_error(exact.t(), result) < 1e-3 for result in results)


def test_fp16_safe_is_right_under_the_flag_of_fast(comfy, overflowing):
    expected = families.sample(load(comfy, overflowing, "fp32", "fp32"), "wan").cpu()
    model = load(comfy, overflowing, "fp16", "fp16_safe")
    with started_with([FP16_ACCUMULATION], True) as fast:
        for _ in range(2):
            assert relative_error(expected, families.sample(model, "wan").cpu()) < 0.01
        assert states() == fast
    assert compute_of(model).runs.last(model.model).fp16_share() > 0.9


def test_the_guard_recovers_under_the_flag_of_fast(comfy, overflowing):
    expected = families.sample(load(comfy, overflowing, "fp32", "fp32"), "wan").cpu()
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    with started_with([FP16_ACCUMULATION], True):
        assert relative_error(expected, families.sample(model, "wan").cpu()) < 0.02
    assert report_of(model).verdict == "recovered"


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_products_with_weights_of_either_format(comfy, clean, as_nvidia, device, storage):
    """CUDA multiplies no e5m2 by e5m2."""
    if not detect(device).capabilities["fp8_matmul"]:
        pytest.skip("no fp8 products here")
    expected = families.sample(load(comfy, clean, storage, "fp32"), "wan").cpu()
    assert relative_error(expected, families.sample(load(comfy, clean, storage, "fp8"), "wan").cpu()) < 0.15


def test_fp16_sums_act_where_a_model_gains_by_them(comfy, clean, gaining):
    expected = families.sample(load(comfy, clean, "fp32", "fp32"), "wan").cpu()
    model = accumulation(comfy, plain_fp16(comfy, clean), fp16_accumulation="auto")
    assert relative_error(expected, families.sample(model, "wan").cpu()) < 0.02
    seen, _ = products(model, families.capture(model, "wan"))
    assert any(on for _, on in seen), "no product ran with fp16 sums"


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_fp16_operands_compile_into_one_graph(device, size):
    layer, calibration, operation = safe_linear(device)
    x = torch.randn(64, 1024, device=device) * size
    with torch.inference_mode():
        calibration.run(lambda: operation(x))
        compiled = torch.compile(lambda x: operation(x), fullgraph=True, backend="aot_eager")
        result = calibration.run(lambda: compiled(x))
    assert calibration.repeats == 0
    assert relative_error((layer.weight.double() @ x.double().t()).t(), result) < 1e-3


def test_the_compiled_product_has_a_wide_output_where_torch_has_one(device):
    if not has_wide_output(device, "linear"):
        pytest.skip("this torch has no mm(out_dtype=...) here")
    layer, calibration, operation = safe_linear(device)
    x = torch.full((16, 1024), 16.0, device=device)
    with torch.inference_mode():
        layer.weight.fill_(16.0)
        calibration.run(lambda: operation(x))
        result = calibration.run(lambda: torch.compile(lambda x: operation(x), fullgraph=True, backend="aot_eager")(x))
    assert (result == 16.0 * 16.0 * 1024).all(), "262144 does not fit fp16"
