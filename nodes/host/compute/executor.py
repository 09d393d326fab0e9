"""A compute plan on a ModelPatcher: module forwards and attention are exchanged for the length of each model call."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.modes import INT8
from ....precision.base.patching import patched
from ....precision.plan.choice import WithoutEffect
from ....precision.plan.compute import ComputePlan
from ..comfyui.execution import Make, adapts_text, conditions_through
from ..comfyui.known_calls import Feature, why_off
from ..comfyui.layers import modules_of
from ..comfyui.page import running_node_id
from ..replay.call import Call
from ..replay.interceptor import COMPUTE, Acting, Stage, put_stage, take_stages
from .attention import attending, fuses_by_default, has_attention_patch, scores_in_fp32
from .per_model import PerModel
from .planned_model import PlannedModel, estimated_in_fp32
from .ruled_attention import NO_ATTENTION, NO_BLOCK, blocks_of, outermost

LISTED = 3
FAILED_ONCE = (
    "Model code failed with '{}', and not in a repeat whose layers return fp32, "
    "as they do as long as the model is loaded."
)
SPARED = (
    "The model was measured with less memory, as its first call ran out of it: layers share no operands, "
    "which takes a little longer."
)
_fell_back: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""The models whose plans run in their fallback: not told on the model, whose attributes a repeat puts back."""


def set_compute(patcher, plan: ComputePlan) -> "Compute":
    """Make ``patcher``, a clone or a model just loaded, run as planned, in place of an earlier plan. Return the plan's
    executor.

    A plan that exchanges nothing and has nothing to fall back to adds no wrapper. Nor does one of a ComfyUI whose calls
    are not known (``known_calls.py``): the model runs as ComfyUI has it, in the plan's activation dtype.
    """
    reason = why_off(Feature.LAYERS) if plan.exchanges or plan.fallback else ""
    plan = plan.refused(reason) if reason else plan
    compute = Compute(plan)
    patcher.set_attachments(COMPUTE, compute)
    if plan.exchanges or plan.fallback:
        put_stage(patcher, COMPUTE, compute)
    else:
        take_stages(patcher, COMPUTE)
    return compute


def planned_on(patcher) -> "Compute | None":
    """Return the plan's executor on a patcher as it was put there; None without a plan."""
    return patcher.attachments.get(COMPUTE)


def compute_of(patcher) -> "Compute | None":
    """Return the plan's executor that runs a patcher now, if it has one: its fallback's after an overflow."""
    compute = planned_on(patcher)
    return compute and compute.acting(patcher.model)


def may_fall_back(patcher) -> bool:
    """Tell whether a patcher's plan has a fallback, and its model does not run in that yet."""
    compute = planned_on(patcher)
    return compute is not None and compute.acting(patcher.model) is not compute.fallback is not None


@contextmanager
def fallen_back(model) -> Iterator[None]:
    """Run the plans of a model in their fallback while the context lasts."""
    _fell_back.add(model)
    try:
        yield
    finally:
        _fell_back.discard(model)


def fall_back(model) -> None:
    """Run the plans of a model in their fallback for as long as the model is loaded, whichever patcher it has."""
    _fell_back.add(model)


class ScoresInFp32(Acting):
    """Run unfused attentions with their scores in fp32, as plain fp16 of ``auto`` needs it."""

    def attempt(self, call: Call) -> AbstractContextManager:
        return attending(call.model, call, scores_in_fp32)


class Compute(Stage):
    """Run the calls of models under one plan. It keeps what it learns of each model it runs, not the model.

    ``node_id``: the node that planned, whose badge says what the plan became.
    """

    def __init__(self, plan: ComputePlan):
        self.plan = plan
        self.node_id = running_node_id()
        self.fallback = Compute(plan.fallback) if plan.fallback else None
        self.runs: PerModel[PlannedModel] = PerModel(lambda model: PlannedModel(plan, model, fp16_results=plan.is_safe))
        self.adapters: PerModel[PlannedModel] = PerModel(lambda model: PlannedModel(plan, model))

    def acting(self, model) -> "Compute":
        """Return what runs a model now: the fallback after an overflow, else this."""
        return self.fallback if self.fallback and model in _fell_back else self

    def in_call(self, call: Call) -> Acting | None:
        """Return the model under the plan, or under its fallback after an overflow; a rung that decides about every
        layer takes the plan's place."""
        if call.rung and call.rung.everywhere:
            return None
        acting = self.acting(call.model)
        if acting.plan.exchanges:
            planned = acting.runs.of(call.model)
            planned.hand_out(fp32=has_attention_patch(call.options))
            return planned
        in_fp16 = self.fallback and acting is self and not fuses_by_default()
        return ScoresInFp32() if in_fp16 else None

    def planned_modes(self, patcher: ModelPatcher) -> dict[str, str]:
        """Return layer -> planned mode; what layers cannot do is known from the first call on."""
        run = self.runs.last_of(patcher)
        modes: dict[str, str] = {name: decision.mode for name, decision in self.plan.decisions.items()}
        return modes | run.layers.planned_modes() if run else modes

    def observed_modes(self, patcher: ModelPatcher) -> dict[str, str]:
        """Return layer -> mode, as found in the calls made so far; planned before that."""
        run, adapter = self.runs.last_of(patcher), self.adapters.last_of(patcher)
        modes = self.planned_modes(patcher) | (run.layers.observed_modes() if run else {})
        if adapter is None:
            return modes
        ran = adapter.calibration.flops
        return modes | {name: mode for name, mode in adapter.layers.observed_modes().items() if ran[name]}

    def modes_by_device(self, patcher: ModelPatcher) -> dict[str, dict[str, str]]:
        """Return device -> layer -> mode, as found in the calls of each device that made some (MultiGPU)."""
        return {device: run.layers.observed_modes() for device, run in self.runs.by_device(patcher).items()}

    def around_sampling(self, executor, *args, **kwargs):
        """Run a sampler: what the model does with its text before its calls follows the plan too, and so does
        the memory that ComfyUI makes room for."""
        model = executor.class_obj.model_patcher.model
        estimate = estimated_in_fp32(model) if self.acting(model).plan.is_safe else []
        with patched(estimate):
            if not adapts_text(model):
                return executor(*args, **kwargs)
            with conditions_through(model, lambda make: self.acting(model).conditions(model, make)):
                return executor(*args, **kwargs)

    def conditions(self, model, make: Make) -> dict:
        """Make a text's conditions as the plan has it."""
        if not self.plan.exchanges:
            return make()
        run = self.adapters.of(model)
        # The text's one call in a run returns objects of ComfyUI's, which no look sees through.
        run.calibration.recalibrate()
        return run.run(make, run.patches_of_call)

    def ranges(self, patcher: ModelPatcher) -> dict[str, float]:
        """Return layer -> the largest magnitude of its operands, of the layers that met any."""
        run = self.runs.last_of(patcher)
        return run.calibration.largest() if run else {}

    @property
    def overrides_attention(self) -> bool:
        """Whether attention runs through an override of this plan's, past a kernel that the model's file asks for."""
        attends = self.plan.is_safe or self.plan.mixes_fp32_in or bool(self.plan.attention)
        return attends or (self.fallback is not None and not fuses_by_default())

    def attention_in_fp32(self, patcher: ModelPatcher) -> list[str]:
        """List the blocks whose attention ran in fp32 by a rule in the calls made so far."""
        run = self.runs.last_of(patcher)
        return outermost(run.ruled.ran_in) if run else []

    def idle_attention_rules(self, patcher: ModelPatcher) -> Iterator[WithoutEffect]:
        """Yield the rules on attention that match no block, or only blocks that made none."""
        blocks, run = blocks_of(self.plan.attention, modules_of(patcher.model)), self.runs.last_of(patcher)
        for rule in self.plan.attention:
            matched = outermost([name for name, rules in blocks.items() if rule in rules])
            if not matched:
                yield WithoutEffect(str(rule), NO_BLOCK)
            elif run and not any(rule in rules for rules in run.ruled.ran_in.values()):
                yield WithoutEffect(str(rule), NO_ATTENTION.format(", ".join(matched[:LISTED])))

    def notes(self, patcher: ModelPatcher) -> list[str]:
        """List the notes of the plan, on an error of model code that a repeat did not meet, and on short memory."""
        run = self.runs.last_of(patcher)
        notes = list(self.plan.notes)
        if run and run.calibration.error:
            notes.append(FAILED_ONCE.format(run.calibration.error))
        if run and run.calibration.spares_memory:
            notes.append(SPARED)
        return notes

    def not_called(self, patcher: ModelPatcher) -> frozenset[str]:
        """Return the layers with a plan that the call which measured ranges did not call; none before such a call."""
        run, adapter = self.runs.last_of(patcher), self.adapters.last_of(patcher)
        if run is None or not run.calibration.flops:
            return frozenset()
        of_adapter = adapter.calibration.flops if adapter else {}
        called = {name for flops in (run.calibration.flops, of_adapter) for name, count in flops.items() if count}
        return frozenset({*run.layers.operations, *run.layers.casts} - called)

    def fp16_share_text(self, patcher: ModelPatcher) -> str:
        """Say in one line what share of the matmul FLOPs has fp16 operands; empty before a call and without any."""
        run = self.runs.last_of(patcher)
        total = sum(run.calibration.flops.values()) if run else 0
        if not run or not total:
            return ""
        share = (run.layers.fp16_flops + run.attention.fp16_flops) / total
        in_int8 = any(decision.mode == INT8.name for decision in self.plan.decisions.values())
        work = "matrix work outside of int8 layers" if in_int8 else "matrix work"
        return f"{share:.1%} of the {work} has fp16 operands; {run.calibration.repeats} calls were repeated"
