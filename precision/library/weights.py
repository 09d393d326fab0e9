"""Tensors of plain torch modules that are computed when they are read: weights in a storage dtype, and every tensor
where a compute dtype is set.

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
from torch.utils._pytree import tree_leaves

from ..amax import amax_value
from ..dtypes import FP8_NAMES, dtype_named, name_of
from ..errors import HalfsafeError
from ..formats.quantize import Quantized, dequantize, power_of_two_scale, quantize

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
READ_IN = "_halfsafe_read_in"
STORABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COPIES = (torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__)
WRITES_NO_NUMBERS = ("requires_grad_", "detach_", "share_memory_")
SMALLEST_AMAX = 4.0
"""Times a dtype's smallest normal number: below, a weight loses more than the rounding of its storage dtype."""


class StoredWeight(torch.nn.Module):
    """A weight in a storage dtype, in fp8 with a power-of-two scale. Layers with tied weights share one.

    Buffers are integers, which ``half()`` and its like do not cast. ``like`` holds no values: its dtype, which they do
    cast, is the one to read in. No tensor of it is in a state dict: that has the weight as it is read.
    """

    def __init__(self, weight: torch.nn.Parameter, storage: str, keep: bool):
        super().__init__()
        self.storage, self.keep, self.trainable = storage, keep, weight.requires_grad
        self.like = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)

    def store(self, name: str, weight: torch.Tensor) -> str:
        """Hold a weight; say why not where the dtype cannot, or would lose more than its rounding, else return "".

        Raises:
            HalfsafeError: it holds NaN or Inf.
        """
        if weight.dtype not in STORABLE or type(weight) not in (torch.Tensor, torch.nn.Parameter):
            return f"its weight is a {type(weight).__name__} of {name_of(weight.dtype)}"
        dtype, largest, scaled = dtype_named(self.storage), amax_value(weight), self.storage in FP8_NAMES
        if not largest < math.inf:
            raise HalfsafeError(f"{name} holds NaN or Inf.", "Its file is damaged, or an earlier step overflowed.")
        if dtype.itemsize > weight.dtype.itemsize:
            return f"its weight is {name_of(weight.dtype)}, which is smaller"
        scale = power_of_two_scale(largest, dtype) if scaled else 1.0
        if 0 < largest < SMALLEST_AMAX * torch.finfo(dtype).smallest_normal * scale:
            return f"values up to {largest:.3g} are too small for {self.storage}"
        read = (torch.tensor(largest / scale, dtype=torch.float64).to(dtype).double() * scale).to(weight.dtype)
        if not read.isfinite():
            return f"values up to {largest:.3g} are too large for {self.storage}"
        plain = Quantized(weight.detach().to(dtype), torch.ones(()))
        found = quantize(weight, dtype, largest) if scaled else plain
        self.register_buffer("bits", found.data.view(BITS[dtype.itemsize]), persistent=False)
        self.register_buffer("scale_bits", found.scale.to(weight.device).view(torch.int32), persistent=False)
        # In a tuple, where torch does not look for parameters. A device's weight is kept in host memory.
        self.original = (weight if weight.device.type == "cpu" else weight.detach().cpu(),) if self.keep else ()
        return ""

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weight in ``dtype``, by default the module's own."""
        data, dtype = self.bits.view(dtype_named(self.storage)), dtype or self.like.dtype
        is_scaled = self.storage in FP8_NAMES
        return dequantize(data, self.scale_bits.view(torch.float32), dtype) if is_scaled else data.to(dtype)

    def parameter(self) -> torch.nn.Parameter:
        """Return the original if it was kept, else the weight as it is read, as the module was cast and moved since."""
        data = (self.original[0] if self.original else self.read()).to(self.like)
        return data if isinstance(data, torch.nn.Parameter) else torch.nn.Parameter(data, self.trainable)

    def extra_repr(self) -> str:
        return self.storage

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[prefix.removesuffix(".")] = self.read()

    def _load_from_state_dict(self, *args: Any) -> None:
        """Leave it to the layer, which is given the weight's own key."""

    def load(self, key: str, weight: torch.Tensor) -> str:
        """Store a weight of another state dict; say why not where it cannot be."""
        if weight.shape != self.bits.shape:
            return f"size mismatch, {tuple(weight.shape)} for {tuple(self.bits.shape)}"
        return self.store(key, weight.to(self.like.device, self.like.dtype, copy=True))


class Read(torch.Tensor):
    """A stored weight, or a view of one, as code of others reads it. What is written into it would be lost: refused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else next(iter(kwargs.values()), None)
        written = first if _writes(func, kwargs) else kwargs.get("out")
        if written is not None and any(isinstance(leaf, cls) for leaf in tree_leaves(written)):
            raise HalfsafeError("A stored weight cannot be written into.", "First: restore(module).")
        with torch._C.DisableTorchFunctionSubclass():
            if func in COPIES:
                return func(first.as_subclass(torch.Tensor), *args[1:])
            found = func(*args, **kwargs)
            is_view = isinstance(first, cls) and isinstance(found, torch.Tensor) and _is_alias(found, first)
            return found.as_subclass(cls) if is_view else found


def _writes(func: Any, kwargs: dict) -> bool:
    """Tell whether a function of torch writes numbers into its first argument, by the name that torch gives it."""
    name = func.__name__
    if name.startswith("__"):
        return name == "__setitem__" or (name == "__set__" and func.__self__ is torch.Tensor.data)
    return bool(kwargs.get("inplace")) or (name.endswith("_") and name not in WRITES_NO_NUMBERS)


def _is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class ComputesTensors(torch.nn.Module):
    """What :func:`settle` adds to a module's class: its tensors are computed when they are read.

    A stored weight is read in the module's own dtype; where a compute dtype is set, this and every other floating
    tensor of the module is read in that.
    """

    def __getattr__(self, name: str) -> Any:
        value, dtype = super().__getattr__(name), self.__dict__.get(READ_IN)
        if isinstance(value, StoredWeight):
            weight = value.read(dtype)
            return weight if torch.compiler.is_compiling() else weight.as_subclass(Read)
        cast = dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if cast else value

    def __setattr__(self, name: str, value: Any) -> None:
        if stored := stored_in(self, name):
            raise HalfsafeError(
                f"A {name} that is stored in {stored.storage} cannot be set.", "First: restore(module)."
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return _new, type(self).__bases__[1:], *super().__reduce_ex__(protocol)[2:]

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, metadata: dict, strict: bool, missing: list, unexpected: list, errors: list
    ) -> None:
        key, rest, stored = f"{prefix}weight", dict(state_dict), stored_in(self)
        if stored and key not in rest:
            missing.append(key)
        elif stored and (problem := stored.load(key, rest.pop(key))):
            errors.append(f"{key}: {problem} (restore(module) removes the storage)")
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)


@functools.cache
def _computing(cls: type) -> type:
    """Return a subclass of a module's class, of the same name."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (ComputesTensors, cls), names)


def _new(cls: type) -> torch.nn.Module:
    """Make an empty layer for ``pickle`` and ``deepcopy``, which cannot name a class that is made at run time."""
    return object.__new__(_computing(cls))


def stored_in(module: torch.nn.Module, name: str = "weight") -> StoredWeight | None:
    """Return the stored weight that a module computes its own from; None where it has none."""
    # A module that is being copied has no attributes yet (torch/nn/utils/parametrize.py, default_deepcopy).
    found = module.__dict__.get("_modules", {}).get(name)
    return found if isinstance(found, StoredWeight) else None


def settle(modules: Iterable[torch.nn.Module]) -> None:
    """Have modules compute their tensors where something is stored or a dtype is set to read them in, and no others."""
    for module in modules:
        cls, computes = type(module), READ_IN in module.__dict__ or stored_in(module) is not None
        if computes != isinstance(module, ComputesTensors):
            # A module of this kind has two bases: see _computing.
            module.__class__ = _computing(cls) if computes else cls.__bases__[1]  # type: ignore[arg-type]


def store(layer: torch.nn.Module, stored: StoredWeight) -> torch.nn.Module:
    """Give a layer a stored weight in place of its parameter; return the layer."""
    del layer._parameters["weight"]
    layer._modules["weight"] = stored
    settle([layer])
    return layer


def give_back(layers: Iterable[torch.nn.Module]) -> None:
    """Give layers their weights as parameters again, first as before, tied ones tied."""
    found: dict[torch.nn.Module | None, torch.nn.Parameter] = {}
    for layer in layers:
        stored, others = layer._modules.pop("weight"), dict(layer._parameters)
        layer._parameters.clear()
        layer._parameters.update(weight=found.setdefault(stored, stored.parameter()), **others)


@contextmanager
def torch_weights(
    module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype, bias_dtype: torch.dtype = torch.float32
) -> Iterator[tuple]:
    """Provide the weight and bias of a layer of torch's own classes on its input's device, each rounded once."""
    stored, bias = stored_in(module), own_tensor(module, "bias")
    weight = stored.read(dtype) if stored else own_tensor(module, "weight").to(dtype)
    yield weight.to(x.device), None if bias is None else bias.to(x.device, bias_dtype)


def own_tensor(module: torch.nn.Module, name: str) -> Any:
    """Return a parameter in its own dtype, or what else has its name."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found
