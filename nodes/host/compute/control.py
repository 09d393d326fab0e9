"""A compute plan on the model of a ControlNet: ComfyUI calls that past all wrappers, so its own
forward sets and resets it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.patching import Patch, watched_forward
from ....precision.plan.compute import ComputePlan
from ..comfyui.attributes import OVERRIDE, casting
from ..replay.call import OPTIONS
from ..replay.interceptor import COMPUTE, in_calls, put_stage
from ..replay.seen import seeing
from .attention import overridden
from .executor import Compute

_signature = functools.cache(inspect.signature)


class PlannedControl(torch.nn.Module):
    """Run a ControlNet's model under a compute plan: this module replaces the forward of the model.

    ``current_patcher``: a ModelPatcher with the plan, for reports. ComfyUI loads the model by a
    ModelPatcher of its own, and creates another one for a copy on another device. ``calls``: number
    of runs of the ControlNet and its copies on other devices, the only item of a list that they
    share.

    The model and this module refer to each other; garbage collection frees both after ComfyUI drops
    the ControlNet."""

    def __init__(self, module: torch.nn.Module, plan: ComputePlan, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.diffusion_model = module
        self.manual_cast_dtype = dtype
        self.calls = [0]
        self.current_patcher = ModelPatcher(self, device, device)
        self.compute = Compute(plan, False)
        put_stage(self.current_patcher, COMPUTE, self.compute)
        module.__dict__["forward"] = self

    def __deepcopy__(self, memo: dict) -> PlannedControl:
        """Copy the plan for a copy of the model on another device (``deepclone_multigpu`` in
        comfy/controlnet.py)."""
        module = copy.deepcopy(self.diffusion_model, memo)
        copied = PlannedControl(module, self.compute.plan, self.manual_cast_dtype, self.current_patcher.load_device)
        copied.calls = self.calls
        for planned in (self, copied):
            planned.current_patcher.is_multigpu_base_clone = True  # threads run the copies side by side
        return copied

    def forward(self, *args, **kwargs):
        module = self.diffusion_model

        def patches() -> Iterator[Patch]:
            yield from run.patches
            if run.has_borders:
                yield from run.borders(self)
            if run.attend:
                yield from _attending(module, run.attend)
            if base := kwargs.get("base_model"):
                # Qwen-Image Fun's calls layers of the model it runs with (comfy/ldm/qwen_image/controlnet.py), with
                # activations in a dtype of its own.
                for part in base.modules():
                    yield from casting(part)

        with in_calls.of(self):
            self.calls[0] += 1
            run = self.compute.runs.of(self)
            with seeing(self, self.compute):
                return run.run(functools.partial(type(module).forward, module, *args, **kwargs), patches)


def _attending(module: torch.nn.Module, attend: Callable) -> Iterator[Patch]:
    """Yield the patches that give the blocks of a ControlNet's model an attention override: ComfyUI
    passes them no options (``get_control`` in comfy/controlnet.py)."""
    for part in module.modules():
        signature = _signature(type(part).forward)
        if OPTIONS in signature.parameters and part is not module:
            yield from watched_forward(part, functools.partial(_call, signature.bind, attend))


def _call(arguments: Callable, attend: Callable, forward: Callable, *args, **kwargs):
    bound = arguments(None, *args, **kwargs)  # of the class's function: None stands for ``self``
    options = bound.arguments.get(OPTIONS) or {}
    if OVERRIDE not in options:
        bound.arguments[OPTIONS] = overridden(options, attend)
    return forward(*bound.args[1:], **bound.kwargs)
