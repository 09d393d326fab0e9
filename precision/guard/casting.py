"""Run model code that creates 16-bit tensors itself on activations that were widened to fp32."""

import contextlib
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from ..base.nested import PLAIN, replaced, tensors_in

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NARROW = (torch.float16, torch.bfloat16)
CASTS = (torch.Tensor.to, torch.Tensor.type_as)
NARROW_CASTS = (torch.Tensor.half, torch.Tensor.bfloat16)


class PromotesFloats(TorchFunctionMode):
    """Cast the float arguments of an operation to fp32 if their dtypes differ, while the mode is on.

    In-place operations and casts to the dtype of another tensor are not changed.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtypes = {tensor.dtype for tensor in tensors_in((args, kwargs))}
        if len(dtypes.intersection(FLOATS)) < 2 or func in CASTS or _writes(func, kwargs):
            return func(*args, **kwargs)
        # torch's products, convolutions, norms and attention refuse to mix dtypes; elementwise operations promote.
        return func(*replaced(tuple(args), _float), **replaced(kwargs, _float))


class CastsToFp32(TorchFunctionMode):
    """Replace casts to fp16 or bf16 in model code by casts to fp32, and create its 16-bit tensors in fp32.

    Such tensors are positions, timesteps and masks. Tensor subclasses (quantized weights) are not changed, and
    neither is ``view``, which reinterprets bits.
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


def promoting(function: Callable, casts: bool = True) -> Callable:
    """Wrap a function so that its operations promote to fp32 and its 16-bit results become fp32.

    ``casts``: keep its casts to fp16 or bf16; otherwise they become casts to fp32.
    """

    def run(*args, **kwargs):
        with contextlib.nullcontext() if casts else CastsToFp32(), PromotesFloats():
            return replaced(function(*args, **kwargs), _float)

    return run


def _writes(func: Callable, kwargs: dict) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return "out" in kwargs or name == "__setitem__" or in_place


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in FLOATS else tensor
