"""Restart a sampler's run from its first step, in the middle of the run.

The restart wraps everything that ComfyUI does once per run (``CFGGuider.outer_sample`` in
comfy/samplers.py), so the work of other packs there is repeated too: conditionings are processed
again, each sampler creates its state again, and noise, latent image and seed stay those of the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import comfy.samplers
import comfy.utils
import torch

from ....precision.base.message import Message
from ....precision.devices.random_start import RandomStart
from ..comfyui.code_owner import code_owner
from ..comfyui.page import show_progress
from .core_state import CoreState

SAMPLING = "halfsafe_sampling"
"""Entry of ``transformer_options`` with the :class:`Sampling` of a call."""
MOST_RESTARTS = 3
PLAIN_OPTIONS = (bool, int, float, str, torch.Tensor, type(None))


class StartAgain(BaseException):
    """Raised from a model's call to restart its sampling. Not an ``Exception``, so that no pack's
    ``except Exception`` catches it.

    ``precision``: name of the precision of the new run.
    """

    def __init__(self, sampling: Sampling, precision: str):
        super().__init__()
        self.sampling = sampling
        self.precision = precision


class Sampling:
    """One run of a sampler: the arguments of an OUTER_SAMPLE wrapper, its restarts, and what it
    changed.

    ``changed``: a function for each change of a model's arithmetic that a call of this run made,
    which undoes it.
    """

    def __init__(self, guider: comfy.samplers.CFGGuider, sampler: comfy.samplers.Sampler):
        self.can_start_again = _can_begin_anew(guider, sampler)
        self._guider = guider
        self._times = 0
        self.changed: list[Callable[[], object]] = []

    def __deepcopy__(self, memo: dict) -> Sampling:
        return self

    def take_back(self) -> bool:
        """Undo what the run changed, because it failed: the next run starts as this one did.
        Returns whether it changed anything."""
        changed, self.changed = self.changed, []
        for undo in reversed(changed):
            undo()
        return bool(changed)

    def run(self, executor: Callable, noise: torch.Tensor, latent_image, sampler, sigmas, *args, **kwargs):
        """Run the sampler, and restart it from its first step whenever a call requests it."""
        guider = self._guider
        conditionings, start = guider.conds, RandomStart.of(guider.model_patcher.load_device)
        # Keyframes of hooks pass over a step at the noise level of their last one, which ``reset``
        # in comfy/hooks.py leaves as it is: it resets ``curr_t`` in place of ``_curr_t``.
        groups = [one.get("hooks") for group in conditionings.values() for one in group]
        hooks = [hook for group in groups if group is not None for hook in group.hooks]
        others = CoreState({"keyframes": [hook.hook_keyframe for hook in hooks]})
        guider.model_options.setdefault("transformer_options", {})[SAMPLING] = self
        while True:
            guider.conds = {name: [copy.copy(each) for each in group] for name, group in conditionings.items()}
            try:
                return executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
            except StartAgain as again:
                if again.sampling is not self:
                    raise
                show_progress(Message("Starting the sampling again in {0}", again.precision))
            self._times += 1
            self.can_start_again = self._times < MOST_RESTARTS
            start.put_back()
            others.put_back()
            comfy.utils.ProgressBar(len(sigmas) - 1).update_absolute(0)


def _can_begin_anew(guider: comfy.samplers.CFGGuider, sampler: comfy.samplers.Sampler) -> bool:
    """True if guider and sampler are ComfyUI's own and received no object whose state advances with
    each draw."""
    if any(map(code_owner, (type(guider), type(sampler), getattr(sampler, "sampler_function", sampler)))):
        return False
    return all(isinstance(value, PLAIN_OPTIONS) for value in getattr(sampler, "extra_options", {}).values())
