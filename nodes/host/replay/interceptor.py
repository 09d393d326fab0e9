"""The one wrapper around a model's calls and the one around a sampler's run, for whatever nodes of Halfsafe are on it.

See docs/internals/how-a-call-runs.md for a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from .call import Call

HALFSAFE = "halfsafe"
REPORT = "halfsafe.report"
GUARD = "halfsafe.guard"
ACCUMULATION = "halfsafe.accumulation"
COMPUTE = "halfsafe.compute"
RUNGS = "halfsafe.rungs"
ANALYSIS = "halfsafe.analysis"
LOW_RANK = "halfsafe.low_rank"
AROUND_CALLS = (GUARD, ACCUMULATION, COMPUTE, RUNGS, ANALYSIS, LOW_RANK)
"""The stages around a model's call, from the outermost in; wrappers of other packs stand inside of all of them.

A stage that stands further in exchanges a layer's forward later, around the forward that it finds, and what a stage
finds is behind a gate (``gate.py``) where ComfyUI folds more than an input into a layer's call. From the outside in,
these run a layer:

1. ``LowRankLayer``, the LoRAs of an 8-bit weight, which calls the next one and adds to its result;
2. ``CastResult`` of a rung (``guard/escalation.py``) or of compute, around ``SafeOperation`` or ``Fp8Linear``, which
   multiply by themselves, or around ``CastOperation``, which casts the input and calls
3. ``Fp16AccumulationLinear`` of accumulation, so an fp16 bound is checked on the input as it is multiplied; and that
   calls
4. the layer's own: ComfyUI's, or one that a LoRA in bypass mode put on it.

A rung that decides about a layer calls neither compute's forward nor accumulation's. Compute and accumulation read a
layer's forward once, when they are made: when a forward below is exchanged later, ``per_model.PerModel`` finds another
state and makes another run.
"""
AROUND_SAMPLING = (REPORT, LOW_RANK, GUARD, COMPUTE)
"""The stages around a sampler's run, from the outermost in. Where several exchange how a text becomes conditions
(``execution.conditions_through``), what is set first runs last: LoRAs are innermost there too."""

Run = Callable[[Call], torch.Tensor]


class Stage:
    """What one node of Halfsafe does around the calls of a model and around a sampler's run."""

    def around_call(self, run: Run, call: Call) -> torch.Tensor:
        """Make a call of the model with ``run``, which is the next stage; it may be run again."""
        return run(call)

    def around_sampling(self, executor: Callable, *args, **kwargs):
        """Run a sampler with ``executor``, the next stage; the arguments are those of ``CFGGuider.outer_sample``."""
        return executor(*args, **kwargs)


class Interceptor:
    """ComfyUI's wrappers for all stages of one patcher. It is not changed after it is made: clones share it."""

    def __init__(self, stages: Mapping[str, Stage]):
        self.stages = dict(stages)
        self._run: Run = Call.run
        for name in reversed(self._defining("around_call", AROUND_CALLS)):
            self._run = partial(self.stages[name].around_call, self._run)

    def _defining(self, method: str, order: tuple[str, ...]) -> list[str]:
        defined = (name for name in order if name in self.stages)
        return [name for name in defined if getattr(type(self.stages[name]), method) is not getattr(Stage, method)]

    def __call__(self, executor: Callable, *args, **kwargs) -> torch.Tensor:
        """Wrap a model's call (ComfyUI's APPLY_MODEL)."""
        return self._run(Call(executor, *args, **kwargs))

    def sampling(self, executor: Callable, *args, **kwargs):
        """Wrap a sampler's run (ComfyUI's OUTER_SAMPLE)."""
        for name in reversed(self._defining("around_sampling", AROUND_SAMPLING)):
            executor = _Executor(self.stages[name].around_sampling, executor)
        return executor(*args, **kwargs)

    def __repr__(self) -> str:
        calls = " > ".join(self._defining("around_call", AROUND_CALLS))
        sampling = " > ".join(self._defining("around_sampling", AROUND_SAMPLING))
        return f"Interceptor(calls: {calls}; sampling: {sampling})"


class _Executor:
    """ComfyUI's executor of the wrappers further in, or a stage around it. ``class_obj``: the guider."""

    def __init__(self, around: Callable, executor: Callable):
        self.class_obj = executor.class_obj  # type: ignore[attr-defined]
        self._run = partial(around, executor)

    def __call__(self, *args, **kwargs):
        return self._run(*args, **kwargs)


def interceptor_of(patcher: ModelPatcher) -> Interceptor:
    """Return the interceptor on a patcher; one without stages for a patcher that has none."""
    found = patcher.get_wrappers(WrappersMP.APPLY_MODEL, HALFSAFE)
    return found[0] if found else Interceptor({})


def put_stage(patcher: ModelPatcher, name: str, stage: Stage) -> None:
    """Put a stage on a patcher, instead of an earlier one with that name."""
    _put(patcher, {**interceptor_of(patcher).stages, name: stage})


def take_stages(patcher: ModelPatcher, *names: str) -> None:
    """Take the stages with these names off a patcher."""
    _put(patcher, {name: stage for name, stage in interceptor_of(patcher).stages.items() if name not in names})


def _put(patcher: ModelPatcher, stages: Mapping[str, Stage]) -> None:
    interceptor = Interceptor(stages)
    for kind, wrapper in ((WrappersMP.APPLY_MODEL, interceptor), (WrappersMP.OUTER_SAMPLE, interceptor.sampling)):
        patcher.remove_wrappers_with_key(kind, HALFSAFE)
        if stages:
            patcher.add_wrapper_with_key(kind, HALFSAFE, wrapper)
            around = patcher.wrappers[kind]
            patcher.wrappers[kind] = {HALFSAFE: around.pop(HALFSAFE), **around}  # the first is the outermost
