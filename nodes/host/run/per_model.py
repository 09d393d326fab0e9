"""What a wrapper learns of each model it runs: kept for as long as the model lives, apart for each state of its weights."""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from .modules import has_own_forward

KEPT = 4
Run = TypeVar("Run")


class PerModel(Generic[Run]):
    """The runs of one wrapper.

    Args:
        make: gives the run of a model as it is now. A run has ``modules``, name -> module of those it is about.
        settings: of a ModelPatcher, what a run depends on beside patched weights, active hooks and the forwards that
            others have put on its modules; compared for equality.
    """

    def __init__(self, make: Callable[[torch.nn.Module], Run], settings: Callable[[object], tuple] = lambda patcher: ()):
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
        forwards = [id(module.__dict__["forward"]) for module in run.modules.values() if has_own_forward(module)]
        return model.current_weight_patches_uuid, hooks_of(patcher), *self._settings(patcher), forwards


def hooks_of(patcher) -> weakref.ref | None:
    """The active hooks. They hold the weights of a LoRA, and what is learned outlives them, so by a reference that keeps nothing."""
    hooks = getattr(patcher, "current_hooks", None)
    return hooks and weakref.ref(hooks)
