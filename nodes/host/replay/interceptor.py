"""The single wrapper around a model's calls and the one around a sampler's run, for all Halfsafe
nodes on the model.

See docs/internals/how-a-call-runs.md for a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TypeVar, cast

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....precision.arithmetic.calibration import until_it_stands
from ....precision.base.errors import TrainingRefused
from ....precision.base.patching import Turns
from ..comfyui.attributes import runs_again
from ..comfyui.execution import trains
from ..comfyui.page import errors_explained
from .call import Call
from .seen import forget, seeing

HALFSAFE = "halfsafe"
REPORT = "halfsafe.report"
GUARD = "halfsafe.guard"
ACCUMULATION = "halfsafe.accumulation"
COMPUTE = "halfsafe.compute"
RUNG = "halfsafe.rung"
ANALYSIS = "halfsafe.analysis"
LOW_RANK = "halfsafe.low_rank"
IN_CALLS = (ACCUMULATION, COMPUTE, RUNG, ANALYSIS, LOW_RANK)
"""The stages that act in a call, outermost first. The guard wraps all of them, and wrappers of
other packs run inside all of them. ``RUNG`` is the arithmetic that a call carries.

What a layer runs is the text of ``LayerForward.run`` (``comfyui/layer_forward.py``). An inner stage
acts later: it puts a ``LayerForward`` of its own in place of the one that stands on a layer
(compute, which keeps accumulation's sums; a rung, which keeps nothing of both), or sets fields of
the one that stands (LoRAs, who watches).

Compute and accumulation read what was found on a layer once, when they are created: if a forward
below is replaced later, ``per_model.PerModel`` finds another state and creates another run.
"""
AROUND_SAMPLING = (REPORT, LOW_RANK, GUARD, COMPUTE)
"""The stages around a sampler's run, outermost first. If several change how a text becomes
conditions (``execution.conditions_through``), the first one set runs last: LoRAs are innermost in
this case too."""
STAGES = tuple(dict.fromkeys((GUARD, *IN_CALLS, *AROUND_SAMPLING)))

RUNS_AGAIN = (
    "Train LoRA's gradient_checkpointing runs layers again in the backward pass, where NaN Guard's higher precision "
    "cannot act on them.",
    "Turn gradient_checkpointing off in Train LoRA, or choose another training_dtype.",
)

in_calls, in_runs = Turns(), Turns()
"""Turns of threads on a model: in its calls, and in a sampler's run of it. They are two, because
ComfyUI's MultiGPU calls a model in another thread than the one that runs the sampler."""

Run = Callable[[Call], torch.Tensor]


class Acting:
    """Part of a stage in one call of a model; the base class does nothing. ``everywhere``: it
    decides about every layer."""

    everywhere = False

    def begin_call(self) -> None:
        """Start a call, which may take several attempts."""

    def take_back(self) -> None:
        """Undo the changes of the attempts at a call that failed."""

    def attempt(self, call: Call) -> AbstractContextManager:
        """Return the context with the stage's patches of layers and attention for one attempt."""
        return nullcontext()

    def stands(self, result: torch.Tensor) -> bool:
        """Check the result of an attempt. Returns False if the call has to be repeated."""
        return True

    def goes_on_after(self, error: RuntimeError) -> bool:
        """True if the call is repeated after an attempt that raised ``error``."""
        return False


Kind = TypeVar("Kind", bound="Stage")


class Stage:
    """Part of one Halfsafe node around the calls of a model and around a sampler's run; the base
    class does nothing.

    ``acts``: False for a stage that changes no call; a patcher that has only such stages has no
    wrapper. ``name``: that of the stage on a patcher, for :meth:`on`.
    """

    acts = True
    name = ""

    @classmethod
    def on(cls: type[Kind], patcher: ModelPatcher) -> Kind | None:
        """Return the stage of this kind on a patcher, also one that does not act; None without
        it."""
        return cast("Kind | None", _stage_of(patcher, cls.name))

    def around_call(self, run: Run, call: Call) -> torch.Tensor:
        """Run a call with ``run``, which may be called several times. Only the guard overrides
        this."""
        return run(call)

    def in_call(self, call: Call) -> Acting | None:
        """Return the acting part for a call, or None; called after the outer stages patched the
        layers."""
        return None

    def acting(self, model) -> Stage:
        """Return the stage that runs a model's calls now: this one, or its fallback."""
        return self

    def around_sampling(self, executor: Callable, *args, **kwargs):
        """Run a sampler with ``executor``, the next stage; the arguments are those of
        ``CFGGuider.outer_sample``."""
        return executor(*args, **kwargs)


class _RungStage(Stage):
    def in_call(self, call: Call) -> Acting | None:
        if call.rung and trains() and any(map(runs_again, call.model.diffusion_model.modules())):
            raise TrainingRefused(*RUNS_AGAIN)
        return call.rung


class Interceptor:
    """ComfyUI's wrappers for all stages of one patcher. Immutable, because clones share it."""

    def __init__(self, stages: Mapping[str, Stage]):
        self.stages = dict(stages)
        self._guard = self.stages.get(GUARD, Stage())
        known = {RUNG: _RungStage(), **self.stages}
        self._in_calls = {name: known[name] for name in IN_CALLS if name in known}
        self._sampling = {name: self.stages[name] for name in AROUND_SAMPLING if name in self.stages}

    @classmethod
    def on(cls, patcher: ModelPatcher) -> Interceptor:
        """Return the interceptor of a patcher; one without stages if it has none."""
        found = patcher.get_wrappers(WrappersMP.APPLY_MODEL, HALFSAFE)
        return found[0] if found else cls({})

    def __call__(self, executor: Callable, *args, **kwargs) -> torch.Tensor:
        """Wrap a model's call (ComfyUI's APPLY_MODEL)."""
        model = executor.class_obj  # type: ignore[attr-defined]
        if self.stages.keys().isdisjoint((GUARD, *IN_CALLS)):
            with _seeing(model):
                return executor(*args, **kwargs)
        with in_calls.of(model):
            return self._guard.around_call(self.run, Call(executor, *args, **kwargs))

    def run(self, call: Call) -> torch.Tensor:
        """Run a call under all stages, and repeat it while one of them requests it; the innermost
        stage is asked first.

        The check of an attempt waits for the GPU only after the forwards were restored.
        """
        acting: dict[str, Acting] = {}

        def attempt() -> torch.Tensor:
            with ExitStack() as on:
                self._put_on(call, acting, on)
                return call.run()

        with nullcontext() if call.rung else _seeing(call.model):
            return until_it_stands(acting.values(), attempt)

    def _put_on(self, call: Call, acting: dict[str, Acting], on: ExitStack) -> None:
        """Apply the patches of each stage, outermost first: a stage is asked for its acting part
        after the outer stages patched the layers."""
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
        guider = executor.class_obj  # type: ignore[attr-defined]
        for stage in reversed(self._sampling.values()):
            executor = partial(stage.around_sampling, executor)
            executor.class_obj = guider  # type: ignore[attr-defined]  # as ComfyUI's executor has it
        with errors_explained(), in_runs.of(guider.model_patcher.model):
            forget(guider.model_patcher.model)
            return executor(*args, **kwargs)

    def __repr__(self) -> str:
        around = [name for name in self.stages if name == GUARD]
        return f"Interceptor(calls: {' > '.join([*around, *self._in_calls])}; sampling: {' > '.join(self._sampling)})"


def _seeing(model) -> AbstractContextManager[None]:
    patcher = model.current_patcher
    if patcher is None:  # another pack calls a model that no run has prepared
        return nullcontext()
    compute = _stage_of(patcher, COMPUTE)
    return seeing(model, compute and compute.acting(model))


def _stage_of(patcher: ModelPatcher, name: str) -> Stage | None:
    """Return the stage of this name on a patcher, whether it acts or not; None if there is none."""
    return patcher.attachments.get(name)


def put_stage(patcher: ModelPatcher, name: str, stage: Stage) -> None:
    """Add a stage to a patcher; it replaces a stage with the same name."""
    patcher.set_attachments(name, stage)
    _wrap(patcher)


def take_stages(patcher: ModelPatcher, *names: str) -> None:
    """Remove the stages with these names from a patcher."""
    for name in names:
        patcher.attachments.pop(name, None)
    _wrap(patcher)


def _wrap(patcher: ModelPatcher) -> None:
    """Put one interceptor of all stages that act around a patcher's calls; none without such a
    stage."""
    stages = {name: stage for name in STAGES if (stage := _stage_of(patcher, name)) and stage.acts}
    interceptor = Interceptor(stages)
    for kind, wrapper in ((WrappersMP.APPLY_MODEL, interceptor), (WrappersMP.OUTER_SAMPLE, interceptor.sampling)):
        patcher.remove_wrappers_with_key(kind, HALFSAFE)
        if stages:
            patcher.add_wrapper_with_key(kind, HALFSAFE, wrapper)
            around = patcher.wrappers[kind]
            patcher.wrappers[kind] = {HALFSAFE: around.pop(HALFSAFE), **around}  # the first is the outermost
