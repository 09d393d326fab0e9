"""Run one call of the denoiser; before each repeat, restore the state that ComfyUI had before the
first run."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

import torch
from comfy.model_base import BaseModel
from comfy.patcher_extension import WrappersMP

from ....precision.base.nested import leaves, replaced
from ....precision.base.patching import Patch, patched
from ..comfyui.attributes import (
    OVERRIDE,
    POSE_CACHE,
    PREFIX_CACHE,
    STEP_METADATA,
    empty_caches,
)
from ..comfyui.code_owner import code_owner
from ..comfyui.execution import is_on_several_devices
from . import model_compiler
from .core_state import CoreState
from .restart import SAMPLING, Sampling

if TYPE_CHECKING:
    from .interceptor import Acting

OPTIONS = "transformer_options"
APPLY = ("x", "t", "c_concat", "c_crossattn", "control", OPTIONS)
CACHES_OFF = {PREFIX_CACHE: {"device": "off"}, POSE_CACHE: None}
"""Options that disable the text key and value cache of Qwen-Image 2.1
(``comfy/ldm/qwen_image21/model.py``, ComfyUI 0.37) and the pose video cache of Wan-Animate-2
(``comfy/ldm/wan/model_animate2.py``, 0.33): their keys contain no dtype, and both caches may be in
int8 or int4."""
RUN_AGAIN = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
"""Wrappers that run again in a repeat of a call; all others run outside calls."""
NO_PATCHES = ("wrappers", "callbacks", OVERRIDE)
"""Options that contain no patch of the model. An attention override is a kernel; repeats in a
higher precision and checks run ComfyUI's own kernel instead."""
FUNCTION_WRAPPER = "model_function_wrapper"


class Call:
    """Arguments of an APPLY_MODEL wrapper, those of ``BaseModel.apply_model``; :meth:`run` runs the
    model.

    ``places``: names of the arguments by place, as this ComfyUI has them. ``extra``: arguments that
    are handed on. ``options``: ``transformer_options`` without Halfsafe's entries. ``model``: the
    model. ``sampling``: the sampler run of this call, if a guard is on the model. ``before``:
    ComfyUI's state before the call, restored before each repeat. ``rung``: the arithmetic to run
    in; None for the planned one. ``entries``: make the patches of the parts of the model that may be
    compiled, put on last, around whatever stands there.
    """

    entries: Callable[[], Iterable[Patch]] = tuple

    def __init__(self, executor, *args, **kwargs):
        self.places = _places(executor.original.__func__)[: len(args)]
        given = dict(zip(self.places, args, strict=True)) | kwargs
        self.names = [name for name in {**kwargs, OPTIONS: None} if name not in self.places]
        self.executor: Callable = executor
        self.model: BaseModel = executor.class_obj
        self.x: torch.Tensor = given.pop("x")
        self.t: torch.Tensor = given.pop("t")
        self.c_concat: torch.Tensor | None = given.pop("c_concat", None)
        self.c_crossattn: torch.Tensor | None = given.pop("c_crossattn", None)
        self.control: dict | None = given.pop("control", None)
        self.options: dict = dict(given.pop(OPTIONS, None) or {})
        self.extra: dict = given
        self.sampling: Sampling | None = self.options.pop(SAMPLING, None)
        self.before: CoreState | None = None
        self.rung: Acting | None = None

    def run(self) -> torch.Tensor:
        """Run the model, inside the wrappers of other packs.

        The first run stores the state that ComfyUI keeps between calls. Each later run restores it
        and runs without what ComfyUI records of blocks; a repeat that fails restores it too.
        """
        again = self.before is not None
        if again:
            self.forget()
        else:
            self.before = CoreState(self.options)
        options = {**self.options, **CACHES_OFF} if again else dict(self.options)
        values = {"x": self.x, "t": self.t, "c_concat": self.c_concat, "c_crossattn": self.c_crossattn, **self.extra}
        values |= {"control": _fresh(self.control), OPTIONS: options}
        placed, named = (values[name] for name in self.places), {name: values[name] for name in self.names}
        try:
            repeating = model_compiler.repeating(self._is_alone()) if again else nullcontext()
            with repeating, patched(self.entries()):
                return self.executor(*placed, **named)
        except BaseException:
            model_compiler.after_failure()
            if again:
                self.forget()
            raise

    def _is_alone(self) -> bool:
        patcher = self.model.current_patcher
        return patcher is None or not is_on_several_devices(patcher)

    def forget(self) -> None:
        """Restore the state that ComfyUI had before the call."""
        # They hold pinned memory, which they free by themselves only.
        empty_caches(self.model.diffusion_model, self.options.get(POSE_CACHE))
        if self.before is not None:
            self.before.put_back()
        self.forget_dtype()

    def again(self, rung: Acting | None) -> Call:
        """Return a copy of the call, to run in another arithmetic."""
        call = copy.copy(self)
        call.rung = rung
        return call

    def replaced(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Return a copy of the call with ``function`` applied to each input tensor of the model."""
        call = copy.copy(self)
        for name in ("x", "t", "c_concat", "c_crossattn", "control", "extra"):
            setattr(call, name, replaced(getattr(self, name), function))
        return call

    def forget_dtype(self) -> None:
        """Allow the next call to use another dtype.

        EasyCache (``comfy_extras/nodes_easycache.py``) resets itself if its input's dtype changes,
        and after that reset it skips all later steps. Without metadata it compares neither dtypes
        nor sizes.
        """
        cache = self.options.get("easycache")
        if cache is not None:
            setattr(cache, STEP_METADATA, None)

    def sigma(self) -> float:
        """Return the noise level. Synchronizes with the device."""
        return float(self._sigma())

    def _sigma(self) -> torch.Tensor:
        return self.options.get("sigmas", self.t).flatten()[0].float()

    def step(self) -> int:
        """Return the index of the step in the sampler's schedule; 0 without a schedule.
        Synchronizes with the device."""
        schedule, sigma = self.options.get("sample_sigmas"), self._sigma()
        return int((schedule.to(sigma) - sigma).abs().argmin()) if schedule is not None else 0

    def images(self, result: torch.Tensor) -> int:
        """Return the number of images. A batch has one row per image and conditioning."""
        return max(1, result.shape[0] // max(1, len(self.options.get("cond_or_uncond") or [0])))

    def packs(self) -> list[str]:
        """List the packs whose code runs in the call and may keep state between calls."""
        return sorted(set(map(code_owner, self._code())) - {""})

    def _code(self) -> Iterator[object]:
        wrappers = self.options.get("wrappers", {})
        yield from (wrapper for kind in RUN_AGAIN for group in wrappers.get(kind, {}).values() for wrapper in group)
        patches = {name: value for name, value in self.options.items() if name not in NO_PATCHES}
        yield from (value for _, value in leaves(patches) if callable(value))
        patcher = self.model.current_patcher
        yield from filter(None, [patcher.model_options.get(FUNCTION_WRAPPER)])
        yield from (patch for patch in patcher.object_patches.values() if isinstance(patch, (FunctionType, MethodType)))
        for module in self.model.modules():  # what was put in place of its class's methods, and its hooks
            yield from (value for value in vars(module).values() if isinstance(value, (FunctionType, MethodType)))
            yield from (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


@functools.cache
def _places(apply_model: Callable) -> tuple[str, ...]:
    """Return the names of the arguments that ComfyUI gives its APPLY_MODEL wrappers by place: its
    own, or those of ``_apply_model`` in comfy/model_base.py of 0.30 if they lack what is used
    here."""
    parameters = inspect.signature(apply_model).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    return tuple(names) if {"x", "t", OPTIONS} <= {*names} else APPLY


def _fresh(control: dict | None) -> dict | None:
    # A UNet pops from a ControlNet's lists of outputs (``apply_control`` in ComfyUI's
    # ``openaimodel.py``).
    return control and {name: list(each) if isinstance(each, list) else each for name, each in control.items()}
