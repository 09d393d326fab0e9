"""The one wrapper around a model's calls and the one around a sampler's run, for whatever nodes of Halfsafe are on it.

See docs/internals/how-a-call-runs.md for a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....precision.arithmetic.calibration import until_it_stands
from .call import Call

HALFSAFE = "halfsafe"
REPORT = "halfsafe.report"
GUARD = "halfsafe.guard"
ACCUMULATION = "halfsafe.accumulation"
COMPUTE = "halfsafe.compute"
RUNG = "halfsafe.rung"
ANALYSIS = "halfsafe.analysis"
LOW_RANK = "halfsafe.low_rank"
IN_CALLS = (ACCUMULATION, COMPUTE, RUNG, ANALYSIS, LOW_RANK)
"""The stages that act in a call, from the outermost in. The guard is around all of them, wrappers of other packs
are inside of all of them. ``RUNG`` is the arithmetic that a call carries.

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


class Acting:
    """What a stage does in one call of a model; by itself nothing. ``everywhere``: it decides about every layer."""

    everywhere = False

    def begin_call(self) -> None:
        """Begin a call, which may take several attempts."""

    def take_back(self) -> None:
        """Take back what the attempts at a call have changed in vain: the call failed."""

    def end_call(self) -> None:
        """End a call, whether it failed or not."""

    def attempt(self, call: Call) -> AbstractContextManager:
        """Put on layers and attention what the stage exchanges, for the length of one attempt."""
        return nullcontext()

    def stands(self, result: torch.Tensor) -> bool:
        """Look at what an attempt computed. Returns False if the call is to be made again."""
        return True

    def goes_on_after(self, error: RuntimeError) -> bool:
        """Tell whether the call is to be made again after an attempt that raised an error."""
        return False


class Stage:
    """What one node of Halfsafe does around the calls of a model and around a sampler's run; by itself nothing."""

    def around_call(self, run: Run, call: Call) -> torch.Tensor:
        """Make a call with ``run``, which may be called again. The guard alone stands around calls."""
        return run(call)

    def in_call(self, call: Call) -> Acting | None:
        """Return what acts in a call; asked for with the outer stages' forwards on the layers."""
        return None

    def around_sampling(self, executor: Callable, *args, **kwargs):
        """Run a sampler with ``executor``, the next stage; the arguments are those of ``CFGGuider.outer_sample``."""
        return executor(*args, **kwargs)


class _RungStage(Stage):
    def in_call(self, call: Call) -> Acting | None:
        return call.rung


class Interceptor:
    """ComfyUI's wrappers for all stages of one patcher. It is not changed after it is made: clones share it."""

    def __init__(self, stages: Mapping[str, Stage]):
        self.stages = dict(stages)
        self._guard = self.stages.get(GUARD, Stage())
        known = {RUNG: _RungStage(), **self.stages} if GUARD in self.stages else self.stages
        self._in_calls = {name: known[name] for name in IN_CALLS if name in known}
        self._sampling = {name: self.stages[name] for name in AROUND_SAMPLING if name in self.stages}

    def __call__(self, executor: Callable, *args, **kwargs) -> torch.Tensor:
        """Wrap a model's call (ComfyUI's APPLY_MODEL)."""
        if not self._in_calls:
            return executor(*args, **kwargs)
        return self._guard.around_call(self.run, Call(executor, *args, **kwargs))

    def run(self, call: Call) -> torch.Tensor:
        """Make a call under all stages, again as long as one of them asks for it, the innermost first.

        A GPU is waited for after an attempt: it computes while forwards are put back.
        """
        acting: dict[str, Acting] = {}

        def attempt() -> torch.Tensor:
            with ExitStack() as on:
                self._put_on(call, acting, on)
                return call.run()

        return until_it_stands(acting.values(), attempt)

    def _put_on(self, call: Call, acting: dict[str, Acting], on: ExitStack) -> None:
        """Put on the model what each stage exchanges, from the outermost in: a stage is asked for what acts with the
        forwards of the outer ones on the layers."""
        for name, stage in self._in_calls.items():
            if name not in acting:
                found = stage.in_call(call)
                if found is None:
                    continue
                found.begin_call()
                acting[name] = found
            on.enter_context(acting[name].attempt(call))

    def sampling(self, executor: Callable, *args, **kwargs):
        """Wrap a sampler's run (ComfyUI's OUTER_SAMPLE)."""
        for stage in reversed(self._sampling.values()):
            executor = _Executor(stage.around_sampling, executor)
        return executor(*args, **kwargs)

    def __repr__(self) -> str:
        around = [name for name in self.stages if name == GUARD]
        return f"Interceptor(calls: {' > '.join([*around, *self._in_calls])}; sampling: {' > '.join(self._sampling)})"


class _Executor:
    """ComfyUI's executor of the wrappers further in, or a stage around it. ``class_obj``: the guider."""

    def __init__(self, around: Callable, executor: Callable):
        self.class_obj = executor.class_obj  # type: ignore[attr-defined]
        self._around, self._executor = around, executor

    def __call__(self, *args, **kwargs):
        return self._around(self._executor, *args, **kwargs)


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
