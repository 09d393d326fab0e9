"""Repeat one call of the denoiser, each time with everything the call before it changed put back."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ....precision.nested import replaced
from ..core import empty_prefix_cache, forget_call
from . import model_compiler, step_caches
from .step_caches import KeptByPatches

if TYPE_CHECKING:
    from comfy.model_base import BaseModel


class Call:
    """Hold the arguments of an APPLY_MODEL wrapper, those of ``BaseModel.apply_model``; calling it runs the model.

    ``options``: ``transformer_options``; ``model``: the model it runs.

    EasyCache (``comfy_extras/nodes_easycache.py``) keeps each call's result to replace a later one; its state is
    restored before a repeat, so that the repeat sees what the first call saw. Other caches: see ``step_caches``.
    """

    # The arguments of ComfyUI's APPLY_MODEL wrappers, by its names (``apply_model`` in comfy/model_base.py).
    def __init__(
        self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **extra
    ):
        self.executor: Callable = executor
        self.model: BaseModel = executor.class_obj
        self.x: torch.Tensor = x
        self.t: torch.Tensor = t
        self.c_concat: torch.Tensor | None = c_concat
        self.c_crossattn: torch.Tensor | None = c_crossattn
        self.control: dict | None = control
        self.options: dict = transformer_options or {}
        self.extra: dict = extra
        self._made = False
        self._cache = self.options.get("easycache")
        self._before = None if self._cache is None else _copied(vars(self._cache))
        self._kept = KeptByPatches(self.options)

    def __call__(self, **options) -> torch.Tensor:
        """Make the call, with ``options`` added to its ``transformer_options``."""
        if not self._made:
            self._made = True
            return self._run(options)
        if self._cache is not None:
            vars(self._cache).update(_copied(self._before))
            self.forget_dtype()
        # A call that was not finite has filled it with NaN.
        empty_prefix_cache(self.model.diffusion_model)
        return self.apart(options)

    def apart(self, options: dict) -> torch.Tensor:
        """Make the call as a repeat that reads and leaves nothing in the caches of models and nodes, and without
        ComfyUI's model compiler."""
        self._kept.restore()
        try:
            with model_compiler.compiler_off():
                return self._run({**step_caches.OFF, **options})
        finally:
            self._kept.restore()

    def _run(self, options: dict) -> torch.Tensor:
        arguments = (self.x, self.t, self.c_concat, self.c_crossattn, _fresh(self.control), {**self.options, **options})
        try:
            return self.executor(*arguments, **self.extra)
        except BaseException:
            model_compiler.after_failure()
            raise

    def replaced(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Call":
        """Return a copy of the call with ``function`` of each tensor that the model is given in its place."""
        call = copy.copy(self)
        for name in ("x", "t", "c_concat", "c_crossattn", "control", "extra"):
            setattr(call, name, replaced(getattr(self, name), function))
        return call

    def forget_dtype(self) -> None:
        """Let the next call be in another dtype.

        EasyCache resets itself when its input's dtype changes, and that reset leaves it skipping all later steps.
        Without ``state_metadata`` it does not compare dtypes.
        """
        if self._cache is not None:
            forget_call(self._cache)


def _fresh(control: dict | None) -> dict | None:
    """Copy a ControlNet's lists of outputs: a UNet pops from them (``apply_control`` in ComfyUI's
    ``openaimodel.py``)."""
    if control is None:
        return None
    return {name: list(values) if isinstance(values, list) else values for name, values in control.items()}


def _copied(values: dict) -> dict:
    return {name: copy.copy(value) if isinstance(value, (dict, list)) else value for name, value in values.items()}
