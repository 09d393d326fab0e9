"""What CUDA refuses and a CPU does not, raised on a CPU with CUDA's own exceptions and words (torch 2.11).

Sees every product of this thread: its operands' dtypes, sizes and layouts, and the precision flags at that moment; a CPU's
tensors count as CUDA's. ``mm(out_dtype)`` and ``scaled_mm``, which a CPU does not have, are computed there in fp32, so that
the ways of a CUDA device can be gone. ``HostReads`` sees each read of a tensor by the host.
Does not see: products inside of custom operators, kernels for one architecture only, two devices in one operation (CPU
tensors have one; fake CUDA tensors refuse it by themselves) and how a result is rounded.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

import torch
from support.leaf_operations import FakeTensor, LeafOperations, aten, overloads
from torch._ops import OpOverload

ROOT = Path(__file__).absolute().parents[2]
SUPPORT = str(Path(__file__).absolute().parent)
PACKS = f"{SUPPORT}/custom_nodes/"
COMPILER = f"{torch.__path__[0]}/_dynamo/"
OURS = tuple(str(ROOT / folder) for folder in ("precision", "nodes"))
AMAX = str(ROOT / "precision" / "base" / "amax.py")
KITCHENS_INT8 = "comfy_kitchen/backends/eager/quantization.py"
HALF = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SPLIT_K = "torch.backends.cuda.matmul.allow_{}_reduced_precision_reduction(..., allow_splitk=False) requires the cuBLASLt backend"
NO_WIDE = "gemm input type at::Half and output type float is not supported with allowFP16AccumulationCuBLAS"
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def products_of_fp8(kernel: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """AT_DISPATCH of addmm_out_cuda_impl and bmm_out_cuda_impl, aten/src/ATen/native/cuda/Blas.cpp: no fp8 kernel."""
    for operand in (a, b):
        if operand.dtype in FP8:
            name = str(operand.dtype).removeprefix("torch.").capitalize()
            raise NotImplementedError(f"\"{kernel}\" not implemented for '{name}'")


def products_of_two_dtypes(a: torch.Tensor, b: torch.Tensor) -> None:
    """TORCH_CHECK of addmm_out_cuda_impl, aten/src/ATen/native/cuda/Blas.cpp."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {a.dtype} != {b.dtype}")


def half_products_without_split_k(a: torch.Tensor) -> None:
    """gemm_internal_cublas_half_helper and its bf16 twin, aten/src/ATen/cuda/CUDABlas.cpp."""
    if a.dtype not in HALF or torch._C._get_blas_preferred_backend() == torch._C._BlasBackend.Cublaslt:
        return
    state = getattr(torch._C, f"_get_cublas_allow_{SHORT[a.dtype]}_reduced_precision_reduction")()
    if state == (False, False):
        raise RuntimeError(SPLIT_K.format(SHORT[a.dtype]))


def wide_products_of_fp16_sums(a: torch.Tensor, out_dtype: torch.dtype) -> None:
    """gemm_internal_cublas_half_helper, aten/src/ATen/cuda/CUDABlas.cpp; _mm_dtype_out_cuda in native/cuda/Blas.cpp."""
    if out_dtype != a.dtype and not (out_dtype == torch.float32 and a.dtype in HALF):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    if a.dtype == torch.float16 and out_dtype == torch.float32 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        raise RuntimeError(NO_WIDE)


def _mm(a, b, name="addmm_cuda") -> None:
    products_of_fp8(name, a, b)
    products_of_two_dtypes(a, b)
    half_products_without_split_k(a)


def _mm_wide(a, b, out_dtype) -> None:
    _mm(a, b)
    wide_products_of_fp16_sums(a, out_dtype)


def _addmm(bias, a, b, *, beta=1, alpha=1) -> None:
    """A product with a vector as bias goes to cuBLASLt, isInputCompliesAddmmCudaLt in native/cuda/Blas.cpp."""
    products_of_fp8("addmm_cuda", a, b)
    products_of_two_dtypes(a, b)
    if not (bias.dim() == 1 and bias.is_contiguous() and beta == 1 and min(b.shape) > 1):
        half_products_without_split_k(a)


def _addmm_wide(total, a, b, out_dtype, *, beta=1, alpha=1, out=None) -> None:
    """_addmm_dtype_out_cuda, aten/src/ATen/native/cuda/Blas.cpp."""
    _addmm(total, a, b, beta=beta, alpha=alpha)
    wide_products_of_fp16_sums(a, out_dtype)
    if total.dtype not in (out_dtype, a.dtype):
        raise RuntimeError("self dtype must match either out_dtype or mat1 dtype")


def _bmm(a, b) -> None:
    _mm(a, b, "baddbmm_cuda")


def _bmm_wide(a, b, out_dtype) -> None:
    _bmm(a, b)
    wide_products_of_fp16_sums(a, out_dtype)


def _int_mm(a, b) -> None:
    """_int_mm_out_cuda, aten/src/ATen/native/cuda/Blas.cpp. The right operand may be row-major or column-major: both ran on an H200
    under CUDA 13.0 (benchmarks/results/gpu_h200.json)."""
    if a.device.type == "cpu" and _is_comfy_kitchens():
        return
    if a.shape[0] <= 16:
        raise RuntimeError(f"self.size(0) needs to be greater than 16, but got {a.shape[0]}")
    for name, size in (("self", a.shape[1]), ("mat2", b.shape[1])):
        if size == 0 or size % 8:
            raise RuntimeError(f"{name}.size(1) needs to be greater than 0 and a multiple of 8, but got {size}")


def _is_comfy_kitchens() -> bool:
    """Whether the product is of comfy-kitchen's eager backend, which pads the sizes of CUDA tensors alone to what CUDA takes
    (``_int8_matmul_accumulate`` in ``comfy_kitchen/backends/eager/quantization.py``)."""
    frame = sys._getframe(1)
    while frame and KITCHENS_INT8 not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def _scaled(a, b, bias, out_dtype) -> None:
    """_scaled_mm_out_cuda, aten/src/ATen/native/cuda/ScaledBlas.cpp; the layouts as torch/_meta_registrations.py has them."""
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
    if a.stride(1) != 1 or a.stride(0) <= 1:
        raise RuntimeError(f"self must be row_major, got stride {tuple(a.stride())}")
    if b.stride(0) != 1 or b.stride(1) <= 1:
        raise RuntimeError(f"mat2 must be col_major, got stride {tuple(b.stride())}")
    if a.shape[1] % 16:
        raise ValueError(
            f"Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: {tuple(a.shape)}"
        )
    if b.shape[0] % 16 or b.shape[1] % 16:
        raise ValueError(f"mat2 shape ({b.shape[0]}x{b.shape[1]}) must be divisible by 16")
    if bias is not None:
        _bias_of_scaled(bias, out_dtype or a.dtype)


def _bias_of_scaled(bias, out_dtype) -> None:
    if out_dtype == torch.float32:
        raise ValueError("Bias is not supported when out_dtype is set to Float32")
    if bias.dtype not in HALF or (out_dtype in HALF and bias.dtype != out_dtype):
        raise ValueError(f"Bias must be BFloat16 or Half, as the result, but got {bias.dtype} for {out_dtype}")


def _scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False) -> None:
    _scaled(a, b, bias, out_dtype)


def _scaled_mm_v2(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, *rest) -> None:
    _scaled(a, b, bias, out_dtype)


RULES = overloads({
    "mm.default": _mm,
    "mm.dtype": _mm_wide,
    "addmm.default": _addmm,
    "addmm_.default": _addmm,
    "addmm.dtype_out": _addmm_wide,
    "bmm.default": _bmm,
    "bmm.dtype": _bmm_wide,
    "_int_mm.default": _int_mm,
    "_scaled_mm.default": _scaled_mm,
    "_scaled_mm_v2.default": _scaled_mm_v2,
})  # fmt: skip


def _wide_on_a_cpu(a, b, out_dtype):
    return torch.matmul(a.to(out_dtype), b.to(out_dtype))


def _scaled_on_a_cpu(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, *rest):
    return torch._scaled_mm(a, b, scale_a[0], scale_b[0], bias, None, out_dtype)


def _wide_sum_on_a_cpu(total, a, b, out_dtype, *, beta=1, alpha=1, out):
    return torch.addmm(total, a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha, out=out)


ON_A_CPU = overloads({
    "addmm.dtype_out": _wide_sum_on_a_cpu,
    "mm.dtype": _wide_on_a_cpu,
    "bmm.dtype": _wide_on_a_cpu,
    "_scaled_mm_v2.default": _scaled_on_a_cpu,
})  # fmt: skip

WITHOUT_META = {aten.addmm.dtype_out}
"""torch knows no shape of these (PyTorch #163880)."""


class CudaRules(LeafOperations):
    """Raises what CUDA raises, before the operation runs."""

    def leaf(self, func, args, kwargs):
        if func in RULES:
            RULES[func](*args, **kwargs)
        if func in ON_A_CPU and (args[0].device.type == "cpu" or func in WITHOUT_META):
            return ON_A_CPU[func](*args, **kwargs)
        return func(*args, **kwargs)


_of_this_thread = threading.local()


@contextlib.contextmanager
def rules_in_kernels() -> Iterator[None]:
    """Hold the products of this thread to the rules by the kernels of `with_rules`: a mode doubles the time of a small model, as each operation goes through it."""
    before = getattr(_of_this_thread, "ruled", False)
    _of_this_thread.ruled = True
    try:
        yield
    finally:
        _of_this_thread.ruled = before


def with_rules(operation: OpOverload, kernel: Callable | None) -> Callable:
    """A CPU kernel of an operation that holds it to its rule inside of `rules_in_kernels`; ``kernel``: the one outside, None where torch has none."""
    rule, stand_in = RULES[operation], ON_A_CPU.get(operation, kernel)

    def run(*args, **kwargs):
        if getattr(_of_this_thread, "ruled", False):
            rule(*args, **kwargs)
            return stand_in(*args, **kwargs)
        if kernel is None:
            raise NotImplementedError(f"Could not run 'aten::{operation}' with arguments from the 'CPU' backend.")
        return kernel(*args, **kwargs)

    return run


METHODS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "equal",
    "unique",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
)
FUNCTIONS = ("equal", "allclose", "nonzero", "unique", "is_nonzero")
WAITING = [(torch.Tensor, name) for name in METHODS] + [(torch, name) for name in FUNCTIONS]
WAITING.append((FakeTensor, "tolist"))


class HostReads:
    """Lists where the pack makes the host wait for the device, and refuses it outside of ``allowed`` places.

    A place is ``room/module.function`` of the pack's line that reads, and ``allowed`` may name a module whole. ComfyUI's own reads
    are not the pack's, nor are those of torch's compiler.

    Raises:
        RuntimeError: as ``torch.cuda.set_sync_debug_mode("error")`` does.
    """

    def __init__(self, allowed: frozenset[str] | None = None):
        self.allowed = allowed
        self.places: list[str] = []

    def __enter__(self) -> HostReads:
        self._before = [(owner, name, vars(owner).get(name)) for owner, name in WAITING]
        for owner, name in WAITING:
            setattr(owner, name, self._watched(getattr(owner, name)))
        return self

    def __exit__(self, *error) -> None:
        for owner, name, own in self._before:
            delattr(owner, name) if own is None else setattr(owner, name, own)

    def _watched(self, read: Callable) -> Callable:
        @functools.wraps(read)
        def call(*args, **kwargs):
            self.note(read.__name__)
            return read(*args, **kwargs)

        return call

    def note(self, what: str) -> None:
        """One read, by whoever it was."""
        if place := reader():
            self.places.append(place)
            if self.allowed is not None and not {place, place.split(".")[0]} & self.allowed:
                raise RuntimeError(f"called a synchronizing CUDA operation: {what} in {place}")


def reader() -> str:
    """``room/module.function`` of the pack that asked for what torch is about to do; "" where it is somebody else."""
    frame = sys._getframe(1)
    while frame and _passes_on(frame.f_code):
        if frame.f_code.co_filename.startswith((COMPILER, PACKS)):
            return ""
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(OURS):
        return ""
    return f"{_module(frame.f_code.co_filename)}.{frame.f_code.co_name}"


@functools.cache
def _module(file: str) -> str:
    path = Path(file)
    return f"{path.parent.name}/{path.stem}"


@functools.cache
def _passes_on(code: CodeType) -> bool:
    """Whether a frame is torch's, a mode's or of these modules, or ``amax_value``, whose caller reads, or a comprehension, which is a frame up to Python 3.11."""
    if code.co_filename == AMAX:
        return code.co_name in ("amax_value", "_fp8_amax")
    return code.co_filename.startswith((torch.__path__[0], SUPPORT)) or code.co_name.startswith(("<", "__torch_"))
