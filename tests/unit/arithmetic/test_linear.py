import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.arithmetic.products import can_be_traced
from halfsafe.precision.base.patching import compile_disabled
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measures import relative_error
from support.plain_weights import plain_weights


def safe(module, wide=None):
    calibration = Calibration()
    return operation_on(module, "layer", calibration, wide), calibration


def operation_on(module, name, calibration, wide):
    """An operation of a layer; ``wide``: as on a device that returns fp32 from fp16 operands, or on another."""
    operation = SafeOperation(module, calibration.scale(name), calibration, plain_weights)
    if wide is not None:
        operation._is_wide = lambda x: wide
    return operation


MODULES = {
    "linear": (lambda: torch.nn.Linear(64, 48), (2, 5, 64)),
    "linear without bias": (lambda: torch.nn.Linear(64, 48, bias=False), (3, 64)),
    "conv1d": (lambda: torch.nn.Conv1d(8, 12, 3, padding=1), (2, 8, 16)),
    "conv2d": (lambda: torch.nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4), (2, 8, 9, 9)),
    "conv3d": (lambda: torch.nn.Conv3d(4, 6, 3), (1, 4, 5, 6, 7)),
    "transposed 1d": (lambda: torch.nn.ConvTranspose1d(8, 6, 4, stride=2, padding=1), (2, 8, 9)),
    "transposed 2d": (lambda: torch.nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1), (2, 8, 5, 5)),
    "transposed 3d": (lambda: torch.nn.ConvTranspose3d(4, 6, 2, stride=2), (1, 4, 3, 3, 3)),
}


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 3e4, 1e6, 1e12])
@pytest.mark.parametrize("name", MODULES)
def test_finite_and_close_to_fp32_at_every_magnitude(name, size, wide):
    torch.manual_seed(0)
    build, shape = MODULES[name]
    module = build()
    operation, calibration = safe(module, wide)
    x = torch.randn(shape) * size
    with torch.inference_mode():
        reference = module(x)
        for _ in range(2):
            result = calibration.run(lambda: operation(x))
            assert result.dtype == torch.float32
            assert relative_error(reference, result) < 1e-3


def test_nan_input_is_not_repaired_and_repeats_once_per_call():
    operation, calibration = safe(torch.nn.Linear(8, 8))
    bad = torch.full((2, 8), float("nan"))
    calibration.run(lambda: operation(torch.ones(2, 8)))
    assert calibration.run(lambda: operation(bad)).isnan().all()
    assert calibration.repeats == 1


@pytest.mark.parametrize("size", [1e6, 1e-7])
def test_a_weight_outside_of_fp16_s_range_runs_in_fp32(size):
    module = torch.nn.Linear(8, 8)
    module.weight.data *= size
    operation, calibration = safe(module)
    x = torch.randn(3, 8)
    with torch.inference_mode():
        for _ in range(2):
            assert relative_error(module(x), calibration.run(lambda: operation(x))) < 1e-6
    assert operation.scale.in_fp32


def test_the_input_is_never_written_to():
    operation, calibration = safe(torch.nn.Linear(8, 8), wide=False)
    x = torch.randn(3, 8) * 1e6
    before = x.clone()
    with torch.inference_mode():
        calibration.run(lambda: operation(x))
    assert torch.equal(x, before)


def check_partial_sums(module, x, columns_of):
    """``columns_of``: the scaled operand's numbers (..., 1, inputs, places) that a row of the weight is multiplied by."""
    operation, calibration = safe(module, wide=False)
    with torch.inference_mode():
        calibration.run(lambda: operation(x))
    if not operation.scale.in_fp32:
        scaled = x.double() * 2.0**-operation.scale.exponent
        rows = module.weight.double().flatten(1).unsqueeze(-1)
        partial = (rows * columns_of(scaled).unsqueeze(1)).cumsum(-2)
        assert partial.abs().max() <= 65504 and scaled.abs().max() <= 65504


@given(st.integers(1, 40), st.integers(1, 20), st.floats(1e-3, 1e4), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_no_partial_sum_of_a_scaled_product_passes_fp16(inputs, outputs, size, seed):
    generator = torch.Generator().manual_seed(seed)
    module = torch.nn.Linear(inputs, outputs, bias=False)
    module.weight.data = torch.randn(outputs, inputs, generator=generator) * size
    x = torch.randn(3, inputs, generator=generator) * size
    x[0] = x.abs().max() * module.weight[0].sign()
    check_partial_sums(module, x, lambda scaled: scaled.unsqueeze(-1))


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 3), st.floats(1e-3, 1e4), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_no_partial_sum_of_a_scaled_convolution_passes_fp16(inputs, outputs, kernel, size, seed):
    generator = torch.Generator().manual_seed(seed)
    module = torch.nn.Conv2d(inputs, outputs, kernel, padding=1, bias=False)
    module.weight.data = torch.randn(module.weight.shape, generator=generator) * size
    x = torch.randn(2, inputs, 5, 4, generator=generator) * size
    x[0, :, :kernel, :kernel] = x.abs().max() * module.weight[0].sign()
    check_partial_sums(module, x, lambda scaled: F.unfold(scaled, kernel, padding=1))


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(
    "sizes", [(1e-7, 1e-7), (1e12, 1e-6, 1e12, 1e-6, 1.0), (1.0, 0.0, 1.0), (2e-3, 1e-6, 1e-7, 0.0, 1e-9)]
)
def test_small_inputs_are_not_rounded_to_nothing(wide, sizes):
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 48, bias=False)
    operation, calibration = safe(module, wide)
    for size in sizes:
        x = torch.randn(3, 64) * size
        with torch.inference_mode():
            assert relative_error(module(x), calibration.run(lambda x=x: operation(x))) < 1e-3


@pytest.mark.parametrize("wide", [True, False])
def test_twelve_measurements_need_one_graph_and_give_the_same_as_without_it(wide):
    from torch._dynamo.testing import CompileCounter

    torch.manual_seed(0)
    module, counter = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), CompileCounter()
    calibration = Calibration()
    operations = [operation_on(layer, name, calibration, wide) for name, layer in module.named_children()]
    run = torch.compile(lambda x: operations[1](operations[0](x)), backend=counter)
    x, exponents = torch.randn(4, 64), set()

    def call(size):
        with compile_disabled() if calibration.calibrating else contextlib.nullcontext():
            return run(x * 10.0**size)

    with torch.inference_mode():
        for size in range(0, 36, 3):
            result, repeated = (calibration.run(functools.partial(call, size)) for _ in range(2))
            assert torch.equal(result, repeated) and relative_error(module(x * 10.0**size), result) < 1e-3
            exponents.add(tuple(operation.scale.exponent for operation in operations))
    assert calibration.repeats >= 9 and len(exponents) >= 10, "each size was to be measured"
    assert counter.frame_count == 1
    torch._dynamo.reset()


def sdpa(q, k, v, heads, mask=None, **kwargs):
    sdpa.dtypes.append(q.dtype)
    b, length, width = q.shape
    q, k, v = (t.view(b, -1, heads, width // heads).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).reshape(b, length, width)


def attend(size_qk, size_v=1.0):
    torch.manual_seed(0)
    sdpa.dtypes = []
    calibration = Calibration()
    attention = SafeAttention(calibration)
    q, k, v = torch.randn(2, 7, 32) * size_qk, torch.randn(2, 7, 32) * size_qk, torch.randn(2, 7, 32) * size_v

    def call():
        attention.begin()
        return attention(Kernels(sdpa, sdpa), q, k, v, 4)

    results = [calibration.run(call) for _ in range(2)]
    reference = sdpa(q, k, v, 4)
    return max(relative_error(reference, result) for result in results), sdpa.dtypes[0], results[0].dtype


@pytest.mark.parametrize(
    ("size_qk", "size_v", "dtype"),
    [(1.0, 1.0, torch.float16), (500.0, 1.0, torch.float32), (1e5, 1.0, torch.float32), (1.0, 1e5, torch.float32)],
)
def test_attention_uses_fp16_where_it_is_safe_and_fp32_where_not(size_qk, size_v, dtype):
    error, used, returned = attend(size_qk, size_v)
    assert used == dtype and returned == torch.float32
    assert error < 2e-3


@pytest.mark.parametrize(("fused", "dtype"), [(True, torch.float16), (False, torch.float32)])
def test_unfused_attention_is_judged_by_its_scores_before_they_are_scaled(fused, dtype):
    calibration = Calibration()
    attention = SafeAttention(calibration)
    sdpa.dtypes = []
    q = k = torch.full((1, 3, 64), 25.0)

    def call():
        attention.begin()
        return attention(Kernels(sdpa, sdpa, fused=fused), q, k, torch.ones(1, 3, 64), 1)

    calibration.run(call)
    assert sdpa.dtypes == [dtype]


@pytest.mark.parametrize("size_v", [1e-6, 0.0])
def test_attention_of_tiny_values_is_not_rounded_to_nothing(size_v):
    error, used, _ = attend(1.0, size_v)
    assert error < 2e-3 and used == torch.float32


def test_a_mask_outweighs_every_score():
    calibration = Calibration()
    attention = SafeAttention(calibration)
    sdpa.dtypes = []
    q = torch.full((1, 1, 16), 80.0)
    k = torch.stack([-q[:, 0], q[:, 0]], dim=1)
    v = torch.tensor([1.0, 9.0]).reshape(1, 2, 1).expand(1, 2, 16)
    mask = torch.tensor([[0.0, torch.finfo(torch.float32).min]])

    def call():
        attention.begin()
        return attention(Kernels(sdpa, sdpa), q, k, v, 1, mask=mask)

    assert torch.equal(calibration.run(call), torch.ones(1, 1, 16)), "the hidden token was seen"


def test_a_kernel_of_16_bit_is_given_no_attention_that_runs_in_fp32():
    calibration = Calibration()
    attention, kernel_saw = SafeAttention(calibration), []

    def kernel(q, k, v, heads, **kwargs):
        kernel_saw.append(q.dtype)
        return sdpa(q, k, v, heads)

    def call():
        attention.begin()
        return [
            attention(Kernels(kernel, sdpa), q, q, q, 4) for q in (torch.ones(1, 3, 32), torch.ones(1, 3, 32) * 1e5)
        ]

    sdpa.dtypes = []
    for _ in range(2):
        calibration.run(call)
    assert kernel_saw == [torch.float16] * 2 and sdpa.dtypes == [torch.float16, torch.float32] * 2


class PatchedInPlace:
    """A layer's weights as ComfyUI gives those it prefetched: each time they are asked for, the LoRA is added once more."""

    def __init__(self, weight: torch.Tensor, lora: torch.Tensor):
        self.buffer, self.lora, self.asked = weight.clone(), lora, []

    @contextlib.contextmanager
    def __call__(self, module, x, dtype, bias_dtype=torch.float32):
        self.asked.append(dtype)
        self.buffer += self.lora
        yield self.buffer.to(dtype), None


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_a_calibrating_call_asks_for_its_weight_once(size):
    """1e6: the layer turns out to need fp32."""
    weights = PatchedInPlace(torch.eye(16), torch.full((16, 16), size))
    calibration, x = Calibration(), torch.randn(4, 16)
    operation = SafeOperation(torch.nn.Linear(16, 16, bias=False), calibration.scale("layer"), calibration, weights)
    with torch.inference_mode():
        result = calibration.run(lambda: operation(x))
        assert relative_error(x @ (torch.eye(16) + size), result) < 1e-3
    assert operation.scale.in_fp32 == (size > 65504)
    assert len(weights.asked) == 1


@pytest.mark.parametrize("trained", ["input", "weight", "bias"])
def test_a_gradient_goes_through_where_torch_has_none_for_fp32_results(trained):
    """On the meta device ``mm(out_dtype=)`` refuses as it does on CUDA: derivative for aten::mm is not implemented."""
    if not can_be_traced():
        pytest.skip("this torch has no mm(out_dtype=) on the meta device")
    module = torch.nn.Linear(64, 48, device="meta").requires_grad_(False)
    calibration = Calibration()
    operation = operation_on(module, "layer", calibration, wide=True)
    calibration.calibrating, operation.scale.gain = False, 1.0
    x = torch.zeros(3, 64, device="meta")
    of = (x if trained == "input" else getattr(module, trained)).requires_grad_()
    result = operation(x)
    result.sum().backward()
    assert of.grad.shape
    assert result.dtype == torch.float32
