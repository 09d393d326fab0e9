"""The forward of a plain torch module under a compute plan."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch.utils._pytree import tree_map

from ..arithmetic.calibration import Calibration
from ..arithmetic.linear import SafeOperation, WeightProvider
from ..arithmetic.patching import Patch, patched
from ..dtypes import dtype_named
from ..plan.compute import MODE_OF, SAFE, ComputeDecision, ComputePlan


class CastOperation:
    """A layer's own forward, its weights in ``dtype``, by default that of its input."""

    def __init__(self, layer: torch.nn.Module, weights: WeightProvider, dtype: torch.dtype | None = None):
        self.layer = layer
        self.weights = weights
        self.dtype = dtype

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        dtype = self.dtype or x.dtype
        with self.weights(self.layer, x, dtype) as (weight, bias):
            lent = [(self.layer, "weight", weight), (self.layer, "bias", None if bias is None else bias.to(dtype))]
            with patched(lent):
                return type(self.layer).forward(self.layer, x.to(dtype), *args, **kwargs)


class Computation:
    """A module's forward under a plan: in one activation dtype, each layer as decided."""

    def __init__(
        self, module: torch.nn.Module, plan: ComputePlan, layers: Mapping[str, torch.nn.Module], weights: WeightProvider
    ):
        self.forward = module.forward
        self.calibration = Calibration()
        self.activations = dtype_named(plan.activation_dtype)
        self.safe: dict[str, SafeOperation] = {}
        self.decisions = {name: plan.decisions.get(name) or _follow(plan) for name in layers}
        self.patches: list[Patch] = []
        for name, layer in layers.items():
            operation = self._operation(name, layer, weights)
            dtype = torch.float32 if self.decisions[name].stream == "fp32" else self.activations
            self.patches.append((layer, "forward", CastResult(operation, dtype)))
            if layer is module:
                self.forward = self.patches[-1][2]
        left = [inner for inner in module.modules() if id(inner) not in set(map(id, layers.values()))]
        embeddings = [inner for inner in left if isinstance(inner, torch.nn.Embedding)]
        self.others = [inner for inner in left if not isinstance(inner, torch.nn.Embedding)]
        self.patches += [(inner, "forward", CastResult(inner.forward, self.activations)) for inner in embeddings]

    def _operation(self, name: str, layer: torch.nn.Module, weights: WeightProvider) -> Callable:
        mode = self.decisions[name].mode
        if mode != MODE_OF[SAFE]:
            return CastOperation(layer, weights, dtype_named(mode))
        self.safe[name] = SafeOperation(layer, self.calibration.scale(name), self.calibration, weights)
        return self.safe[name]

    def __call__(self, *args, **kwargs):
        args, kwargs = tree_map(self._cast, (args, kwargs))
        with patched([*self.patches, *self._cast_tensors()]):
            return self.calibration.run(lambda: self.forward(*args, **kwargs))

    def _cast(self, value):
        return value.to(self.activations) if torch.is_tensor(value) and value.is_floating_point() else value

    def _cast_tensors(self) -> Iterator[Patch]:
        """The parameters and buffers of other modules, such as norms, in the activation dtype where they are not."""
        for module in self.others:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.is_floating_point() and tensor.dtype != self.activations:
                    yield module, name, tensor.to(self.activations)

    def modes(self) -> dict[str, str]:
        """Map layer names to modes."""
        return {name: self.safe[name].mode if name in self.safe else d.mode for name, d in self.decisions.items()}


class CastResult:
    """A forward whose result is cast to ``dtype``."""

    def __init__(self, forward: Callable, dtype: torch.dtype):
        self.forward = forward
        self.dtype = dtype

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        return self.forward(*args, **kwargs).to(self.dtype)


def _follow(plan: ComputePlan) -> ComputeDecision:
    """The decision for a layer that a plan has none for."""
    return ComputeDecision(plan.activation_dtype, "same", "")
