"""Run model code that creates 16-bit tensors itself on activations that were widened to fp32."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch.overrides import TorchFunctionMode

from ..base.nested import PLAIN, replaced, tensors_in

Results = Literal["fp32", "given", "computed"]
"""Dtype of the 16-bit and fp32 results of a promoted function: fp32, that of its first tensor if it
is of 16 bit, or as its operations return them."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NARROW = (torch.float16, torch.bfloat16)
CASTS = (torch.Tensor.to, torch.Tensor.type_as)
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
NARROW_CASTS = (torch.Tensor.half, torch.Tensor.bfloat16)
NO_ARITHMETIC = frozenset((
    "__get__", "__getitem__", "__len__", "size", "dim", "numel", "stride", "view", "view_as", "reshape", "transpose",
    "permute", "movedim", "chunk", "split", "unbind", "squeeze", "unsqueeze", "expand", "expand_as", "narrow", "select",
    "flatten", "unflatten", "contiguous", "detach",
))  # fmt: skip
"""Functions that compute nothing. Most return a view, which code may write to."""


class _PromotesFloats(TorchFunctionMode):
    """Cast the float arguments of an operation to fp32 if their dtypes differ, while the mode is
    on.

    In-place operations, casts to the dtype of another tensor and operators of other libraries are
    not changed. ``widens``: cast arguments that are all of one 16-bit dtype too.
    """

    def __init__(self, widens: bool = False):
        super().__init__()
        self.widens = widens

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in NO_ARITHMETIC:  # most of what code asks of a tensor
            return func(*args, **kwargs)
        dtypes = _dtypes(args, set())
        if kwargs:
            _dtypes(kwargs.values(), dtypes)
        mixed = len(dtypes) > 1 and len(dtypes.intersection(FLOATS)) > 1
        narrow = self.widens and dtypes.intersection(NARROW)
        if not (mixed or narrow) or func in CASTS or _writes(name, kwargs) or _is_kernel(func, name):
            return func(*args, **kwargs)
        # torch's products, convolutions, norms and attention refuse to mix dtypes; elementwise
        # operations promote.
        return func(*replaced(tuple(args), _float), **replaced(kwargs, _float))


class CastsToFp32(TorchFunctionMode):
    """Replace casts to fp16 or bf16 in model code by casts to fp32, and create its 16-bit tensors
    in fp32.

    Such tensors are positions, timesteps and masks. Tensor subclasses (quantized weights) are not
    changed, and neither is ``view``, which reinterprets bits.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.view or any(kind not in PLAIN for kind in types):
            return func(*args, **kwargs)
        if func in NARROW_CASTS:
            return args[0].float()
        if func in CASTS and len(args) == 2 and isinstance(args[1], torch.Tensor) and args[1].dtype in NARROW:
            return args[0].to(args[1].device, torch.float32)
        return func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value):
    return torch.float32 if isinstance(value, torch.dtype) and value in NARROW else value


def promoting(function: Callable, casts: bool = True, results: Results = "fp32") -> Callable:
    """Wrap a function so that its operations promote to fp32 where dtypes differ.

    ``casts``: keep its casts to fp16 or bf16; otherwise they become casts to fp32. ``results``:
    dtype of its results. A tensor that it received and returns keeps its own with "given".
    """

    def run(*args, **kwargs):
        with contextlib.nullcontext() if casts else CastsToFp32(), _PromotesFloats():
            result = function(*args, **kwargs)
        if results == "given":
            return _as_given(result, [*tensors_in((args, kwargs))])
        return replaced(result, _float) if results == "fp32" else result

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


def widened(function: Callable, dtype: torch.dtype) -> Callable:
    """Wrap a function so that its operations compute in fp32. A tensor that it returns and did not
    receive is cast to ``dtype``; one that it writes to keeps its own."""

    def run(*args, **kwargs):
        given = set(map(id, tensors_in((args, kwargs))))
        with CastsToFp32(), _PromotesFloats(widens=True):
            result = function(*args, **kwargs)

        def returned(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.dtype == torch.float32 and id(tensor) not in given else tensor

        return replaced(result, returned)

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


def _as_given(result, given: list[torch.Tensor]):
    """Cast what was computed to the dtype of the first float tensor among ``given``, if it is of 16
    bit."""
    dtype = next((each.dtype for each in given if each.dtype in FLOATS), None)
    if dtype not in NARROW:
        return result
    kept = set(map(id, given))

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in FLOATS and id(tensor) not in kept else tensor

    return replaced(result, cast)


def _dtypes(values: Iterable, found: set[torch.dtype]) -> set[torch.dtype]:
    """Add the dtypes of the tensors of torch's own classes among nested values to ``found``,
    without the generators of ``tensors_in``: it is asked for each operation."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            found.add(value.dtype)
        elif kind in (tuple, list):
            _dtypes(value, found)
        elif kind is dict:
            _dtypes(value.values(), found)
    return found


def _writes(name: str, kwargs: dict) -> bool:
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return "out" in kwargs or name == "__setitem__" or in_place


def _is_kernel(func: Callable, name: str) -> bool:
    """True for an operator of another library, and for torch's private products, such as
    ``_scaled_mm``: scales are fp32 and other operands are not."""
    if isinstance(func, OPERATORS):
        return not str(func).startswith("aten.")
    return name.startswith("_") and "_mm" in name


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in FLOATS else tensor
