"""Compute plan on the model of a ControlNet. ComfyUI calls this model without wrappers, so its forward applies and
removes the plan."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import comfy.utils
import torch
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher

from ....precision.base.patching import Patch
from ....precision.plan.compute import ComputePlan
from ..comfyui.attributes import casting, set_control_dtype, weight_state
from .attention import OVERRIDE, overridden
from .executor import Compute, set_compute

OPTIONS = "transformer_options"


def plan_control(control: ControlNet, plan: ComputePlan, dtype: torch.dtype) -> None:
    """Run a newly loaded ControlNet under a plan, with activations in ``dtype``. Later copies share its model and
    ModelPatcher."""
    set_control_dtype(control, dtype)
    control.control_model.dtype = dtype  # ComfyUI casts inputs to it (``get_control`` in comfy/controlnet.py)
    patcher = control.control_model_wrapped
    runs = set_compute(patcher, plan)  # refused on a ComfyUI whose calls are not known
    control.control_model.__dict__["forward"] = PlannedControl(control.control_model, patcher, runs, dtype)


def planned_control(control: Any) -> PlannedControl | None:
    """Return the planned model of a ControlNet; None if ComfyUI loaded it or runs it unchanged."""
    forward = vars(getattr(control, "control_model", None) or control).get("forward")
    return forward if isinstance(forward, PlannedControl) else None


class PlannedControl:
    """Forward of a ControlNet's model under a plan. Plans and reports use it in place of ComfyUI's ``BaseModel``.

    It is an attribute of the model, so it keeps only weak references to the model and its patcher. The ControlNet
    object itself is in a cycle (``_follow`` in ``load/controlnet.py``), so all three are freed by garbage collection
    after ComfyUI drops it.
    ``calls``: number of runs of the ControlNet, including its copies on other devices.
    """

    def __init__(self, module: torch.nn.Module, patcher: ModelPatcher, plan: ComputePlan, dtype: torch.dtype):
        self._module, self._patcher = weakref.ref(module), weakref.ref(patcher)
        self.compute = Compute(plan)
        self.manual_cast_dtype = dtype
        self.has_copies = False
        self._calls = [0]

    def __deepcopy__(self, memo: dict) -> PlannedControl:
        """Copy the plan for a copy of the model on another device (``deepclone_multigpu`` in comfy/controlnet.py)."""
        module = copy.deepcopy(self.diffusion_model, memo)
        copied = PlannedControl(module, self._patcher(), self.compute.plan, self.manual_cast_dtype)
        copied._calls = self._calls
        copied.has_copies = True
        self.has_copies = True
        return copied

    @property
    def calls(self) -> int:
        return self._calls[0]

    @property
    def diffusion_model(self) -> torch.nn.Module:
        return self._module()

    @property
    def current_patcher(self) -> ControlPatcher:
        return ControlPatcher(self._patcher(), self)

    @property
    def current_weight_patches_uuid(self):
        return weight_state(self.diffusion_model)

    def get_dtype(self) -> torch.dtype:
        return self.manual_cast_dtype

    def __call__(self, *args, **kwargs):
        self._calls[0] += 1
        module = self.diffusion_model
        run = self.compute.runs.of(self)
        patches = [*run.patches]
        if run.attend:
            patches += _attending(module, run.attend)
        if base := kwargs.get("base_model"):
            # Qwen-Image Fun's calls layers of the model it runs with (comfy/ldm/qwen_image/controlnet.py), with
            # activations in a dtype of its own.
            patches += [patch for part in base.modules() for patch in casting(part)]
        return run.run(functools.partial(type(module).forward, module, *args, **kwargs), lambda: patches)


class ControlPatcher:
    """ModelPatcher of a planned ControlNet, with a ``model`` like that of a diffusion model."""

    def __init__(self, patcher: ModelPatcher, model: PlannedControl):
        self._patcher = patcher
        self.model = model

    @property
    def is_multigpu_base_clone(self) -> bool:  # threads run a ControlNet's copies side by side
        return self.model.has_copies

    def __getattr__(self, name: str):
        return getattr(self._patcher, name)

    def get_model_object(self, name: str):
        return comfy.utils.get_attr(self.model, name)


def _attending(module: torch.nn.Module, attend: Callable) -> Iterator[Patch]:
    # ComfyUI passes the blocks of a ControlNet's model no options (``get_control`` in comfy/controlnet.py).
    for part in module.modules():
        if part is not module and OPTIONS in _signature(type(part).forward).parameters:
            yield part, "forward", _with_attention(part, attend)


@functools.cache
def _signature(forward: Callable) -> inspect.Signature:
    return inspect.signature(forward)


def _with_attention(part: torch.nn.Module, attend: Callable) -> Callable:
    forward, arguments = part.forward, _signature(type(part).forward).bind

    def run(*args, **kwargs):
        bound = arguments(part, *args, **kwargs)
        options = bound.arguments.get(OPTIONS) or {}
        bound.arguments[OPTIONS] = options if OVERRIDE in options else overridden(options, attend)
        return forward(*bound.args[1:], **bound.kwargs)

    return run
