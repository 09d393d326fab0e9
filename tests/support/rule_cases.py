"""What CUDA refuses, and what it takes beside that, as operations that any device can be asked for.

`tests/unit/project/test_cuda_rules.py` holds the rule book to them on a CPU. `answered_otherwise` runs them on a device without the rule
book (`benchmarks/gpu.py`): a rule that was read and never run can be wrong, as one on the layout of int8 operands was.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from support.cuda_rules import NO_WIDE, WAITING

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF, WIDE = torch.float16, torch.float32
MATMUL = torch.backends.cuda.matmul
SPLIT_K = "allow_fp16_reduced_precision_reduction"
NO_FP8 = "not implemented for 'Float8_e4m3fn'"
NO_SPLIT_K = "requires the cuBLASLt backend"
MODES = ("default", "warn", "error")


@dataclass(frozen=True)
class Refused:
    """``run`` raises ``error`` on a CUDA device, in a text that has ``words``."""

    run: Callable[[torch.device], object]
    words: str
    error: type[Exception] = RuntimeError


def ones(device: torch.device, *shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, device=device).to(dtype)


def _mm(device, left=HALF, right=None, **options):
    return torch.mm(ones(device, 16, 32, dtype=left), ones(device, 32, 16, dtype=right or left), **options)


def _bmm(device, left=HALF, right=None, **options):
    return torch.bmm(ones(device, 2, 16, 32, dtype=left), ones(device, 2, 32, 16, dtype=right or left), **options)


def _linear(device, left=HALF, right=None, bias=False):
    return F.linear(
        ones(device, 2, 16, 32, dtype=left),
        ones(device, 16, 32, dtype=right or left),
        ones(device, 16, dtype=left) if bias else None,
    )


def _addmm(device, dtype=HALF):
    return torch.addmm(
        ones(device, 16, 16, dtype=dtype), ones(device, 16, 32, dtype=dtype), ones(device, 32, 16, dtype=dtype)
    )


def _addmm_in_place(device):
    return ones(device, 16, 16).addmm_(ones(device, 16, 32), ones(device, 32, 16))


def _addmm_wide(device, total=WIDE):
    operands = ones(device, 16, 16, dtype=total), ones(device, 16, 32), ones(device, 32, 16)
    return torch.ops.aten.addmm.dtype_out(*operands, WIDE, out=ones(device, 16, 16, dtype=WIDE))


def _int_mm(device, rows=32, inner=32, columns=32, row_major=False):
    right = (
        ones(device, inner, columns, dtype=torch.int8)
        if row_major
        else ones(device, columns, inner, dtype=torch.int8).t()
    )
    return torch._int_mm(ones(device, rows, inner, dtype=torch.int8), right)


def _scaled(device, left=E4M3, right=E4M3, inner=32, columns=16, turned="", bias=None, out=torch.bfloat16, newer=False):
    """A product of fp8; ``turned``: the operand, left or right, in the layout that CUDA does not take."""
    a, b, one = (
        ones(device, 16, inner, dtype=left),
        ones(device, columns, inner, dtype=right).t(),
        torch.ones((), device=device),
    )
    a, b = a.t().contiguous().t() if turned == "left" else a, b.contiguous() if turned == "right" else b
    bias = None if bias is None else ones(device, columns, dtype=bias)
    if newer:
        tensorwise = F.ScalingType.TensorWise
        return F.scaled_mm(a, b, one, tensorwise, one, tensorwise, bias=bias, output_dtype=out)
    return torch._scaled_mm(a, b, one, one, bias=bias, out_dtype=out)


def _two_devices(device):
    return torch.mm(ones(device, 16, 32), ones(torch.device("cpu"), 32, 16))


@contextlib.contextmanager
def _set(name: str, value: object) -> Iterator[None]:
    before = getattr(MATMUL, name), getattr(MATMUL, f"{name}_split_k", None)
    setattr(MATMUL, name, value)
    try:
        yield
    finally:
        setattr(MATMUL, name, before[0] if before[1] is None else before)


def _without_split_k(run: Callable, device: torch.device, **options) -> object:
    with _set(SPLIT_K, (False, False)):
        return run(device, **options)


def _summing_in_fp16(run: Callable, device: torch.device, **options) -> object:
    with _set("allow_fp16_accumulation", True):
        return run(device, **options)


def _of_fp8(newer: bool) -> dict[str, Refused]:
    multiply = partial(_scaled, newer=newer)
    return {
        "e5m2 by e5m2": Refused(
            partial(multiply, left=E5M2, right=E5M2), "Multiplication of two Float8_e5m2 matrices", ValueError
        ),
        "left operand column-major": Refused(partial(multiply, turned="left"), "must be row_major"),
        "right operand row-major": Refused(partial(multiply, turned="right"), "must be col_major"),
        "24 inputs": Refused(partial(multiply, inner=24), "divisible by 16", ValueError),
        "24 outputs": Refused(partial(multiply, columns=24), "divisible by 16", ValueError),
        "bias of an fp32 result": Refused(
            partial(multiply, bias=torch.bfloat16, out=WIDE), "Bias is not supported when out_dtype", ValueError
        ),
        "bias in another dtype": Refused(partial(multiply, bias=HALF), "Bias must be", ValueError),
    }


HAS_SPLIT_K, HAS_NEWER = hasattr(MATMUL, f"{SPLIT_K}_split_k"), hasattr(F, "scaled_mm")
"""Flag and function of a newer torch."""
REFUSED: dict[str, Refused] = {
    **{f"fp8: {run.__name__[1:]}": Refused(partial(run, **{name: E4M3}), NO_FP8, NotImplementedError) for run, name in ((_mm, "left"), (_linear, "left"), (_bmm, "left"), (_addmm, "dtype"))},
    **{f"two dtypes: {run.__name__[1:]}": Refused(partial(run, right=WIDE), "expected mat1 and mat2 to have the same dtype") for run in (_mm, _linear, _bmm)},
    **{f"no split-k: {run.__name__[1:]}": Refused(partial(_without_split_k, run), NO_SPLIT_K) for run in (_mm, _linear, _bmm, _addmm, _addmm_in_place, _addmm_wide) if HAS_SPLIT_K},
    **{f"no split-k, fp32 result: {run.__name__[1:]}": Refused(partial(_without_split_k, run, out_dtype=WIDE), NO_SPLIT_K) for run in (_mm, _bmm) if HAS_SPLIT_K},
    **{f"fp16 sums, fp32 result: {run.__name__[1:]}": Refused(partial(_summing_in_fp16, run, **options), NO_WIDE) for run, options in ((_mm, {"out_dtype": WIDE}), (_bmm, {"out_dtype": WIDE}), (_addmm_wide, {}))},
    "fp64 result: mm": Refused(partial(_mm, out_dtype=torch.float64), "out_dtype must be the same as input dtype or fp32"),
    "a sum in a third dtype": Refused(partial(_addmm_wide, total=torch.bfloat16), "self dtype must match either out_dtype or mat1 dtype"),
    **{f"int8: {name} of {size}": Refused(partial(_int_mm, **{name: size}), words) for name, size, words in (("rows", 16, "self.size"), ("inner", 12, "self.size"), ("columns", 12, "mat2.size"))},
    **{f"scaled_mm: {name}": case for name, case in _of_fp8(newer=False).items()},
    **{f"scaled_mm_v2: {name}": case for name, case in (_of_fp8(newer=True) if HAS_NEWER else {}).items()},
    "two devices": Refused(_two_devices, "two different devices|at least two devices|same device"),
}  # fmt: skip
"""Rule -> an operation that it refuses."""
TAKEN: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "int8: right operand column-major": _int_mm,
    "int8: right operand row-major": partial(_int_mm, row_major=True),
    "int8: 17 rows": partial(_int_mm, rows=17),
    "scaled_mm: e4m3 by e5m2": partial(_scaled, right=E5M2),
    "scaled_mm: e5m2 by e4m3": partial(_scaled, left=E5M2),
    **({"scaled_mm_v2: e4m3 by e5m2": partial(_scaled, right=E5M2, newer=True)} if HAS_NEWER else {}),
    "fp32 result": partial(_mm, out_dtype=WIDE),
    "fp16 sums": partial(_summing_in_fp16, _mm),
    **({"no split-k, with a bias": lambda device: _without_split_k(_linear, device, bias=True) - 1,
        "no split-k, fp32": partial(_without_split_k, _mm, left=WIDE),
        "no split-k of fp16, bf16": partial(_without_split_k, _mm, left=torch.bfloat16)} if HAS_SPLIT_K else {}),
}  # fmt: skip
"""What no rule refuses -> an operation whose result is its number of terms, 32, throughout."""
READS: dict[str, Callable[[torch.Tensor], object]] = {
    **{
        name: lambda x, name=name: getattr(x[0], name)()
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
    },
    "__index__": lambda x: x[0].int().__index__(),
    **{name: lambda x, name=name: getattr(x, name)() for name in ("nonzero", "unique")},
    **{name: lambda x, name=name: getattr(torch, name)(x, x.clone()) for name in ("equal", "allclose")},
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
}
"""Read by the host that `HostReads` lists -> how it is made."""
assert READS.keys() == {name for _, name in WAITING}


def answered_otherwise(device: torch.device) -> dict[str, str]:
    """Run every case on a device; name of each that it answers otherwise than the rule book -> what it did."""
    with torch.inference_mode():
        found = {name: unrefused(case, device) for name, case in REFUSED.items()} | {
            name: untaken(run, device) for name, run in TAKEN.items()
        }
        if device.type == "cuda":
            found |= {f"read by {name}": _unwaited(read, device) for name, read in READS.items()}
    return {name: what for name, what in found.items() if what}


def unrefused(case: Refused, device: torch.device) -> str:
    """Run what a rule refuses; "" where the device raises the rule's exception, else what it did."""
    try:
        case.run(device)
    except Exception as error:
        right = isinstance(error, case.error) and re.search(case.words, str(error))
        return "" if right else f"{type(error).__name__}: {error}"[:200]
    return "not refused"


def untaken(run: Callable, device: torch.device) -> str:
    """Run what no rule refuses; "" where its values are right, else what the device did."""
    try:
        result = run(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return "" if (result == 32).all() else "wrong values"


def _unwaited(read: Callable, device: torch.device) -> str:
    x = torch.ones(4, device=device)
    before = MODES[torch.cuda.get_sync_debug_mode()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        read(x)
    except Exception:
        return ""
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return "does not wait"
