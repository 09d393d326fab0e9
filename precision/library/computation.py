"""The forward of a plain torch module under a compute plan."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch.utils._pytree import tree_map

from ..arithmetic.linear import WeightProvider
from ..arithmetic.patching import Patch, patched
from ..arithmetic.planned import CastResult, PlannedLayers
from ..dtypes import dtype_named
from ..plan.compute import ComputeDecision, ComputePlan


class Computation:
    """Run a module under a plan: in one activation dtype, each layer as decided; one without a decision follows the
    plan.

    Args:
        module: the module; its own forward is what is called.
        plan: what to do.
        layers: name -> module of those that the plan is for.
        weights: provides their weights and biases.
    """

    def __init__(
        self, module: torch.nn.Module, plan: ComputePlan, layers: Mapping[str, torch.nn.Module], weights: WeightProvider
    ):
        self.activations = dtype_named(plan.activation_dtype)
        decisions = {name: plan.decisions.get(name) or plan.following for name in layers}
        self.layers = PlannedLayers(decisions, layers, TorchLayers(weights), self.activations, plan.is_safe)
        own = {layer: forward for layer, _, forward in self.layers.patches}
        self.forward = own.get(module, module.forward)
        left = [inner for inner in module.modules() if inner not in own]
        embeddings = [inner for inner in left if isinstance(inner, torch.nn.Embedding)]
        self.others = [inner for inner in left if not isinstance(inner, torch.nn.Embedding)]
        self.patches = list(self.layers.patches)
        self.patches += [(inner, "forward", CastResult(inner.forward, self.activations)) for inner in embeddings]

    def __call__(self, *args, **kwargs):
        args, kwargs = tree_map(self._cast, (args, kwargs))
        with patched([*self.patches, *self._cast_tensors()]):
            return self.layers.calibration.run(lambda: self.forward(*args, **kwargs))

    def _cast(self, value):
        return value.to(self.activations) if torch.is_tensor(value) and value.is_floating_point() else value

    def _cast_tensors(self) -> Iterator[Patch]:
        """Cast the parameters and buffers of other modules, such as norms, that are not in the activation dtype."""
        for module in self.others:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and tensor.is_floating_point() and tensor.dtype != self.activations:
                    yield module, name, tensor.to(self.activations)

    def modes(self) -> dict[str, str]:
        """Return layer -> the mode it was last found to run in."""
        return self.layers.observed_modes()

    def __repr__(self) -> str:
        return repr(self.layers)


class TorchLayers:
    """Say how torch's own layers multiply: by weights that they are provided with
    (``arithmetic.planned.LayerHost``)."""

    def __init__(self, weights: WeightProvider):
        self._weights = weights

    def weights(self, layer: torch.nn.Module) -> WeightProvider:
        """Return the provider: every such layer does no more than multiply."""
        return self._weights

    def own_forward(self, layer: torch.nn.Module, mode: str) -> tuple[Callable[..., torch.Tensor], torch.dtype]:
        """Return the class's forward, with the weight in the mode's dtype."""
        return ProvidedWeights(layer, self._weights).__call__, dtype_named(mode)

    def product(self, layer: torch.nn.Module, mode: str) -> None:
        """Return None: there are no other products."""

    def largest_fp16(self, name: str, decision: ComputeDecision) -> None:
        """Return None: what stands between a module's layers is not known."""

    def patches(self, layer: torch.nn.Module, decision: ComputeDecision, forward: Callable) -> list[Patch]:
        """Return the patch of the layer's forward."""
        return [(layer, "forward", forward)]


class ProvidedWeights:
    """Run the forward of a layer's class with its weight and bias in the dtype of the input."""

    def __init__(self, layer: torch.nn.Module, weights: WeightProvider):
        self.layer = layer
        self.weights = weights

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        with self.weights(self.layer, x, x.dtype) as (weight, bias):
            bias = None if bias is None else bias.to(x.dtype)
            with patched([(self.layer, "weight", weight), (self.layer, "bias", bias)]):
                return type(self.layer).forward(self.layer, x, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self.layer).__name__}.forward"
