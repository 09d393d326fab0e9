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
from ..formats.fp8 import Quantized, dequantize, power_of_two_scale, quantize

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
READ_IN = "_halfsafe_read_in"
STORED = "halfsafe_weight"
STORABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SMALLEST_AMAX = 4.0
"""Times a dtype's smallest normal number: below, a weight loses more than the rounding of its storage dtype."""


class StoredWeight(torch.nn.Module):
    """A weight in a storage dtype, in fp8 with a power-of-two scale. Layers with tied weights share one.

    A module of the layer that holds it, so that it is moved, copied and counted with that. Its buffers are integers,
    which ``half()`` and its like do not cast, and are in no state dict. What those do cast is the layer's parameter
    ``weight``, which has no rows and so no values: its dtype is the one to read in.
    """

    def __init__(self, storage: str, keep: bool):
        super().__init__()
        self.storage, self.keep = storage, keep

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
        found = quantize(weight, dtype, largest) if scaled else Quantized(weight.detach().to(dtype), torch.ones(()))
        self.register_buffer("bits", found.data.view(BITS[dtype.itemsize]), persistent=False)
        self.register_buffer("scale_bits", found.scale.to(weight.device).view(torch.int32), persistent=False)
        # In a tuple, where torch does not look for parameters. A device's weight is kept in host memory.
        self.original = (weight if weight.device.type == "cpu" else weight.detach().cpu(),) if self.keep else ()
        return ""

    def load(self, key: str, weight: torch.Tensor, like: torch.Tensor) -> str:
        """Store a weight of another state dict; say why not where it cannot be."""
        if weight.shape != self.bits.shape:
            return f"size mismatch, {tuple(weight.shape)} for {tuple(self.bits.shape)}"
        return self.store(key, weight.to(like.device, like.dtype, copy=True))

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in ``dtype``."""
        data, is_scaled = self.bits.view(dtype_named(self.storage)), self.storage in FP8_NAMES
        return dequantize(data, self.scale_bits.view(torch.float32), dtype) if is_scaled else data.to(dtype)

    def parameter(self, like: torch.nn.Parameter) -> torch.nn.Parameter:
        """Return the original if it was kept, else the weight as it is read, as the module was cast and moved since."""
        data = (self.original[0] if self.original else self.read(like.dtype)).to(like)
        return data if isinstance(data, torch.nn.Parameter) else torch.nn.Parameter(data, like.requires_grad)

    def extra_repr(self) -> str:
        return self.storage


def _shared(found: Any, source: torch.Tensor) -> Any:
    """Return the results of a view as stored weights are read; what was copied, not viewed, as it is."""
    if isinstance(found, torch.Tensor):
        return found.as_subclass(Read) if torch._C._is_alias_of(found, source) else found
    return [_shared(one, source) for one in found]


def _refuse(*_: Any) -> None:
    raise HalfsafeError("What is computed when it is read cannot be written into.", "First: restore(module).")


class Read(torch.Tensor):
    """A tensor computed for code that reads it, or a view of it. What is written into it would be lost: refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    data = property(lambda self: self.detach(), _refuse)
    apply_ = map_ = map2_ = __dlpack__ = _refuse

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = dict(zip((one.name for one in arguments), args, strict=False), **kwargs)
            written = [given.get(one.name) for one in arguments if one.alias_info and one.alias_info.is_write]
            if any(isinstance(leaf, cls) for leaf in tree_leaves(written)):
                _refuse()
        with torch._C._DisableTorchDispatch():
            found = func(*args, **kwargs)
        return _shared(found, args[0]) if func.is_view else found

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array that cannot be written into either."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the numbers, which torch does of no tensor of another class."""
        return self.clone().tolist()

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.clone().__reduce_ex__(protocol)


class ComputesTensors(torch.nn.Module):
    """What :func:`settle` adds to a module's class: its tensors are computed when they are read.

    A stored weight is read in the module's own dtype; where a compute dtype is set, this and every other floating
    tensor of the module is read in that.
    """

    def __getattr__(self, name: str) -> Any:
        value, dtype = super().__getattr__(name), self.__dict__.get(READ_IN)
        stored = stored_in(self) if name == "weight" else None
        if not stored and (dtype is None or not isinstance(value, torch.Tensor) or not value.is_floating_point()):
            return value
        found = stored.read(dtype or value.dtype) if stored else value.to(dtype)
        is_traced = torch.compiler.is_compiling() or type(found) is not torch.Tensor
        return found if found is value or is_traced else found.as_subclass(Read)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight" or STORED not in self._modules:
            super().__setattr__(name, value)
        elif value is None or value.numel():
            problem = f"A weight stored in {self._modules[STORED].storage} cannot be set."
            raise HalfsafeError(problem, "First: restore(module).")
        else:  # what stands for the weight: loaded by assignment, or of a replica of torch.nn.DataParallel
            self._parameters[name] = value

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return _new, type(self).__bases__[1:], *super().__reduce_ex__(protocol)[2:]

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if stored := stored_in(self):
            destination[f"{prefix}weight"] = stored.read(self._parameters["weight"].dtype)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *how: Any) -> None:
        key, like, stored = f"{prefix}weight", self._parameters.get("weight"), stored_in(self)
        if stored and key in state_dict:
            if problem := stored.load(key, state_dict[key], like):
                how[-1].append(f"{key}: {problem} (restore(module) removes the storage)")
            state_dict = {**state_dict, key: like}
        super()._load_from_state_dict(state_dict, prefix, *how)


@functools.cache
def _computing(cls: type) -> type:
    """Return a subclass of a module's class, of the same name."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (ComputesTensors, cls), names)


def _new(cls: type) -> torch.nn.Module:
    """Make an empty layer for ``pickle`` and ``deepcopy``, which cannot name a class that is made at run time."""
    return object.__new__(_computing(cls))


def stored_in(module: torch.nn.Module) -> StoredWeight | None:
    """Return the stored weight that a module computes its own from; None where it has none, or has values in its place,
    as inside of ``torch.func.functional_call``."""
    weight, found = module._parameters.get("weight"), module._modules.get(STORED)
    return found if isinstance(found, StoredWeight) and weight is not None and not weight.numel() else None


def settle(modules: Iterable[torch.nn.Module]) -> None:
    """Have modules compute their tensors where something is stored or a dtype is set to read them in, and no others."""
    for module in modules:
        cls, computes = type(module), READ_IN in module.__dict__ or stored_in(module) is not None
        if computes != isinstance(module, ComputesTensors):
            # A module of this kind has two bases: see _computing.
            module.__class__ = _computing(cls) if computes else cls.__bases__[1]  # type: ignore[arg-type]


def hold(stored: StoredWeight, layers: list[torch.nn.Module]) -> None:
    """Have layers, several where their weights are tied, compute their weight from a stored one."""
    weight = layers[0]._parameters["weight"]
    like = torch.nn.Parameter(weight.new_empty(0, *weight.shape[1:]), weight.requires_grad)
    for layer in layers:
        layer._parameters["weight"], layer._modules[STORED] = like, stored
    settle(layers)


def give_back(layers: Iterable[torch.nn.Module]) -> None:
    """Give layers their weights as parameters again, tied ones tied."""
    found: dict[torch.nn.Module | None, torch.nn.Parameter] = {}
    for layer in layers:
        stored: Any = layer._modules.pop(STORED)
        layer._parameters["weight"] = found.setdefault(stored, stored.parameter(layer._parameters["weight"]))


@contextmanager
def torch_weights(
    module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype, bias_dtype: torch.dtype | None = torch.float32
) -> Iterator[tuple]:
    """Provide the weight and bias of a layer of torch's own classes on its input's device, each rounded once.
    ``bias_dtype``: None for fp32."""
    stored, bias = stored_in(module), own_tensor(module, "bias")
    weight = stored.read(dtype) if stored else own_tensor(module, "weight").to(dtype)
    yield weight.to(x.device), None if bias is None else bias.to(x.device, bias_dtype or torch.float32)


def own_tensor(module: torch.nn.Module, name: str) -> Any:
    """Return a parameter in its own dtype, or what else has its name."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found
