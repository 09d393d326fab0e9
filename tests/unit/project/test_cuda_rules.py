"""The rule book itself: each rule raises CUDA's exception, and what CUDA takes passes."""

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.proofs import NOTHING, AmaxBuffer
from support.cuda_rules import CudaRules, HostReads
from support.fake_tensors import fake_cuda_tensors
from support.summing import started_with

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(())
MATMUL = torch.backends.cuda.matmul


@pytest.fixture(params=[False, True], ids=["no_grad", "inference_mode"], autouse=True)
def mode(request):
    """torch hands composite operations to a mode whole in inference mode only."""
    with torch.inference_mode() if request.param else torch.no_grad():
        yield


@pytest.fixture
def no_split_k():
    if not hasattr(MATMUL, "allow_fp16_reduced_precision_reduction_split_k"):
        pytest.skip("this torch has no such flag")
    before = MATMUL.allow_fp16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction_split_k
    MATMUL.allow_fp16_reduced_precision_reduction = (False, False)
    yield
    MATMUL.allow_fp16_reduced_precision_reduction = before


def half(*shape):
    return torch.ones(shape, dtype=torch.float16)


def fp8(*shape, dtype=E4M3):
    return torch.ones(shape).to(dtype)


def scaled(a, b, bias=None, out=torch.bfloat16):
    return torch._scaled_mm(a, b.t(), ONE, ONE, bias=bias, out_dtype=out)


def scaled_v2(a, b, bias=None, out=torch.bfloat16):
    recipe = F.ScalingType.TensorWise
    return F.scaled_mm(a, b.t(), ONE, recipe, ONE, recipe, bias=bias, output_dtype=out)


SCALED = [scaled, *([scaled_v2] if hasattr(F, "scaled_mm") else [])]
FP8_PRODUCTS = {
    "mm": lambda: torch.mm(fp8(4, 16), fp8(16, 4)),
    "linear": lambda: F.linear(fp8(2, 4, 16), fp8(8, 16)),
    "bmm": lambda: torch.bmm(fp8(2, 4, 16), fp8(2, 16, 4)),
    "addmm": lambda: torch.addmm(fp8(4), fp8(4, 16), fp8(16, 4)),
}


@pytest.mark.parametrize("product", FP8_PRODUCTS)
def test_a_plain_product_of_fp8_raises(product):
    with CudaRules(), pytest.raises(NotImplementedError, match="not implemented for 'Float8_e4m3fn'"):
        FP8_PRODUCTS[product]()


@pytest.mark.parametrize("multiply", SCALED)
def test_e5m2_times_e5m2_raises_and_each_with_e4m3_does_not(multiply):
    with CudaRules():
        with pytest.raises(ValueError, match="Multiplication of two Float8_e5m2 matrices is not supported"):
            multiply(fp8(16, 32, dtype=E5M2), fp8(16, 32, dtype=E5M2))
        for left, right in ((E4M3, E5M2), (E5M2, E4M3), (E4M3, E4M3)):
            assert (multiply(fp8(16, 32, dtype=left), fp8(16, 32, dtype=right)) == 32).all()


def test_fp8_sizes_that_are_no_multiple_of_16_raise():
    for multiply, shapes in zip(SCALED, [((16, 24), (16, 24)), ((16, 32), (24, 32))], strict=False):
        with CudaRules(), pytest.raises(ValueError, match="divisible by 16"):
            multiply(*(fp8(*shape) for shape in shapes))


@pytest.mark.parametrize(("rows", "inner", "columns"), [(16, 16, 16), (32, 12, 16), (32, 16, 12)])
def test_sizes_that_int8_products_refuse_raise(rows, inner, columns):
    def multiply(m, k, n):
        return torch._int_mm(torch.ones(m, k, dtype=torch.int8), torch.ones(n, k, dtype=torch.int8).t())

    with CudaRules():
        assert (multiply(17, 16, 8) == 16).all()
        with pytest.raises(RuntimeError, match="self.size|mat2.size"):
            multiply(rows, inner, columns)


def test_an_int8_product_whose_right_operand_is_row_major_raises():
    codes = torch.ones(32, 32, dtype=torch.int8)
    with CudaRules():
        assert (torch._int_mm(codes, codes.t()) == 32).all()
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"):
            torch._int_mm(codes, codes)


HALF_PRODUCTS = {
    "mm": lambda: torch.mm(half(4, 16), half(16, 4)),
    "wide": lambda: torch.mm(half(4, 16), half(16, 4), out_dtype=torch.float32),
    "linear": lambda: F.linear(half(2, 4, 16), half(8, 16)),
    "bmm": lambda: torch.bmm(half(2, 4, 16), half(2, 16, 4)),
}


@pytest.mark.parametrize("product", HALF_PRODUCTS)
def test_half_products_without_split_k_raise(no_split_k, product):
    with CudaRules(), pytest.raises(RuntimeError, match="requires the cuBLASLt backend"):
        HALF_PRODUCTS[product]()


def test_a_bias_takes_a_half_product_to_cublaslt(no_split_k):
    with CudaRules():
        assert (F.linear(half(2, 4, 16), half(8, 16), half(8)) == 17).all()
        assert (F.linear(torch.ones(4, 16), torch.ones(8, 16)) == 16).all(), "fp32 has no such rule"
        assert (F.linear(half(4, 16).bfloat16(), half(8, 16).bfloat16()) == 16).all(), "bf16 has a flag of its own"


def test_a_wide_product_while_sums_are_in_fp16_raises():
    with started_with(["fp16_accumulation"], True), CudaRules():
        assert HALF_PRODUCTS["mm"]().dtype == torch.float16
        with pytest.raises(RuntimeError, match="not supported with allowFP16AccumulationCuBLAS"):
            HALF_PRODUCTS["wide"]()


def test_the_rules_hold_for_fake_cuda_tensors_and_two_devices_raise():
    with fake_cuda_tensors(), CudaRules():
        left = torch.empty(4, 16, device="cuda", dtype=torch.float16)
        assert torch.mm(left, left.t(), out_dtype=torch.float32).dtype == torch.float32
        with pytest.raises(NotImplementedError):
            torch.mm(left.to(E4M3), left.t().to(E4M3))
        with pytest.raises(RuntimeError, match="two different devices|at least two devices"):
            torch.mm(left, torch.empty(16, 4, dtype=torch.float16))


@pytest.fixture
def buffer():
    return AmaxBuffer(1, torch.device("cpu"))


def test_a_read_by_the_pack_raises_outside_of_the_allowed_places(buffer):
    with HostReads(frozenset()), pytest.raises(RuntimeError, match="synchronizing CUDA operation: tolist in arithmetic/proofs.read"):
        buffer.read()
    with HostReads(frozenset({"arithmetic/proofs.read"})) as reads:
        assert buffer.read() == [NOTHING]
    assert reads.places == ["arithmetic/proofs.read"]
