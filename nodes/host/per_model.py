"""What a wrapper learns of each model it runs: kept for as long as the model lives, apart for each state of its weights."""

import weakref
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

KEPT = 4
Run = TypeVar("Run")


class PerModel(Generic[Run]):
    """The runs of one wrapper.

    Args:
        make: gives the run of a model as it is now. A run has ``modules``, the modules it is about.
        state: of a model and such modules, what a run depends on; compared for equality.
    """

    def __init__(self, make: Callable[[torch.nn.Module], Run], state: Callable[[torch.nn.Module, Iterable], object]):
        self._make = make
        self._state = state
        self._runs: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[object, Run]]] = weakref.WeakKeyDictionary()

    def of(self, model: torch.nn.Module) -> Run:
        """The run for the model as it is now; the last few states are remembered."""
        runs = self._runs.setdefault(model, [])
        for index, (state, run) in enumerate(runs):
            if state == self._state(model, run.modules.values()):
                runs.insert(0, runs.pop(index))
                return run
        run = self._make(model)
        runs.insert(0, (self._state(model, run.modules.values()), run))
        del runs[KEPT:]
        return run

    def last(self, model: torch.nn.Module) -> Run | None:
        """The run of the model's last call, if it made one."""
        runs = self._runs.get(model)
        return runs[0][1] if runs else None


def fresh_control(control: dict | None) -> dict | None:
    """A ControlNet's outputs for one more call: a UNet takes them out of their lists one by one."""
    if control is None:
        return None
    return {name: list(values) if isinstance(values, list) else values for name, values in control.items()}
