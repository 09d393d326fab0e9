"""What stands in front of modules whose tensors are read in an activation dtype: inputs or results are cast to that."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .computation import Computation, without_autocast


class OwnForward:
    """What a module ran before this stood in front of it: what had replaced its forward, or that of its class."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self.forward: Callable | None = module.__dict__.get("forward")

    def __call__(self, *args, **kwargs) -> Any:
        return self.forward(*args, **kwargs) if self.forward else type(self.module).forward(self.module, *args, **kwargs)


class CastResult(OwnForward):
    """An embedding: it looks up in its own dtype and casts what it finds."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype):
        super().__init__(module)
        self.dtype = dtype

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        return super().__call__(*args, **kwargs).to(self.dtype)


class Called(OwnForward):
    """A module under a computation: its inputs are cast, autocast does not act inside, and what is measured is checked.

    Timesteps are left as they are: models cast what they make of them. They are inputs of one dimension or none beside larger
    ones, and what the module calls a timestep.
    """

    def __init__(self, module: torch.nn.Module, computation: Computation):
        super().__init__(module)
        self.computation = computation
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args, **kwargs) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_floating(leaf)]
        dims = min(2, max((tensor.dim() for tensor in tensors), default=0))
        names = [*self.names, *[""] * len(args)]
        args = tuple(self._cast(name, value, dims) for name, value in zip(names, args, strict=False))
        kwargs = {name: self._cast(name, value, dims) for name, value in kwargs.items()}
        devices = {tensor.device.type for tensor in tensors}
        with without_autocast(devices.pop() if devices else "cpu"):
            return self.computation.run(lambda: super(Called, self).__call__(*args, **kwargs))

    def _cast(self, name: str, value: Any, dims: int) -> Any:
        if "timestep" in name:
            return value
        dtype = self.computation.activations
        return tree_map(lambda leaf: leaf.to(dtype) if _is_floating(leaf) and leaf.dim() >= dims else leaf, value)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
