"""Note which ControlNets that were loaded here ran with which model."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfy_execution.progress import ProgressRegistry, get_progress_state

from ....precision.plan.choice import LoadRecord
from ..compute.control import PlannedControl, planned_control

if TYPE_CHECKING:
    from comfy.controlnet import ControlNet
    from comfy.model_base import BaseModel

_runs: weakref.WeakKeyDictionary[BaseModel, Runs] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class LoadedControl:
    """A ControlNet that was loaded here, with all of its copies.

    Attributes:
        cls: the name of ComfyUI's class.
        record: what was decided when it was loaded.
        planned: its planned model; None where ComfyUI runs it as it is.
    """

    cls: str
    record: LoadRecord
    planned: PlannedControl | None


@dataclass(frozen=True)
class Runs:
    """The ControlNets of a model's runs in a prompt. ComfyUI has a progress registry for each prompt."""

    prompt: weakref.ref[ProgressRegistry]
    controls: weakref.WeakKeyDictionary[LoadedControl, None]


def note_runs(control: ControlNet, record: LoadRecord) -> None:
    """Note the models of all later runs of a ControlNet and its copies."""
    _follow(control, LoadedControl(type(control).__name__, record, planned_control(control)))


def loaded_control(control: ControlNet) -> LoadedControl:
    """Return the record of a ControlNet that was loaded here, also of a copy."""
    return vars(control)["halfsafe"]


def controls_of(model: BaseModel) -> list[LoadedControl]:
    """Return the ControlNets still in use that a model was sampled with, in the order of their first runs."""
    runs = _runs.get(model)
    return list(runs.controls) if runs else []


def _follow(control: ControlNet, loaded: LoadedControl) -> ControlNet:
    """Set methods on the object itself, which they hold: it is freed by the garbage collection after its last use."""
    # Its class stays ComfyUI's: other packs ask for ``type(control) == ControlNet``.
    vars(control).update(
        halfsafe=loaded,
        pre_run=functools.partial(_pre_run, control, loaded),
        copy=functools.partial(_copy, control, loaded),
    )
    return control


def _pre_run(control: ControlNet, loaded: LoadedControl, model: BaseModel, *args: Any) -> None:
    """Note the model that a sampler gives to each ControlNet of its conditions, then do as ComfyUI does."""
    # ``pre_run_control`` in comfy/samplers.py; the call of a ControlNet's own model does not say which model it is for.
    _runs_in_prompt(model).controls[loaded] = None
    type(control).pre_run(control, model, *args)


def _runs_in_prompt(model: BaseModel) -> Runs:
    """Return what ran with a model in the running prompt; a new prompt begins anew."""
    prompt, runs = get_progress_state(), _runs.get(model)
    if runs is None or runs.prompt() is not prompt:
        runs = _runs[model] = Runs(weakref.ref(prompt), weakref.WeakKeyDictionary())
    return runs


def _copy(control: ControlNet, loaded: LoadedControl) -> ControlNet:
    """Copy a ControlNet as ComfyUI does for every node, with the methods of :func:`_follow`."""
    return _follow(type(control).copy(control), loaded)
