"""Carry out a plan on the layers of a model: which forward stands in for each layer's own, and what runs inside of
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ..base.dtypes import name_of
from ..base.modes import FP16_WIDE, FP32
from ..base.patching import Patch
from .calibration import Calibration
from .linear import SafeOperation, WeightProvider, kind_of, matmul_flops

if TYPE_CHECKING:
    from ..plan.compute import ComputeDecision

Forward = Callable[..., torch.Tensor]


class LayerHost:
    """Say how the layers of a host's models multiply: ComfyUI's, or plain torch modules."""

    def weights(self, layer: torch.nn.Module) -> WeightProvider | None:
        """Return what provides a layer's weight in a dtype; None where only its own forward can multiply by it."""
        raise NotImplementedError

    def own_forward(self, layer: torch.nn.Module, mode: str) -> tuple[Forward, torch.dtype]:
        """Return the layer's own forward, which multiplies in its input's dtype, and the dtype that comes closest to a
        mode."""
        raise NotImplementedError

    def product(self, layer: torch.nn.Module, mode: str) -> Forward | None:
        """Return the host's own product in a mode that is neither a dtype nor ``fp16_wide``; None for any other."""
        return None

    def largest_fp16(self, name: str, decision: ComputeDecision) -> float | None:
        """Return up to which magnitude a result may be returned in fp16; None for never."""
        return None

    def patches(self, layer: torch.nn.Module, decision: ComputeDecision, forward: Forward) -> list[Patch]:
        """Return the patches of a layer that route all of its products through ``forward``."""
        return [(layer, "forward", forward)]


class PlannedLayers:
    """Exchange the forwards of a model's layers for others that follow a plan, and record the modes of their calls.

    Args:
        decisions: layer -> decision, for every layer.
        layers: layer -> module.
        host: how they multiply.
        results: the dtype of a result that no decision asks to be fp32; None for that of the layer's input.
        safe: fp32 results are left as they are, and fp16 ones where they are proven to fit.
    """

    def __init__(
        self,
        decisions: Mapping[str, ComputeDecision],
        layers: Mapping[str, torch.nn.Module],
        host: LayerHost,
        results: torch.dtype | None = None,
        safe: bool = False,
    ):
        self.calibration = Calibration()
        self.operations: dict[str, SafeOperation] = {}
        self.casts: dict[str, CastOperation] = {}
        self.patches: list[Patch] = []
        self._decisions = decisions
        self._forwards: dict[str, Forward] = {}
        for name, layer in layers.items():
            decision = decisions[name]
            product = self._product(name, layer, host)
            if not (safe and name in self.operations):
                product = CastResult(product, torch.float32 if decision.stream == FP32.name else results).__call__
            patches = host.patches(layer, decision, product)
            self._forwards[name] = next(value for _, attribute, value in patches if attribute == "forward")
            self.patches += patches

    def _product(self, name: str, layer: torch.nn.Module, host: LayerHost) -> Forward:
        """Make what multiplies: a method and not an object, for which torch.compile would make a graph of its own."""
        decision = self._decisions[name]
        if product := host.product(layer, decision.mode):
            return product
        weights = host.weights(layer) if decision.mode == FP16_WIDE.name else None
        if weights is None:
            forward, dtype = host.own_forward(layer, decision.mode)
            self.casts[name] = CastOperation(name, layer, forward, dtype, self.calibration)
            return self.casts[name].__call__
        scale, largest = self.calibration.scale(name), host.largest_fp16(name, decision)
        self.operations[name] = SafeOperation(layer, scale, self.calibration, weights, largest_fp16=largest)
        return self.operations[name].__call__

    def planned_modes(self) -> dict[str, str]:
        """Return layer -> the mode its forward was made for, the same before and after any call."""
        modes = {name: self._decisions[name].mode for name in self._forwards}
        return modes | {name: name_of(cast.dtype) for name, cast in self.casts.items()}

    def observed_modes(self) -> dict[str, str]:
        """Return layer -> the mode it was last found to run in."""
        found = {name: operation.observed_mode for name, operation in self.operations.items()}
        return self.planned_modes() | found

    def allocations(self) -> dict[str, object]:
        """Return layer -> what its allocations depend on: the mode it runs in, and what becomes of its operand."""
        sharing = self.calibration.operands.sharing
        scales = {name: (each, each.scale) for name, each in self.operations.items()}
        found = {
            name: (each.observed_mode, scale.is_watched, each.finite is None, len(sharing.get(scale, ())))
            for name, (each, scale) in scales.items()
        }
        return {**self.planned_modes(), **found}

    @property
    def fp16_flops(self) -> int:
        """The floating-point operations of a call that had fp16 operands and could not overflow."""
        in_fp16 = (name for name, operation in self.operations.items() if not operation.scale.in_fp32)
        return sum(self.calibration.flops[name] for name in in_fp16)

    def chain(self, name: str) -> list[str]:
        """List what runs around a layer, as :func:`chain_of` does."""
        return chain_of(self._forwards[name])

    def __repr__(self) -> str:
        layers: dict[str, list[str]] = {}
        for name in self._forwards:
            layers.setdefault(" > ".join(self.chain(name)), []).append(name)
        lines = [f"  {len(names)} layers, such as {names[0]}: {chain}" for chain, names in layers.items()]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])


def chain_of(forward: Forward) -> list[str]:
    """List what a layer's forward runs, from the outside in: each step, and last the method that calls no further one.

    A step is an object with ``inner``, the forward it calls, and is printed by its ``repr``; a module by its class.
    """
    return [
        type(step).__name__ if isinstance(step, torch.nn.Module) else getattr(step, "__qualname__", None) or repr(step)
        for step in steps_of(forward)
    ]


def steps_of(forward: Forward) -> list[object]:
    """Return the same steps, each an object or a function."""
    steps: list[object] = []
    following: Forward | None = forward
    while following is not None:
        steps.append(getattr(following, "__self__", following))
        following = getattr(steps[-1], "inner", None)
    return steps


class CastOperation:
    """Cast a layer's input and call another forward with it.

    Args:
        name: of the layer.
        layer: its module.
        inner: what is called; it multiplies in its input's dtype.
        dtype: to cast to.
        calibration: what counts its floating-point operations.
    """

    def __init__(self, name: str, layer: torch.nn.Module, inner: Forward, dtype: torch.dtype, calibration: Calibration):
        self.name = name
        self.layer = layer
        self.inner = inner
        self.dtype = dtype
        self.calibration = calibration

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        result = self.inner(input.to(self.dtype), *args, **kwargs)
        if self.calibration.calibrating and (kind := kind_of(self.layer)):
            self.calibration.flops[self.name] += matmul_flops(result, self.layer, kind)
        return result

    def __repr__(self) -> str:
        return f"CastOperation({name_of(self.dtype)})"


class CastResult:
    """Cast the result of another forward to ``dtype``; None for its first argument's."""

    def __init__(self, inner: Forward, dtype: torch.dtype | None):
        self.inner = inner
        self.dtype = dtype

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        return self.inner(*args, **kwargs).to(self.dtype or args[0].dtype)

    def __repr__(self) -> str:
        return f"CastResult({name_of(self.dtype) if self.dtype else 'as input'})"
