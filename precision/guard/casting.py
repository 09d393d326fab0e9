"""Let code that holds 16-bit tensors of its own run on activations that were widened to fp32."""

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from ..base.nested import replaced, tensors_in

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CASTS = (torch.Tensor.to, torch.Tensor.type_as)


class PromotesFloats(TorchFunctionMode):
    """Give operations with arguments of several float dtypes all of them in fp32, while the mode is on.

    What writes into one of its arguments is left alone, as that has a dtype already, and so is a cast to another's.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtypes = {tensor.dtype for tensor in tensors_in((args, kwargs))}
        if len(dtypes.intersection(FLOATS)) < 2 or func in CASTS or _writes(func, kwargs):
            return func(*args, **kwargs)
        # torch's products, convolutions, norms and attention refuse to mix dtypes; elementwise operations promote.
        return func(*replaced(tuple(args), _float), **replaced(kwargs, _float))


def promoting(function: Callable) -> Callable:
    """Wrap a function so that its operations promote to fp32 and its 16-bit results become fp32."""

    def run(*args, **kwargs):
        with PromotesFloats():
            return replaced(function(*args, **kwargs), _float)

    return run


def _writes(func: Callable, kwargs: dict) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return "out" in kwargs or name == "__setitem__" or in_place


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in FLOATS else tensor
