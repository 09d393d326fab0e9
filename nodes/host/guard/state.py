"""What the guard knows of a model in one state of its weights: what runs wider, and what earlier runs showed."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....precision.base.dtypes import name_of
from ....precision.guard.localize import Origin
from ....precision.guard.policy import Escalation
from ..comfyui.execution import is_compiled
from ..comfyui.layers import matrix_layers
from ..compute.layer_modes import planned_modes_of, settings_of, stream_dtype
from ..compute.per_model import hooks_of, patches_of
from .escalation import EscalatedLayers

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

_learned: weakref.WeakKeyDictionary["BaseModel", dict[tuple, Escalation]] = weakref.WeakKeyDictionary()


def learned_of(model: "BaseModel") -> dict[tuple, Escalation]:
    """Return the findings of guards on a model: state of the model -> escalation. They live as long as the model, as a
    guard lasts no longer than its node's result."""
    return _learned.setdefault(model, {})


class Guarded:
    """A model in a state of its weights.

    Args:
        model: ComfyUI's BaseModel.
        recall: begin with what any guard has learned of the model; for a guard that may change what runs.
    """

    def __init__(self, model: "BaseModel", recall: bool):
        patcher = model.current_patcher
        self.model = weakref.ref(model)
        self.modules = dict(model.diffusion_model.named_modules())
        multiplying = {name for name, _ in matrix_layers(model)}
        self.modes = {name: mode for name, mode in planned_modes_of(patcher).items() if name in multiplying}
        self.stream = name_of(stream_dtype(patcher))
        self.watches_clamps = self.stream == "fp16" and not is_compiled(patcher)
        self.device = patcher.load_device
        self.escalation = Escalation()
        self.layers: EscalatedLayers | None = None
        if recall:
            self.grow(learned_of(model).get(_known_as(model), self.escalation))

    def grow(self, escalation: Escalation) -> None:
        """Run with this escalation from now on."""
        if escalation != self.escalation:
            self.escalation, self.layers = escalation, EscalatedLayers(escalation, self.model(), self.modes)

    def remember(self, escalation: Escalation) -> Callable[[], None]:
        """Run with this escalation from now on, in later runs of the model too. Returns a function to take it back."""
        model, before = self.model(), (self.escalation, self.layers)
        learned, state = learned_of(model), _known_as(model)
        self.grow(escalation)
        learned[state] = escalation

        def take_back() -> None:
            self.escalation, self.layers = before
            learned[state] = self.escalation

        return take_back

    def modes_at(self, origin: Origin | None) -> tuple[str, str]:
        """Return (mode by itself, mode now) of the layer that failed, or of the values between layers."""
        layer = origin.layer if origin else ""
        own = self.modes.get(layer, self.stream)
        if layer not in self.modes:
            return own, "fp32" if self.escalation else own
        return own, self.layers.modes().get(layer, own) if self.layers else own


def _known_as(model: "BaseModel") -> tuple:
    """Build the key under which an escalation is remembered: weight patches, hooks, compute plan, dtype."""
    patcher = model.current_patcher
    return patches_of(patcher), hooks_of(patcher), *settings_of(patcher)
