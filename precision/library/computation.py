"""Call a plain torch module under a compute plan, and its layers, by whatever method and in whatever thread."""

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..arithmetic.calibration import Calibration
from ..arithmetic.compiling import compile_disabled
from ..arithmetic.linear import WeightProvider, kind_of, multiplied
from ..arithmetic.planned import LayerHost
from ..dtypes import dtype_named
from .weights import own_tensor


class TorchLayers(LayerHost):
    """Say how torch's own layers multiply: every one does no more, by weights it is provided with."""

    def __init__(self, weights: WeightProvider):
        self._weights = weights

    def weights(self, layer: torch.nn.Module) -> WeightProvider:
        """Return the provider."""
        return self._weights

    def own_forward(self, layer: torch.nn.Module, mode: str) -> tuple[Callable[..., torch.Tensor], torch.dtype]:
        """Return a product with the weight in its input's dtype, and the mode's dtype."""
        return ProvidedWeights(layer, self._weights).__call__, dtype_named(mode)


class ProvidedWeights:
    """Multiply as a layer does, by its weight and bias in the dtype of the input."""

    def __init__(self, layer: torch.nn.Module, weights: WeightProvider):
        self.layer, self.weights = layer, weights

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        with self.weights(self.layer, x, x.dtype, x.dtype) as (weight, bias):
            return multiplied(self.layer, kind_of(self.layer) or "linear", x, weight, bias, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self.layer).__name__}.forward"


class Lookup:
    """Look rows up in an embedding's table in the dtype that this has, whatever it is read in."""

    def __init__(self, layer: torch.nn.Embedding):
        self.layer = layer

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        layer, table = self.layer, own_tensor(self.layer, "weight")
        how = (layer.padding_idx, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse)
        return torch.nn.functional.embedding(input, table, *how)


class Calls:
    """Make the calls of a module, and of single layers of it, and check what each has measured. Threads take turns.

    Args:
        calibration: what its layers measure; None where none does.
    """

    def __init__(self, calibration: Calibration | None):
        self.calibration = calibration
        self._lock = threading.RLock()
        self._thread: int | None = None

    def __reduce__(self) -> tuple:
        return Calls, (self.calibration,)

    def make(self, device: str, call: Callable[[], Any]) -> Any:
        """Make a call, or go on with the one that this is part of. Autocast does not act inside."""
        autocast = torch.is_autocast_enabled(device)
        with torch.amp.autocast(device, enabled=False) if autocast else nullcontext():
            if self.calibration is None or self._is_running:
                return call()
            # A check reads numbers back, which no graph can. Parts that are compiled by themselves stay so.
            make = torch._dynamo.disable(self._make) if torch.compiler.is_compiling() else self._make
            return make(self.calibration, call)

    @property
    def _is_running(self) -> bool:
        """Tell whether this is part of a call. A graph depends on there being one, not on the thread."""
        return self._thread is not None and (torch.compiler.is_compiling() or self._thread == threading.get_ident())

    def _make(self, calibration: Calibration, call: Callable[[], Any]) -> Any:
        has_graphs = "torch._dynamo" in sys.modules  # importing it takes seconds

        def once() -> Any:
            with compile_disabled() if has_graphs and calibration.calibrating else nullcontext():
                return call()

        with self._lock:
            self._thread = threading.get_ident()
            try:
                if calibration.calibrating and torch.is_grad_enabled():
                    with torch.no_grad():  # a checkpoint has to save the same tensors when it makes the call again
                        calibration.run(once)
                return calibration.run(once)
            finally:
                self._thread = None


class PlannedForward:
    """Call a layer's planned forward; by itself where another method than the module's ``forward`` calls it."""

    def __init__(self, inner: Callable[..., torch.Tensor], calls: Calls):
        self.inner, self.calls = inner, calls

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return self.calls.make(input.device.type, lambda: self.inner(input, *args, **kwargs))


class Called:
    """Call a module with its inputs cast.

    Timesteps are left as they are, as models cast what they make of them: inputs of one dimension or none next to
    larger ones, and what a module calls a timestep.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype, calls: Calls):
        self.inner, self.dtype, self.calls = module.forward, dtype, calls
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args, **kwargs) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_floating(leaf)]
        dims = max([0, *(min(2, tensor.dim()) for tensor in tensors)])
        names = [*self.names, *[""] * len(args)]
        args = tuple(self._cast(name, value, dims) for name, value in zip(names, args, strict=False))
        kwargs = {name: self._cast(name, value, dims) for name, value in kwargs.items()}
        device = tensors[0].device.type if tensors else "cpu"
        return self.calls.make(device, lambda: self.inner(*args, **kwargs))

    def _cast(self, name: str, value: Any, dims: int) -> Any:
        if "timestep" in name:
            return value
        return tree_map(lambda leaf: leaf.to(self.dtype) if _is_floating(leaf) and leaf.dim() >= dims else leaf, value)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
