"""The probes tell right from wrong: each is run, and run again with torch broken on purpose."""

import contextlib
import platform
import threading
import types

import pytest
import torch
from halfsafe.precision.base import flags
from halfsafe.precision.devices import probes
from support.cuda_rules import CudaRules

pytestmark = pytest.mark.usefixtures("fresh_probes")

CPU = torch.device("cpu")
LACKS_OF_MEMORY = [
    torch.OutOfMemoryError("Allocation on device"),
    RuntimeError("MPS backend out of memory (MPS allocated: 19.13 GiB)"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]


def named(results, name):
    return next(result for result in results if result.name == name)


def raising(error):
    def function(*_, **__):
        raise error

    return function


def test_all_probes_run_on_a_cpu():
    results = probes.run_probes(CPU)
    assert [result.name for result in results] == [
        "fp8_cast", "fp8_matmul", "fp16_gemm", "bf16_gemm", "bf16_native", "fp16_accumulation",
        "int8_matmul", "int8_kernels",
    ]  # fmt: skip
    assert named(results, "fp8_cast").ok and named(results, "fp16_gemm").ok and named(results, "bf16_gemm").ok
    assert named(results, "fp16_accumulation").ok is None
    assert named(results, "int8_kernels").ok is None


KITCHEN = pytest.param(
    True, marks=pytest.mark.skipif(probes.kitchen_function("int8_linear") is None, reason="needs comfy-kitchen")
)


@pytest.fixture(params=[KITCHEN, False], ids=["by comfy-kitchen", "by torch"])
def kitchen(request, monkeypatch):
    """With comfy-kitchen, which multiplies int8 weights in ComfyUI, and without it."""
    if not request.param:
        monkeypatch.setattr(probes, "kitchen_function", lambda name: None)
    return request.param


def test_no_probe_asks_for_what_cuda_refuses(kitchen):
    """What a probe is refused the plan takes for missing."""
    with CudaRules():
        asked = probes.run_probes(CPU)
        held = probes.canary(CPU, "fp32")[0]
        _, sums = probes._overflows_in_fp16(*probes._accumulation_operands(CPU))
    outcome = {probe.name: probe.detail for probe in asked if probe.ok is False}
    assert set(outcome) <= {"bf16_native"} and held and "has no effect" in sums, outcome


def test_the_probe_of_int8_products_tells_whether_they_are_right_here():
    """Without VNNI, torch 2.11's product of int8 saturates in 16 bits on a CPU."""
    left, right = torch.full((32, 64), -128, dtype=torch.int8), torch.full((64, 32), 127, dtype=torch.int8)
    left[::2], right[:, ::2] = 127, -128
    right_here = torch.equal(torch._int_mm(left, right), left.int() @ right.int())
    assert probes.CHECKS["int8_matmul"](CPU)[0] == right_here


def test_probes_run_once_per_device(monkeypatch):
    first = probes.run_probes(CPU)
    monkeypatch.setitem(probes.CHECKS, "fp16_gemm", raising(AssertionError("ran twice")))
    assert probes.run_probes(CPU) == first


def test_probes_leave_random_state_and_flags_alone():
    state, before = torch.get_rng_state(), {name: flags.state_of(name) for name in flags.SETTINGS}
    probes.run_probes(CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: flags.state_of(name) for name in flags.SETTINGS} == before


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no kernel\nmore"), NotImplementedError("x"), TypeError("x"), AttributeError("x"), ValueError("x")],
)
def test_a_raising_op_is_a_failed_probe_with_the_first_line(error, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", raising(error))
    result = named(probes.run_probes(CPU), "fp8_matmul")
    assert result.ok is False
    assert result.detail == f"{type(error).__name__}: {str(error).splitlines()[0]}"


@pytest.mark.parametrize("error", LACKS_OF_MEMORY)
def test_a_lack_of_memory_says_nothing_and_is_not_remembered(monkeypatch, error):
    """In each probe, wherever it first asks the device: a page opened on a full card would plan all later loads without fp16."""
    first = {probe.name: probe.ok for probe in probes.run_probes(CPU)}
    probes._kept.clear()
    with monkeypatch.context() as patch:
        for owner, name in (
            (torch.Tensor, "to"),
            (torch.Tensor, "__matmul__"),
            (torch, "_scaled_mm"),
            (torch, "_int_mm"),
        ):
            patch.setattr(owner, name, raising(error))
        without = {probe.name: (probe.ok, probe.detail) for probe in probes.run_probes(CPU)}
        assert probes.canary(CPU, "fp32") == (True, "not enough free memory to try")
    asks = set(first) - {"bf16_native", "fp16_accumulation", "int8_kernels"}
    assert {without[name] for name in asks} == {(None, "not enough free memory to try")}
    assert {probe.name: probe.ok for probe in probes.run_probes(CPU)} == first


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("operation", ["convolution", "attention"])
def test_a_wrong_and_finite_operation_is_named_by_the_check_of_a_device(operation, dtype, monkeypatch):
    """On a device that is right in products, and whose result is of half the size."""

    def halved(name, function, shapes):
        wrong = lambda *inputs: function(*inputs) / (2 if inputs[0].dtype != torch.float64 else 1)  # noqa: E731
        return name, wrong if name == operation else function, shapes

    monkeypatch.setattr(probes, "OPERATIONS", tuple(halved(*row) for row in probes.OPERATIONS))
    assert dtype == "fp32" or probes.CHECKS[f"{dtype}_gemm"](CPU)[0]
    assert probes.canary(CPU, dtype) == (False, f"{dtype} {operation} is wrong here: relative error 0.5")


def test_an_operation_that_a_device_lacks_says_nothing_of_it(monkeypatch):
    lacking = tuple((name, raising(NotImplementedError(name)), shapes) for name, _, shapes in probes.OPERATIONS)
    monkeypatch.setattr(probes, "OPERATIONS", lacking)
    assert probes.canary(CPU, "fp16")[0]


def test_fp8_matmul_zeros_are_caught(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **_: torch.zeros(32, 32, dtype=torch.bfloat16))
    ok, detail = probes.CHECKS["fp8_matmul"](CPU)
    assert ok is False and "wrong values" in detail


@pytest.mark.parametrize("wrong", [lambda x: x * 0, lambda x: x.roll(1, 0), lambda x: x.clamp(-(2**15), 2**15 - 1)])
def test_int8_products_with_wrong_values_are_caught(wrong, kitchen, monkeypatch):
    real = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda left, right: wrong(real(left, right)))
    ok, detail = probes.CHECKS["int8_matmul"](CPU)
    assert ok is False and "wrong values" in detail


def test_kernels_of_comfy_kitchen_need_a_torch_built_for_cuda_13(monkeypatch):
    for runtime, ok in (("12.8", False), ("12.9", False), ("13.0", True), (None, None)):
        monkeypatch.setattr(torch.version, "cuda", runtime)
        assert (
            probes.CHECKS["int8_kernels"](torch.device("cuda", 0))[0] is ok
            and probes.CHECKS["int8_kernels"](CPU)[0] is None
        )


def test_int8_products_are_those_of_a_layer(monkeypatch):
    """Its input rotated by 256, a scale for each row of the weight, and a result in the input's dtype."""
    calls, real = [], probes.kitchen_function("int8_linear") or pytest.skip("needs comfy-kitchen")
    monkeypatch.setattr(
        probes,
        "kitchen_function",
        lambda name: lambda *given, **options: calls.append((given, options)) or real(*given, **options),
    )
    assert probes.CHECKS["int8_matmul"](CPU)[0]
    (x, weight, scale), options = calls[0]
    assert (x.dtype, weight.dtype, scale.shape) == (torch.float16, torch.int8, (len(weight), 1))
    assert options == {"out_dtype": torch.float16, "convrot": True, "convrot_groupsize": 256}


def test_operands_of_fp8_are_laid_out_as_cuda_demands(monkeypatch):
    seen, result = [], torch.zeros(32, 32)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *operands, **options: seen.append((*operands, options)) or result)
    probes.CHECKS["fp8_matmul"](CPU)
    ((left, right, options),) = seen
    assert (left.stride(), right.stride(), options["out_dtype"]) == ((32, 1), (1, 32), torch.bfloat16)
    assert options["scale_a"].dtype == options["scale_b"].dtype == torch.float32


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("wrong", [lambda x: x * 0, lambda x: x * 1.05, lambda x: x * float("nan")])
def test_a_gemm_that_gives_zeros_or_garbage_is_caught(name, wrong, monkeypatch):
    real, half = torch.Tensor.__matmul__, getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[name])
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: wrong(real(a, b)) if a.dtype == half else real(a, b))
    ok, detail = probes.CHECKS[f"{name}_gemm"](CPU)
    assert ok is False and "relative error" in detail


def test_a_cast_that_loses_values_or_hides_nan_is_caught(monkeypatch):
    real = probes._round_trip
    for broken, told in (
        (lambda values: values * 0, "changed values"),
        (lambda values: values.nan_to_num(0.0), "turned NaN into 0"),
    ):
        monkeypatch.setattr(probes, "_round_trip", lambda *arguments, broken=broken: broken(real(*arguments)))
        ok, detail = probes.CHECKS["fp8_cast"](CPU)
        assert ok is False and told in detail


@pytest.mark.parametrize("answer", [True, False])
def test_cuda_bf16_is_asked_without_emulation(answer, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: asked.append(options) or answer)
    assert probes.CHECKS["bf16_native"](torch.device("cuda", 0))[0] is answer
    assert asked == [{"including_emulation": False}]


@pytest.mark.parametrize(
    ("onednn", "avx512_bf16", "machine", "expected"),
    [
        (True, True, "x86_64", True), (True, False, "x86_64", False), (False, True, "x86_64", False),
        (True, None, "x86_64", True), (True, False, "aarch64", True),
    ],
)  # fmt: skip
def test_cpu_bf16_needs_the_instructions(onednn, avx512_bf16, machine, expected, monkeypatch):
    operations = types.SimpleNamespace(mkldnn=types.SimpleNamespace(_is_mkldnn_bf16_supported=lambda: onednn))
    monkeypatch.setattr(torch, "ops", operations)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if avx512_bf16 is None:
        monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    else:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16, raising=False)
    assert probes.cpu_bf16() is expected


def as_if_the_flag_acted(left, right):
    value = float("nan") if torch.backends.cuda.matmul.allow_fp16_accumulation else 0.0
    return torch.full((64, 64), value)


@pytest.mark.parametrize("before", [False, True])
def test_the_accumulation_flag_is_seen_to_act_and_put_back(before, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(allow_fp16_accumulation=before))
    monkeypatch.setattr(torch.Tensor, "__matmul__", as_if_the_flag_acted)
    operands = probes._accumulation_operands(CPU)
    assert probes._overflows_in_fp16(*operands)[0] is True
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is before


def test_the_accumulation_probe_multiplies_what_no_card_splits_over_its_inner_dimension(monkeypatch):
    """Of 64 x 4096 x 64 cuBLAS gives 128 multiprocessors a part of the inner dimension each, and no part overflows."""
    asked = []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(
        probes, "_overflows_in_fp16", lambda left, right: asked.append((left.shape, right.shape)) or (True, "")
    )
    monkeypatch.setattr(
        torch,
        "full",
        lambda shape, *given, full=torch.full, **options: full(shape, *given, **options | {"device": "cpu"}),
    )
    assert probes.CHECKS["fp16_accumulation"](torch.device("cuda", 0))[0]
    assert asked == [((1024, 4096), (4096, 1024))]


def test_the_accumulation_probe_turns_nothing_on_while_a_model_holds_it_off(monkeypatch):
    seen, found = [], []
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda *_: seen.append(flags.is_on("fp16_accumulation")) or torch.zeros(1)
    )
    with flags.fp32_accumulation():
        thread = threading.Thread(
            target=lambda: found.extend(probes._overflows_in_fp16(*probes._accumulation_operands(CPU)))
        )
        thread.start()
        thread.join()
    assert True not in seen and found[0] is None and "keeps the flag off" in found[1]


def test_what_a_page_asks_for_is_tried_again_at_a_load(monkeypatch):
    cuda, seen = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(probes, "_accumulation_operands", lambda *_: (torch.zeros(1), torch.zeros(1)))
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda *_: seen.append(flags.is_on("fp16_accumulation")) or torch.zeros(1)
    )
    with probes.flags_left_alone():
        assert probes._once("fp16_accumulation", probes.CHECKS["fp16_accumulation"], cuda).ok is None
    assert not seen
    assert probes._once("fp16_accumulation", probes.CHECKS["fp16_accumulation"], cuda).ok is False and seen == [True]


def test_the_accumulation_flag_means_nothing_on_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert probes.CHECKS["fp16_accumulation"](torch.device("cuda", 0))[0] is None
