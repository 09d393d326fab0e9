"""The layers of a plain torch module under a compute plan, wherever and in whatever thread they are called."""

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..arithmetic.compiling import compile_disabled
from ..arithmetic.linear import WeightProvider, kind_of, multiplied
from ..arithmetic.patching import Patch
from ..arithmetic.planned import PlannedLayers
from ..dtypes import dtype_named
from ..plan.compute import ComputeDecision, ComputePlan


class Computation:
    """Carry out a plan on layers; one without a decision follows the plan. Threads take turns where layers are measured.

    Args:
        plan: what to do.
        layers: name -> module of those that the plan is for.
        weights: provides their weights and biases.
    """

    def __init__(self, plan: ComputePlan, layers: Mapping[str, torch.nn.Module], weights: WeightProvider):
        self.activations = dtype_named(plan.activation_dtype)
        self._lock = Lock()
        self._running: int | None = None
        decisions = {name: plan.decisions.get(name) or plan.following for name in layers}
        self.layers = PlannedLayers(decisions, layers, TorchLayers(weights), self.activations, plan.is_safe)
        self.layers.calibration.calibrating = bool(self.layers.operations)
        self.forwards = [(layer, PlannedForward(inner, self)) for layer, _, inner in self.layers.patches]

    def run(self, call: Callable[[], Any]) -> Any:
        """Make a call of the module, or of a layer by itself, and check what was measured in it."""
        if not self.layers.operations:
            return call()
        # A check reads numbers back, which no graph can. Parts that are compiled by themselves stay so.
        return (torch._dynamo.disable(self._run) if torch.compiler.is_compiling() else self._run)(call)

    def _run(self, call: Callable[[], Any]) -> Any:
        calibration = self.layers.calibration
        with self._lock:
            if self._running is not None:
                return call()
            self._running = threading.get_ident()
            try:
                if calibration.calibrating and torch.is_grad_enabled():
                    with torch.no_grad():  # a checkpoint has to save the same tensors when it makes the call again
                        calibration.run(lambda: self._once(call))
                return calibration.run(lambda: self._once(call))
            finally:
                self._running = None

    def _once(self, call: Callable[[], Any]) -> Any:
        has_graphs = "torch._dynamo" in sys.modules
        with compile_disabled() if has_graphs and self.layers.calibration.calibrating else nullcontext():
            return call()

    @property
    def is_running(self) -> bool:
        """Tell whether this is part of a call that is checked; a graph guards the answer, not the thread."""
        return self._running is not None and (torch.compiler.is_compiling() or self._running == threading.get_ident())


class TorchLayers:
    """Say how torch's own layers multiply: by weights they are provided with (``arithmetic.planned.LayerHost``)."""

    def __init__(self, weights: WeightProvider):
        self._weights = weights

    def weights(self, layer: torch.nn.Module) -> WeightProvider:
        """Return the provider: every such layer does no more than multiply."""
        return self._weights

    def own_forward(self, layer: torch.nn.Module, mode: str) -> tuple[Callable[..., torch.Tensor], torch.dtype]:
        """Return a product with the weight in its input's dtype, and the mode's dtype."""
        return ProvidedWeights(layer, self._weights).__call__, dtype_named(mode)

    def product(self, layer: torch.nn.Module, mode: str) -> None:
        """Return None: there are no other products."""

    def largest_fp16(self, name: str, decision: ComputeDecision) -> None:
        """Return None: what stands between a module's layers is not known."""

    def patches(self, layer: torch.nn.Module, decision: ComputeDecision, forward: Callable) -> list[Patch]:
        """Return the patch of the layer's forward."""
        return [(layer, "forward", forward)]


class ProvidedWeights:
    """Multiply as a layer does, by its weight and bias in the dtype of the input."""

    def __init__(self, layer: torch.nn.Module, weights: WeightProvider):
        self.layer = layer
        self.kind = kind_of(layer) or "linear"
        self.weights = weights

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        with self.weights(self.layer, x, x.dtype) as (weight, bias):
            bias = None if bias is None else bias.to(x.dtype)
            return multiplied(self.layer, self.kind, x, weight, bias, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self.layer).__name__}.forward"


class PlannedForward:
    """Call a layer's planned forward without autocast. A layer that another method than the module's ``forward`` calls is a
    call by itself."""

    def __init__(self, inner: Callable[..., torch.Tensor], computation: Computation):
        self.inner = inner
        self.computation = computation

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        with without_autocast(input.device.type):
            if self.computation.is_running:
                return self.inner(input, *args, **kwargs)
            return self.computation.run(lambda: self.inner(input, *args, **kwargs))

    def __repr__(self) -> str:
        return "PlannedForward"


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Keep autocast from acting inside."""
    return torch.amp.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class Lock:
    """Lock, as ``threading.RLock``; a copy, and what is pickled, gets a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple:
        return Lock, ()
