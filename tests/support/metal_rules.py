"""What Metal refuses and a CPU does not, raised on a CPU with torch's own words for it (torch 2.8 to 2.14).

``refuse`` is the rule book of the emulated Mac (``second_device``); ``MetalRules`` holds CPU tensors, and fake ones of device
``mps``, to the rule of operations that write to a tensor they are given. Of kernels that are missing for one dtype it knows fp8's.
"""

from __future__ import annotations

import math

import torch
from support.leaf_operations import LeafOperations, aten, overloads

BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "copysign",
    "hypot",
    "remainder",
    "fmod",
    "pow",
)
NO_KERNEL = "Failed to create function state object for: {}_dense_{}_{}"
SHORT = {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}
FP8 = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, getattr(torch, "float8_e8m0fnu", None),
)  # fmt: skip
MISSING = overloads(dict.fromkeys(
    ["_int_mm.default", "_scaled_mm.default", "_scaled_mm_v2.default", "mm.dtype", "addmm.dtype", "bmm.dtype", "baddbmm.dtype"]
))  # fmt: skip
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
MEMORY = (
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten._to_copy.default, aten.copy_.default, aten.clone.default,
)  # fmt: skip
"""empty_mps and empty_strided_mps, aten/src/ATen/mps/EmptyTensor.cpp, take every dtype but float64."""
EXTREMES = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)


def binary_with_another_result(name: str, out: torch.Tensor, a: torch.Tensor, b) -> None:
    """exec_binary_kernel, aten/src/ATen/native/mps/OperationUtils.mm: kernels exist for operands and results of one dtype, and
    TensorIterator converts a result on a CPU only (PyTorch #152515, #178709)."""
    common = torch.result_type(*(getattr(operand, "raw", operand) for operand in (a, b)))  # raw: of held_tensors
    if out.dtype != common:
        raise RuntimeError(NO_KERNEL.format(name, *(SHORT.get(dtype, str(dtype)) for dtype in (out.dtype, common))))


def float64(dtype: torch.dtype) -> None:
    """empty_mps and empty_strided_mps, aten/src/ATen/mps/EmptyTensor.cpp."""
    if dtype == torch.float64:
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 instead."
        )


def fp8(dtype: torch.dtype) -> None:
    """getMPSDataType, aten/src/ATen/native/mps/OperationUtils.mm; e4m3fn from torch 2.15 (PyTorch #194074). Met in ComfyUI #9263, in a
    layer's forward: memory of fp8, views of it and copies that cast nothing are fine."""
    if dtype in FP8:
        raise TypeError(
            f"Trying to convert {_name(dtype)} to the MPS backend but it does not have support for that dtype."
        )


def copies_of_fp8(source: torch.Tensor, dtype: torch.dtype) -> None:
    """mps_copy_, aten/src/ATen/native/mps/operations/Copy.mm: a tensor of the CPU is cast there, before it is moved (copy_to_mps_);
    one of the device is cast there (copy_cast_mps). Between equal dtypes bytes are moved (copy_blit_mps, copy_to_mps_stride_contig)
    if the source is contiguous, and else gathered by a kernel of its dtype (gatherViewTensor, native/mps/operations/View.mm)."""
    if not is_there(source):
        return
    if source.dtype != dtype:
        fp8(source.dtype)
        fp8(dtype)
    elif dtype in FP8 and not source.is_contiguous():
        raise RuntimeError(f"Undefined type {_name(dtype)}")


def linear_with_fp8(a: torch.Tensor) -> None:
    """_mps_linear, aten/src/ATen/native/mps/operations/Linear.mm; mm_out_mps_impl has the same of products."""
    if a.dtype in FP8:
        raise RuntimeError("MPS device does not support linear for non-float weights")


def index_of_bytes(index: torch.Tensor) -> None:
    """index_select_out_mps, aten/src/ATen/native/mps/operations/Indexing.mm."""
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")


def is_there(tensor: torch.Tensor) -> bool:
    """True for a tensor of the emulated device, and for a fake one of ``mps``."""
    return hasattr(tensor, "raw") or tensor.device.type == "mps"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").capitalize()


def missing_operator(func) -> None:
    """aten/src/ATen/mps/MPSFallback.mm; ``_scaled_mm`` and ``_int_mm`` are there from torch 2.15 (PyTorch #194074, #193153)."""
    if func in MISSING:
        raise NotImplementedError(f"The operator '{func.name()}' is not currently implemented for the MPS device.")


def products_of_whole_numbers(a: torch.Tensor) -> None:
    """mm_out_mps_impl, aten/src/ATen/native/mps/operations/LinearAlgebra.mm."""
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        raise RuntimeError("MPS device does not support mm for non-float inputs")


def extremes_of_int64(func, x: torch.Tensor) -> None:
    """PyTorch #187976: the largest int64 of a tensor can come out as 0. Silent there, an error here."""
    if x.dtype == torch.int64 and x.numel() > 1:
        raise RuntimeError(f"{func.name()} of int64 can be wrong on MPS (PyTorch #187976)")


def refuse(func, args, kwargs) -> None:
    """Raise what torch raises on an Apple GPU, before the operation runs."""
    missing_operator(func)
    _written(func, args, kwargs)
    if func in PRODUCTS:
        products_of_whole_numbers(args[0 if func in (aten.mm.default, aten.bmm.default) else 1])
    if func in EXTREMES:
        extremes_of_int64(func, args[0])
    if func is aten.index_select.default:
        index_of_bytes(args[2])
    if func is aten._to_copy.default:
        copies_of_fp8(args[0], kwargs.get("dtype") or args[0].dtype)
    if func is aten.copy_.default:
        copies_of_fp8(args[1], args[0].dtype)
    if func is aten.clone.default:
        copies_of_fp8(args[0], args[0].dtype)
    if func is aten.linear.default:
        linear_with_fp8(args[1])


def refuse_dtype(func, dtype: torch.dtype) -> None:
    """Raise for a dtype of an operand or result; memory of fp8 alone, and views of it, are fine. Copies: :func:`copies_of_fp8`."""
    float64(dtype)
    if not func.is_view and func not in MEMORY:
        fp8(dtype)


def norm_without_nan(x, order=2, *rest, **options):
    """The infinity norm of torch's Metal kernel, whose ``max`` gives the operand that is a number (as PyTorch #143976)."""
    x = torch.where(x.isnan(), 0, x) if order == math.inf else x
    return aten.linalg_vector_norm.default(x, order, *rest, **options)


ANSWERS = {aten.linalg_vector_norm.default: norm_without_nan}


def _written(func, args, kwargs) -> None:
    name = func.name().split("::")[1].split(".")[0]
    written = kwargs.get("out", args[0] if name.endswith("_") else None)
    if name.rstrip("_") in BINARY and written is not None:
        binary_with_another_result(name.rstrip("_"), written, *args[:2])


class MetalRules(LeafOperations):
    """Raises what torch raises on an Apple GPU for a result in another dtype, before the operation runs."""

    def leaf(self, func, args, kwargs):
        _written(func, args, kwargs)
        return func(*args, **kwargs)
