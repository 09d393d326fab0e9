"""Keep what a wrapper learns of each model it runs, for as long as the model lives, apart for each state of the model."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from .modules import has_own_forward

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

KEPT = 4


class ModelRun(Protocol):
    """What a wrapper learned of one model. ``modules``: the modules it patches by name."""

    modules: dict[str, torch.nn.Module]


Run = TypeVar("Run", bound=ModelRun)


class PerModel(Generic[Run]):
    """Cache the runs of one wrapper by the state of the model.

    Args:
        make: builds the run of a model as it is now.
        settings: extra cache key of a ModelPatcher, compared for equality. Weight patches, active hooks and the forwards
            found on the run's modules are always part of the key.
    """

    def __init__(self, make: Callable[[torch.nn.Module], Run], settings: Callable[["ModelPatcher"], tuple] = lambda _: ()):
        self._make = make
        self._settings = settings
        self._runs: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[tuple, Run]]] = weakref.WeakKeyDictionary()

    def of(self, model: torch.nn.Module) -> Run:
        """The run for the model as it is now; the last few states are remembered."""
        runs = self._runs.setdefault(model, [])
        for index, (state, run) in enumerate(runs):
            if state == self._state(model, run):
                runs.insert(0, runs.pop(index))
                return run
        run = self._make(model)
        runs.insert(0, (self._state(model, run), run))
        del runs[KEPT:]
        return run

    def last(self, model: torch.nn.Module) -> Run | None:
        """The run of the model's last call, if it made one."""
        runs = self._runs.get(model)
        return runs[0][1] if runs else None

    def _state(self, model: torch.nn.Module, run: Run) -> tuple:
        patcher = model.current_patcher
        # By identity: they belong to a wrapper around this one or to a LoRA in bypass mode (comfy/weight_adapter/bypass.py).
        forwards = [id(module.__dict__["forward"]) for module in run.modules.values() if has_own_forward(module)]
        return model.current_weight_patches_uuid, hooks_of(patcher), *self._settings(patcher), forwards


def hooks_of(patcher) -> weakref.ref | None:
    """Return a weak reference to the active hooks: they hold a LoRA's weights, and the key outlives them."""
    hooks = getattr(patcher, "current_hooks", None)
    return hooks and weakref.ref(hooks)
