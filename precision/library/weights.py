"""Weights of plain torch modules in a storage dtype, computed in the module's own dtype each time they are read.

``torch.nn.utils.parametrize`` computes weights too, and was tried (torch 2.11): it refuses to pickle whole modules; its
state dict loads elsewhere with ``strict=False`` and without the weight; ``half()`` casts its fp8 data and its scale;
tied weights become two.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch

from ..amax import amax_value
from ..dtypes import FP8_NAMES, dtype_named, name_of
from ..errors import HalfsafeError
from ..formats.quantize import Quantized, dequantize, power_of_two_scale, quantize

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
READ_IN = "_halfsafe_read_in"
STORABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SMALLEST_AMAX = 4.0
"""Times a dtype's smallest normal number: below, a weight loses more than the rounding of its storage dtype."""


class StoredWeight(torch.nn.Module):
    """A weight in a storage dtype, in fp8 with a power-of-two scale. Layers with tied weights share one.

    Buffers are integers, which ``half()`` and its like do not cast. ``like`` holds no values: its dtype, which they do
    cast, is the one to read in. No tensor of it is in a state dict: that has the weight as it is read.
    """

    def __init__(self, weight: torch.nn.Parameter, storage: str, keep: bool):
        super().__init__()
        self.storage = storage
        self.keep = keep
        self.trainable = weight.requires_grad
        self.like = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)
        self.store(weight)

    def store(self, weight: torch.Tensor) -> None:
        """Hold a weight that :func:`why_not_stored` has nothing against."""
        dtype, scaled = dtype_named(self.storage), self.storage in FP8_NAMES
        found = (
            quantize(weight, dtype, amax_value(weight))
            if scaled
            else Quantized(weight.detach().to(dtype), torch.ones(()))
        )
        self.register_buffer("bits", found.data.view(BITS[dtype.itemsize]), persistent=False)
        self.register_buffer("scale_bits", found.scale.to(weight.device).view(torch.int32), persistent=False)
        # In a tuple, where torch does not look for parameters. A device's weight is kept in host memory.
        self.original = (weight if weight.device.type == "cpu" else weight.detach().cpu(),) if self.keep else ()

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weight in ``dtype``, by default the module's own."""
        data, dtype = self.bits.view(dtype_named(self.storage)), dtype or self.like.dtype
        return (
            dequantize(data, self.scale_bits.view(torch.float32), dtype)
            if self.storage in FP8_NAMES
            else data.to(dtype)
        )

    def parameter(self) -> torch.nn.Parameter:
        """Return the original if it was kept, else the weight as it is read,
        in the module's present dtype and device."""
        data = self.original[0] if self.original else self.read()
        if isinstance(data, torch.nn.Parameter) and (data.dtype, data.device) == (self.like.dtype, self.like.device):
            return data
        return torch.nn.Parameter(data.detach().to(self.like.device, self.like.dtype), self.trainable)

    def extra_repr(self) -> str:
        return self.storage

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[prefix.removesuffix(".")] = self.read()

    def _load_from_state_dict(self, *args: Any) -> None:
        """Leave it to the layer, which is given the weight's own key."""


class ComputesTensors(torch.nn.Module):
    """What :func:`_computing` adds to a module's class: its tensors are computed when they are read.

    A stored weight is read in the module's own dtype; where a compute dtype is set, this and every other floating
    tensor of the module is read in that.
    """

    def __getattr__(self, name: str) -> Any:
        value, dtype = super().__getattr__(name), self.__dict__.get(READ_IN)
        if isinstance(value, StoredWeight):
            return value.read(dtype)
        cast = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if cast else value

    def __setattr__(self, name: str, value: Any) -> None:
        if stored := _stored(self, name):
            raise HalfsafeError(
                f"A {name} that is stored in {stored.storage} cannot be set.", "First: restore(module)."
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        state = super().__reduce_ex__(protocol)[2:]
        return _new, (_plain(type(self)),), *state

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, metadata: dict, strict: bool, missing: list, unexpected: list, errors: list
    ) -> None:
        key, stored = f"{prefix}weight", _stored(self)
        rest = {name: value for name, value in state_dict.items() if name != key or stored is None}
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)
        if stored is None:
            return
        if key not in state_dict:
            missing.append(key)
        elif problem := _why_not_loaded(key, state_dict[key], stored):
            errors.append(f"{key}: {problem} (restore(module) removes the storage)")
        else:
            stored.store(state_dict[key].to(stored.like.device, stored.like.dtype, copy=True))


@functools.cache
def _computing(cls: type) -> type:
    """Return a subclass of a module's class, of the same name."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (ComputesTensors, cls), names)


def _plain(cls: type) -> type:
    return cls.__bases__[1]


def _new(cls: type) -> torch.nn.Module:
    """Make an empty layer for ``pickle`` and ``deepcopy``, which cannot name a class that is made at run time."""
    return object.__new__(_computing(cls))


def _stored(module: torch.nn.Module, name: str = "weight") -> StoredWeight | None:
    found = module._modules.get(name)
    return found if isinstance(found, StoredWeight) else None


def computes(module: torch.nn.Module) -> None:
    """Have a module compute its tensors."""
    if not isinstance(module, ComputesTensors):
        module.__class__ = _computing(type(module))  # type: ignore[arg-type]  # a class is hashable


def computes_no_more(module: torch.nn.Module) -> None:
    """Give a module its own class again, unless something of it is computed still."""
    if READ_IN not in module.__dict__ and _stored(module) is None:
        module.__class__ = _plain(type(module))


def store(layer: torch.nn.Module, stored: StoredWeight) -> None:
    """Have a layer compute its weight from a stored one, where it had a parameter."""
    del layer._parameters["weight"]
    layer._modules["weight"] = stored
    computes(layer)


def give_back(layers: Iterable[torch.nn.Module]) -> None:
    """Give layers their weights as parameters again, tied ones tied."""
    found: dict[StoredWeight, torch.nn.Parameter] = {}
    for layer in layers:
        stored, others = layer._modules.pop("weight"), dict(layer._parameters)
        layer._parameters.clear()
        layer._parameters["weight"] = found.setdefault(stored, stored.parameter())
        layer._parameters.update(others)
        computes_no_more(layer)


def read_in(module: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Have every floating tensor of a module read in ``dtype``; None ends it."""
    if dtype is None:
        del module.__dict__[READ_IN]
        computes_no_more(module)
    else:
        module.__dict__[READ_IN] = dtype
        computes(module)


def why_not_stored(name: str, weight: torch.Tensor, storage: str) -> str:
    """Say why a weight cannot be held in a storage dtype, or would lose more than its rounding; empty where it can.

    Raises:
        HalfsafeError: it holds NaN or Inf.
    """
    if weight.dtype not in STORABLE or type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return f"its weight is a {type(weight).__name__} of {name_of(weight.dtype)}"
    dtype, largest = dtype_named(storage), amax_value(weight)
    if not largest < math.inf:
        raise HalfsafeError(f"{name} holds NaN or Inf.", "Its file is damaged, or an earlier step overflowed.")
    if dtype.itemsize > weight.dtype.itemsize:
        return f"its weight is {name_of(weight.dtype)}, which is smaller"
    scale = power_of_two_scale(largest, dtype) if storage in FP8_NAMES else 1.0
    if 0 < largest < SMALLEST_AMAX * torch.finfo(dtype).smallest_normal * scale:
        return f"values up to {largest:.3g} are too small for {storage}"
    read = (torch.tensor(largest / scale, dtype=torch.float64).to(dtype).double() * scale).to(weight.dtype)
    return "" if read.isfinite() else f"values up to {largest:.3g} are too large for {storage}"


def _why_not_loaded(key: str, weight: torch.Tensor, stored: StoredWeight) -> str:
    if weight.shape != stored.bits.shape:
        return f"size mismatch, {tuple(weight.shape)} for {tuple(stored.bits.shape)}"
    try:
        return why_not_stored(key, weight.to(stored.like.dtype), stored.storage)
    except HalfsafeError as error:
        return str(error)


@contextmanager
def parameters(module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple]:
    """Give a layer's weight in ``dtype`` and its bias in fp32, both on the input's device, each rounded once."""
    stored, bias = _stored(module), _own(module, "bias")
    weight = stored.read(dtype) if stored else _own(module, "weight").to(dtype)
    yield weight.to(x.device), None if bias is None else bias.to(x.device, torch.float32)


def _own(module: torch.nn.Module, name: str) -> Any:
    """Return a parameter in its own dtype, or what else has its name."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found
