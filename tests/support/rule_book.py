"""The rule book of each kind of emulated device: what it refuses, before an operation runs, and what it answers otherwise than a CPU.

CUDA's rules are in ``cuda_rules``, Metal's in ``metal_rules``; XPU's and DirectML's are few and here. Each rule names its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from support import cuda_rules, metal_rules
from support.leaf_operations import aten

MOVES = {
    aten._to_copy.default, aten.copy_.default, aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.clone.default, aten.detach.default, aten.alias.default,
}  # fmt: skip


@dataclass(frozen=True)
class RuleBook:
    """``operation(func, args, kwargs)`` and ``dtype(func, dtype)``, of each operand and the result asked for, raise; ``answers`` compute."""

    operation: Callable = lambda func, args, kwargs: None
    dtype: Callable = lambda func, dtype: None
    answers: dict = field(default_factory=dict)


def _cuda(func, args, kwargs) -> None:
    if func in cuda_rules.RULES:
        cuda_rules.RULES[func](*args, **kwargs)


def _xpu(func, args, kwargs) -> None:
    """mm_out and addmm_out, aten/src/ATen/native/mkldnn/xpu/Blas.cpp. A wide result has a kernel on CUDA alone: the table that torch
    2.11 prints for ``aten::mm.dtype``. ``_scaled_mm``: intel/torch-xpu-ops #1550, mended by PyTorch #166056."""
    if func in (aten.mm.default, aten.bmm.default):
        cuda_rules.products_of_two_dtypes(*args[:2])
    if func is aten.addmm.default:
        cuda_rules.products_of_two_dtypes(*args[1:3])
    if func in metal_rules.MISSING and func is not aten._int_mm.default:
        raise NotImplementedError(f"The operator '{func.name()}' is not currently implemented for the XPU device.")


def _xpu_dtype(func, dtype: torch.dtype) -> None:
    """intel/torch-xpu-ops #1742: Arc A-series have no float64; tensors of it can be moved, not computed with."""
    if dtype == torch.float64 and func not in MOVES and not func.is_view:
        raise RuntimeError("Required aspect fp64 is not supported on the device")


def _directml(func, args, kwargs) -> None:
    """An assumption. The last torch-directml, 0.2.5.dev240914, is built for torch 2.4.1 (its metadata on PyPI; microsoft/DirectML #712), whose
    ``_int_mm`` and ``_scaled_mm`` are CUDA's and the CPU's. What it lacks it runs on the CPU with a warning (dml_cpu_fallback.cpp, #372) or
    refuses (``_foreach_add.List``, #604); which of the two it does with these is not known."""
    if func in metal_rules.MISSING:
        raise NotImplementedError(f"Could not run '{func.name()}' with arguments from the 'DML' backend.")


def _directml_dtype(func, dtype: torch.dtype) -> None:
    """microsoft/DirectML #688: the message, and that DML_TENSOR_DATA_TYPE has no bfloat16; it names no fp8 either, whose message is assumed.
    #309: no float64 but to cast and to move; #430, #438, #699: the message, on Intel's devices. ComfyUI agrees: ``should_use_bf16``,
    ``supports_cast`` and ``supports_fp64`` in comfy/model_management.py of 0.30.0."""
    if dtype == torch.float64:
        raise RuntimeError("The GPU device does not support Double (Float64) operations!")
    if dtype == torch.bfloat16 or dtype in metal_rules.FP8:
        raise RuntimeError(f"Invalid or unsupported data type {str(dtype).removeprefix('torch.').capitalize()}.")


BOOKS = {
    "cuda": RuleBook(_cuda, answers=cuda_rules.ON_A_CPU),
    "mps": RuleBook(metal_rules.refuse, metal_rules.refuse_dtype, metal_rules.ANSWERS),
    "xpu": RuleBook(_xpu, _xpu_dtype),
    "privateuseone": RuleBook(_directml, _directml_dtype),
}
