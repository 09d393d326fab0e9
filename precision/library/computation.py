"""Call a plain torch module under a compute plan, and its layers, by whatever method and in whatever thread."""

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..arithmetic.calibration import Calibration
from ..arithmetic.linear import WeightProvider, kind_of, multiplied
from ..arithmetic.planned import LayerHost
from ..dtypes import dtype_named
from ..errors import HalfsafeError
from .weights import torch_weights


class TorchLayers(LayerHost):
    """Say how torch's own layers multiply: every one does no more."""

    def weights(self, layer: torch.nn.Module) -> WeightProvider:
        """Return what reads a weight, stored or not, in a dtype."""
        return torch_weights

    def own_forward(self, layer: torch.nn.Module, mode: str) -> tuple[Callable[..., torch.Tensor], torch.dtype]:
        """Return a product with the weight in its input's dtype, and the mode's dtype."""
        return Product(layer).__call__, dtype_named(mode)


class Product:
    """Multiply as a layer does, by its weight and bias in the dtype of the input."""

    def __init__(self, layer: torch.nn.Module):
        self.layer = layer

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        with torch_weights(self.layer, x, x.dtype, x.dtype) as (weight, bias):
            return multiplied(self.layer, kind_of(self.layer) or "linear", x, weight, bias, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self.layer).__name__}.forward"


class Calls:
    """Make the calls of a module, and of single layers of it, and check what each has measured. Threads take turns."""

    def __init__(self, calibration: Calibration):
        self.calibration = calibration
        self._lock = threading.RLock()
        self._thread: int | None = None

    def __reduce__(self) -> tuple:
        return Calls, (self.calibration,)

    def make(self, forward: Callable, *args, **kwargs) -> Any:
        """Call a forward, by itself or as a part of a call that is being made. Autocast does not act inside."""
        # torch 2.8 breaks the graph at a generator ("Attempt to trace generator").
        devices = [leaf.device.type for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        device = devices[0] if devices else "cpu"
        autocast = torch.is_autocast_enabled(device)
        with torch.amp.autocast(device, enabled=False) if autocast else nullcontext():
            if not self.calibration.proofs or self._is_running:
                return forward(*args, **kwargs)
            # A check reads numbers back, which no graph can. Parts that are compiled by themselves stay so.
            measured = torch._dynamo.disable(self._measured) if torch.compiler.is_compiling() else self._measured
            return measured(forward, *args, **kwargs)

    @property
    def _is_running(self) -> bool:
        """Tell whether this is part of a call. A graph depends on there being one, not on the thread."""
        return self._thread is not None and (torch.compiler.is_compiling() or self._thread == threading.get_ident())

    def _measured(self, forward: Callable, *args, **kwargs) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            problem = "fp16_safe checks each call, which an exported or traced graph does not."
            raise HalfsafeError(problem, "Apply compute=bf16, fp16 or fp32 to it, or use torch.compile.")
        call = functools.partial(forward, *args, **kwargs)
        with self._lock:
            self._thread = threading.get_ident()
            try:
                if self.calibration.calibrating and torch.is_grad_enabled():
                    with torch.no_grad():  # a checkpoint has to save the same tensors when it makes the call again
                        self.calibration.run(call)
                return self.calibration.run(call)
            finally:
                self._thread = None


class CastInputs:
    """Cast the floating inputs of another forward.

    Timesteps are left as they are, as models cast what they make of them: inputs of one dimension or none next to
    larger ones, and what a module calls a timestep.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype, inner: Callable):
        self.inner, self.dtype = inner, dtype
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args, **kwargs) -> Any:
        # A list, no generator: torch 2.8 breaks the graph at one.
        dims = max([min(2, leaf.dim()) for leaf in tree_leaves((args, kwargs)) if _is_floating(leaf)], default=0)
        names = [*self.names, *[""] * len(args)]
        args = tuple(self._cast(name, value, dims) for name, value in zip(names, args, strict=False))
        return self.inner(*args, **{name: self._cast(name, value, dims) for name, value in kwargs.items()})

    def _cast(self, name: str, value: Any, dims: int) -> Any:
        if "timestep" in name:
            return value
        return tree_map(lambda leaf: leaf.to(self.dtype) if _is_floating(leaf) and leaf.dim() >= dims else leaf, value)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
