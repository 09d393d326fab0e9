"""Start a run of a sampler again from its first step, in the midst of it.

Around everything that ComfyUI does once per run (``CFGGuider.outer_sample`` in comfy/samplers.py), so that what packs
do there is done again too: the conditionings are processed anew, each sampler makes its own state anew, and noise,
latent image and seed are those of the run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import comfy.samplers
import comfy.utils
import torch

from ....precision.guard.random_start import RandomStart
from .code_owner import code_owner
from .core_state import CoreState

SAMPLING = "halfsafe_sampling"
"""The entry of ``transformer_options`` with the :class:`Sampling` that a call is of."""
MOST_RESTARTS = 3
PLAIN_OPTIONS = (bool, int, float, str, torch.Tensor, type(None))
NOT_HERE = "its calls are not of a sampler's run"
OTHERS_GUIDER = "its guider is of another pack"
OTHERS_SAMPLER = "its sampler is of another pack"
KEEPS_STATE = "its sampler was given something that goes on with each draw"
TOO_OFTEN = f"it was started again {MOST_RESTARTS} times"


class StartAgain(BaseException):
    """Raised out of a model's call: its sampling starts again. No ``except Exception`` of a pack may take it.

    ``undo``: takes back what was changed for the new run, if that run does not come to its end.
    """

    def __init__(self, sampling: Sampling, undo: Callable[[], None] = lambda: None):
        super().__init__()
        self.sampling, self.undo = sampling, undo


class Sampling:
    """One run of a sampler. ``obstacle``: why it cannot be started again; empty where it can."""

    def __init__(self, guider: comfy.samplers.CFGGuider, sampler: comfy.samplers.Sampler):
        self.obstacle = _obstacle(guider, sampler)
        self._guider = guider
        self._times = 0
        self._undo: list[Callable[[], None]] = []

    def __deepcopy__(self, memo: dict) -> Sampling:
        return self

    def run(self, executor: Callable, *args, **kwargs):
        """Run the sampler, from its first step for as often as a call asks for it."""
        try:
            return self._run(executor, *args, **kwargs)
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            raise

    def _run(self, executor: Callable, noise: torch.Tensor, latent_image, sampler, sigmas, *args, **kwargs):
        guider = self._guider
        conditionings, start = guider.conds, RandomStart.of(guider.model_patcher.load_device)
        others = CoreState({})
        guider.model_options.setdefault("transformer_options", {})[SAMPLING] = self
        while True:
            guider.conds = {name: [copy.copy(each) for each in group] for name, group in conditionings.items()}
            try:
                return executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
            except StartAgain as again:
                if again.sampling is not self:
                    raise
                self._undo.append(again.undo)
            self._times += 1
            self.obstacle = TOO_OFTEN if self._times == MOST_RESTARTS else ""
            start.put_back()
            others.put_back()
            comfy.utils.ProgressBar(len(sigmas) - 1).update_absolute(0)


def _obstacle(guider: comfy.samplers.CFGGuider, sampler: comfy.samplers.Sampler) -> str:
    if code_owner(type(guider)):
        return OTHERS_GUIDER
    if code_owner(type(sampler)) or code_owner(getattr(sampler, "sampler_function", sampler)):
        return OTHERS_SAMPLER
    given = getattr(sampler, "extra_options", {}).values()
    return "" if all(isinstance(value, PLAIN_OPTIONS) for value in given) else KEEPS_STATE
