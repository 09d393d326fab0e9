"""Tensors that hold another's memory, and what torch's Python does with them while its modes are off: words, parameters, deep copies.

Part of the emulated device; ``second_device`` computes with them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

PARAMETER = torch.nn.Parameter
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class _Wrapper(torch.Tensor):
    """What torch asks for to make a tensor without memory; no tensor keeps this class."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} in a thread without the second device")


def is_plain(kind: type) -> bool:
    """Whether a class leaves its tensors' operations to whoever is below it."""
    return kind is _Wrapper or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_held(value: object) -> bool:
    """Whether a value is a tensor of the emulated device."""
    return isinstance(value, torch.Tensor) and "raw" in value.__dict__


def hold(raw: torch.Tensor, device: torch.device, cls: type = torch.Tensor) -> torch.Tensor:
    """A tensor of a device whose memory is ``raw``'s, with its strides."""
    layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
    tensor = torch.Tensor._make_wrapper_subclass(_Wrapper, raw.shape, device=device, **layout)
    tensor.raw = raw
    tensor.__class__ = cls
    return tensor


def raw_of(value):
    return value.raw if is_held(value) else value


class Functions(TorchFunctionMode):
    """Names the device to torch as torch's C++ knows it, and does what torch does without an operation: deep copies and words."""

    def __init__(self, inside: Callable):
        super().__init__()
        self.inside = inside

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        args, kwargs = self.inside(args, kwargs)
        if func is torch.Tensor.__deepcopy__ and is_held(args[0]):
            return args[1].setdefault(id(args[0]), _copied_deeply(args[0]))
        if func in INDEXING and is_held(args[0]):
            args = (args[0], _as_tensors(args[1]), *args[2:])
        if func is torch.Tensor.__repr__ and is_held(args[0]):
            return f"{args[0].raw!r} on {args[0].device}"
        return func(*args, **kwargs)


def _copied_deeply(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return PARAMETER(copy, tensor.requires_grad) if isinstance(tensor, PARAMETER) else copy


def _as_tensors(index):
    """torch makes tensors of lists in an index with its modes off."""
    if isinstance(index, tuple):
        return tuple(map(_as_tensors, index))
    return torch.tensor(index) if isinstance(index, list) else index


def made_on_the_host(real: Callable) -> Callable:
    """torch makes a tensor of Python's numbers with its modes off, where nobody would know the device."""

    def call(*args, device=None, **kwargs):
        return real(*args, **kwargs) if device is None else real(*args, **kwargs).to(device)

    return call


def as_subclass(real: Callable) -> Callable:
    return lambda tensor, cls: tensor if is_held(tensor) and cls is torch.Tensor else real(tensor, cls)


def of_raw(real: Callable) -> Callable:
    return lambda tensor: real(raw_of(tensor))


def tolist(real: Callable) -> Callable:
    return lambda tensor: real(tensor.cpu() if is_held(tensor) else tensor)


_new_parameter = PARAMETER.__new__


def parameter(cls, data=None, requires_grad=True):
    """torch makes one of a plain tensor with its modes off, where nobody would know the tensor."""
    return hold(data.raw, data.device, cls) if is_held(data) else _new_parameter(cls, data, requires_grad)


class modules_swapped:
    """``Module.to`` exchanges tensors whole; else it sets ``data``, which knows nothing of the memory held here."""

    def __enter__(self) -> None:
        self._before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)

    def __exit__(self, *error) -> None:
        torch.__future__.set_swap_module_params_on_conversion(self._before)
