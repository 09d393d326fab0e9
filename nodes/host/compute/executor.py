"""Compute plan on a ModelPatcher: module forwards and attention are replaced during each model
call."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import comfy.ldm.modules.attention
import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.message import Message
from ....precision.base.modes import INT8
from ....precision.base.patching import Patch, patched
from ....precision.plan.choice import WithoutEffect
from ....precision.plan.compute import ComputePlan
from ..comfyui.attributes import CAST_DTYPE, MEMORY_ESTIMATE, OVERRIDE, kernel_of_file
from ..comfyui.execution import Make, adapts_text, conditions_through, trains
from ..comfyui.gate import met_in
from ..comfyui.layer_forward import LayerForward
from ..comfyui.layers import modules_of
from ..comfyui.page import BADGE_EVENT, running_node_id, send
from ..replay.call import Call
from ..replay.interceptor import COMPUTE, Acting, Stage, put_stage
from .attention import ATTENTIONS, QUANTIZED, function_name, fuses_by_default
from .core_layers import is_fp8
from .per_model import PerModel, runs_in
from .planned_model import PlannedModel
from .ruled_attention import idle_rules

TRAINED = "compute={0} does not act while Train LoRA trains: its training_dtype decides."
logger = logging.getLogger("halfsafe")


def set_compute(patcher, plan: ComputePlan) -> "Compute":
    """Run ``patcher``, a clone or a newly loaded model, under a plan, which replaces an earlier
    one. Return the plan's executor.

    No wrapper is added for a plan that replaces nothing, is in the dtype that the model was loaded
    to compute in, not fp32, and has no fallback, on a model without fp8 weights."""
    binds = not plan.exchanges and any(map(is_fp8, patcher.model.diffusion_model.modules()))
    compute = Compute(plan, binds, CAST_DTYPE in patcher.object_patches)
    put_stage(patcher, COMPUTE, compute)
    return compute


def compute_of(patcher) -> "Compute | None":
    """Return the executor that runs a patcher now, which is the fallback after an overflow; None
    without a plan."""
    compute = Compute.on(patcher)
    return compute and compute.acting(patcher.model)


def quantized_attention(patcher: ModelPatcher) -> str:
    """Name the attention with quantized operands that a node, the model's file or ComfyUI's command
    line chose for a model; "" for another."""
    if override := patcher.model_options.get("transformer_options", {}).get(OVERRIDE):
        names = [function_name(override, overrides=True)]
    else:
        compute = compute_of(patcher)
        modules = () if compute and compute.overrides_attention else modules_of(patcher.model).values()
        asked = filter(None, map(kernel_of_file, modules))
        names = [f"attention_{kernel}" for kernel, is_there in asked if is_there]
        names.append(function_name(comfy.ldm.modules.attention.optimized_attention))
    return next((ATTENTIONS[name] for name in names if name in QUANTIZED), "")


class Compute(Stage):
    """Run the calls of models under one plan. It stores measurements per model, and no reference to
    the model.

    ``binds``: the plan changes nothing, and the model has fp8 weights, whose kernels are looked up
    once. ``restates``: a node changed the dtype that the model computes in. ``node_id``: the node
    that made the plan; its badge shows the dtypes in use."""

    name = COMPUTE

    def __init__(self, plan: ComputePlan, binds: bool, restates: bool = False):
        self.plan = plan
        self.binds = binds
        self.restates = restates
        self.acts = bool(plan.exchanges or plan.fallback or plan.is_in_fp32 or binds or restates)
        self.node_id = running_node_id()
        self.fallback = Compute(plan.fallback, binds, restates) if plan.fallback else None
        self.runs: PerModel[PlannedModel] = PerModel(lambda model: PlannedModel(plan, model, True, restates))
        self.adapters: PerModel[PlannedModel] = PerModel(lambda model: PlannedModel(plan, model))

    def acting(self, model) -> "Compute":
        """Return the executor of a model now: the fallback after an overflow, else this one."""
        return self.fallback if self.fallback and runs_in(model).fallback else self

    def in_call(self, call: Call) -> Acting | None:
        """Return the planned model, or its fallback after an overflow; None if the call's rung
        decides about every layer, and while Train LoRA trains."""
        if trains() or (call.rung and call.rung.everywhere):
            return None
        acting = self.acting(call.model)
        plan = acting.plan
        changes = plan.exchanges or plan.is_in_fp32 or acting.binds or acting.restates
        acts = changes or (acting.fallback and not fuses_by_default())
        return acting.runs.of(call.model) if acts else None

    def standing(self, patcher: ModelPatcher) -> dict[str, LayerForward]:
        """Return layer -> the forward that stands on it in the calls so far; empty before any
        call."""
        run, adapter = self.runs.last_of(patcher), self.adapters.last_of(patcher)
        standing = dict(run.layers.forwards) if run else {}
        if adapter:
            ran = adapter.calibration.flops
            standing |= {name: forward for name, forward in adapter.layers.forwards.items() if ran[name]}
        return standing

    def around_sampling(self, executor, *args, **kwargs):
        """Run a sampler with the plan also applied to the model's text adapters, and to ComfyUI's
        memory estimate."""
        model = executor.class_obj.model_patcher.model
        if trains():
            logger.info("Halfsafe: %s", Message(TRAINED, self.acting(model).plan.choice.used))
            return executor(*args, **kwargs)
        self.begin_run()
        with ExitStack() as held:
            held.enter_context(patched(_estimated_in_fp32(model) if self.acting(model).plan.is_safe else []))
            if adapts_text(model):
                through = conditions_through(model, lambda make: self.acting(model).conditions(model, make))
                held.enter_context(through)
            held.callback(self._show_met, model)
            return executor(*args, **kwargs)

    def _show_met(self, model) -> None:
        """Show on the node's badge the layers of a model that ran their own code."""
        if words := [*met_in(model)]:
            send(BADGE_EVENT, {"node_id": self.node_id, "words": words})

    def begin_run(self) -> None:
        """Start a sampler's run."""
        for run in self.runs.kept():
            run.begin_run()
        if self.fallback:
            self.fallback.begin_run()

    def measure_anew(self) -> None:
        """Measure in the next call of each model, as in its first."""
        for run in self.runs.kept():
            run.calibration.recalibrate()

    def conditions(self, model, make: Make) -> dict:
        """Compute the conditions of a text under the plan."""
        if not self.plan.exchanges:
            return make()
        run = self.adapters.of(model)
        # The text's one call in a run returns objects of ComfyUI's, which no look sees through.
        run.calibration.recalibrate()
        return run.run(make, run.patches_of_call)

    def ranges(self, patcher: ModelPatcher) -> dict[str, float]:
        """Return layer -> largest magnitude of its operands, for layers with a measured operand."""
        run = self.runs.last_of(patcher)
        return run.calibration.largest() if run else {}

    @property
    def overrides_attention(self) -> bool:
        """True if attention runs through this plan's override, and so not in a kernel that the
        model's file requests."""
        attends = self.plan.is_safe or self.plan.mixes_fp32_in or bool(self.plan.attention)
        return attends or (self.fallback is not None and not fuses_by_default())

    def attention_in_fp32(self, patcher: ModelPatcher) -> list[str]:
        """List the blocks whose attention ran in fp32 because of a rule, in the calls so far."""
        run = self.runs.last_of(patcher)
        return run.ruled.ran_in_blocks() if run else []

    def idle_attention_rules(self, patcher: ModelPatcher) -> Iterator[WithoutEffect]:
        """Return the attention rules that match no block, or only blocks without an attention."""
        run = self.runs.last_of(patcher)
        return idle_rules(self.plan.attention, modules_of(patcher.model), run.ruled if run else None)

    def not_called(self, patcher: ModelPatcher) -> frozenset[str]:
        """Return the layers with a plan that did not run in the calibrating call; empty before that
        call."""
        run, adapter = self.runs.last_of(patcher), self.adapters.last_of(patcher)
        adapted = adapter.calibration.flops if adapter else {}
        return frozenset(name for name in run.not_called if not adapted.get(name)) if run else frozenset()

    def fp16_share_text(self, patcher: ModelPatcher) -> str:
        """Describe the share of matmul FLOPs with fp16 operands in one line; empty before a call or
        without matmuls."""
        run = self.runs.last_of(patcher)
        total = sum(run.calibration.flops.values()) if run else 0
        if not run or not total:
            return ""
        share = (run.layers.fp16_flops + run.attention.fp16_flops) / total
        in_int8 = any(decision.mode == INT8.name for decision in self.plan.decisions.values())
        work = "matrix work outside int8 layers" if in_int8 else "matrix work"
        figures = f"{share:.1%}", work, run.calibration.repeats
        return Message("{0} of the {1} has fp16 operands; {2} calls were repeated", *figures)


def _estimated_in_fp32(model) -> list[Patch]:
    """Patches that let ComfyUI estimate the memory of a model's activations for fp32: its estimate
    uses the cast dtype."""
    own = getattr(model, MEMORY_ESTIMATE)

    def estimate(*args, **kwargs) -> float:
        with patched([(model, CAST_DTYPE, torch.float32)]):
            return own(*args, **kwargs)

    return [(model, MEMORY_ESTIMATE, estimate)]
