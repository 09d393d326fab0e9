"""The forward of a layer while a model of ours runs: one object, whose fields say what a call of
the layer does.

    ComfyUI's call -> gate: act(x) -> cast in -> product under its sums -> cast out -> LoRAs ->
    gate: residual

A stage never wraps a layer. The stage that decides the product makes a :class:`LayerForward` for
its model; a stage further in sets fields of the one that stands, for the length of an attempt, and
they are taken back with the rest of the attempt's patches. The order of what happens in a call is
the text of :meth:`LayerForward.run`.

| field | set by |
|---|---|
| ``product``, ``operand``, ``result`` | a compute plan, a rung of the ladder, a trial of Analyze Layers |
| ``sums`` | a rule of a compute plan; accumulation, whose sums a plan behind it takes over (:meth:`LayerForward.on`) |
| ``adds`` | LoRAs of an 8-bit weight |
| ``frame`` | who watches every call: the guard's search, the amax of a rung's try |
| ``measure`` | who measures products: Analyze Layers, Calibrate |

A product that nothing stands around is put on the layer itself, a function of Python less in each
call of each layer: what is put on is ``entrance``, and the layer says who stands on it
(``STANDING``) as long as it does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial

import torch

from ....precision.arithmetic.calibration import Calibration
from ....precision.arithmetic.linear import matmul_flops
from ....precision.base.dtypes import name_of
from ....precision.base.layers import kind_of
from ....precision.base.patching import Patch, Watch, patched, watched_forward
from .gate import Forward, Gate, ran_own

GIVEN = "given"
"""The dtype of the input, as the dtype of a result."""
STANDING = "halfsafe_forward"
"""The attribute of a layer that holds the :class:`LayerForward` on it."""
Sums = Callable[..., torch.Tensor]
"""``sums(product, x, ...)`` runs a product, accumulated as the layer's sums are to be."""


class LayerForward:
    """Run a layer in a call of a model.

    Args:
        module: the layer.
        product: multiplies; the forward that was found on the layer, or what runs in place of it.
        operand: dtype of the product's input; None for that of the layer's input.
        result: dtype of the layer's result; None for that of the product, ``GIVEN`` for that of the layer's input.
        sums: runs the product with its accumulation; None for the flags as they are.
        otherwise: runs calls with an argument that is not known; None if the product takes any.
        counted: the calibration that counts the product's operations, and the layer's name in it.
        gated: compute what ComfyUI folds into the layer; else the product does.
    """

    adds: torch.nn.Module | None = None
    frame: Watch | None = None
    measure: Watch | None = None
    otherwise: LayerForward | None = None
    gate: Gate | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        product: Forward,
        operand: torch.dtype | None = None,
        result: torch.dtype | str | None = None,
        sums: Sums | None = None,
        otherwise: LayerForward | None = None,
        counted: tuple[Calibration, str] | None = None,
        gated: bool = True,
    ):
        self.module, self.product = module, product
        self.operand, self.result, self.sums, self.otherwise = operand, result, sums, otherwise
        self.calibration, self.name = counted or (None, "")
        self.gate = Gate.of(module, otherwise is not None) if gated else None
        self.alone = self._is_alone()

    @classmethod
    def on(cls, module: torch.nn.Module) -> LayerForward:
        """Return what stands on a layer; one of the forward that is found on it, if nothing of ours
        stands there."""
        standing = module.__dict__.get(STANDING)
        if standing is not None and standing.entrance == module.forward:
            return standing
        return cls(module, module.forward)

    def run(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Run the layer on its plain input."""
        x = input if self.operand is None else input.to(self.operand)
        multiply = self.product if self.sums is None else partial(self.sums, self.product)
        result = multiply(x, *args, **kwargs)
        if self.calibration is not None and self.calibration.calibrating and (kind := kind_of(self.module)):
            self.calibration.flops[self.name] += matmul_flops(result, self.module, kind)
        if self.result is not None:
            result = result.to(input.dtype if self.result == GIVEN else self.result)
        if self.adds is not None:
            result = self.adds(input, result)
        return result

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        """Run the layer with what ComfyUI's call passes, watched."""
        if self.gate is None:
            return self._chosen()(*args, **kwargs)
        if len(args) == 1 and not kwargs and self.frame is None and self.measure is None:
            return self.product(args[0]) if self.alone else self.run(args[0])
        return self.gate.enter(self._chosen, args, kwargs)

    def _chosen(self, unknown: Collection[str] = ()) -> Forward:
        """Return what runs in a call. ``unknown``: the names of its arguments that are not
        known."""
        run: Forward = self.run
        if unknown and self.gate and (self.otherwise is not None or self.measure is not None):
            self.gate.note_met(unknown)
            if self.adds is not None:
                self.adds.missed = True
            run = run if self.otherwise is None else self.otherwise.run
        elif self.measure is not None:
            run = partial(self.measure, run)
        return run if self.frame is None else partial(self.frame, run)

    def _is_alone(self) -> bool:
        return self.operand is self.result is self.sums is self.adds is self.calibration is None

    @property
    def entrance(self) -> Forward:
        """The function to put on the layer. It is made anew each time: a bound method that this
        object kept would refer to the object, and keep the weights in memory."""
        if self.gate or self.frame is not None or self.measure is not None:
            return self.__call__
        return self.product if self.alone else self.run

    def put_on(self) -> list[Patch]:
        """Return the patches that put this on the layer."""
        return [(self.module, STANDING, self), (self.module, "forward", self.entrance)]

    def with_fields(self, **fields) -> list[Patch]:
        """Return the patches that set fields, and put this on the layer with them."""
        with patched([(self, name, value) for name, value in fields.items()]):
            replaces = (self.otherwise, self.adds, self.measure) != (None, None, None)
            fields |= {"gate": Gate.of(self.module, replaces), "alone": self._is_alone()}
        if fields["gate"] and "adds" in fields:
            fields["otherwise"] = self.otherwise or copy.copy(self)
        set_fields = [(self, name, value) for name, value in fields.items() if getattr(self, name) is not value]
        with patched(set_fields):
            put_on = self.put_on()
        return [*set_fields, *put_on[self.module.__dict__.get(STANDING) is self :]]

    @property
    def mode(self) -> str:
        """Mode of the product in the calls so far: its own, else the dtype of its operand, "" for
        that of the layer's input; that of ``otherwise`` after a call with an argument that is not
        known."""
        if self.otherwise is not None and ran_own(self.module):
            return self.otherwise.mode
        product = getattr(self.product, "__self__", None)
        return getattr(product, "mode", "") or (name_of(self.operand) if self.operand else "")

    def __repr__(self) -> str:
        """List what a call of the layer runs, in order."""
        steps = [f"operand {name_of(self.operand)}"] if self.operand else []
        product: object = getattr(self.product, "__self__", self.product)
        steps += [getattr(each, "__name__", type(each).__name__) for each in (self.sums, product) if each is not None]
        if self.result is not None:
            steps.append(f"result {name_of(self.result) if isinstance(self.result, torch.dtype) else self.result}")
        return ", ".join(steps if self.adds is None else [*steps, type(self.adds).__name__])


def with_frame(module: torch.nn.Module, frame: Watch) -> list[Patch]:
    """Return the patches by which every call of a module, a layer or another, runs through
    ``frame``."""
    if kind_of(module) is None:
        return watched_forward(module, frame)
    return LayerForward.on(module).with_fields(frame=frame)
