"""A compute plan on a ModelPatcher: module forwards and attention are exchanged for the length of each model call."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import comfy.ldm.lumina.model
import torch
from comfy.patcher_extension import WrappersMP

from ....precision.arithmetic.attention import SafeAttention, run_in_fp32
from ....precision.arithmetic.attention_bounds import AttentionCall
from ....precision.arithmetic.planned import PlannedLayers
from ....precision.base.flags import fp32_accumulation
from ....precision.base.layer_names import are_alike
from ....precision.base.modes import FP16, FP16_WIDE, INT8, MODE_OF
from ....precision.base.patching import Patch, SharedScope, patched
from ....precision.plan.compute import ComputeDecision, ComputePlan
from ..comfyui.attributes import cast_dtype, casting, scaled_input, with_cast_dtype, with_scaled_input
from ..comfyui.conditions import Make, adapts_text, conditions_through
from ..comfyui.execution import switches_by_layer
from ..comfyui.layers import is_quantized, modules_of
from ..comfyui.weights import calling_layers
from ..comfyui.wrappers import COMPUTE, set_wrapper
from ..replay.call import Call
from ..replay.model_compiler import compiler_off
from .attention import attending, fuses_by_default, has_attention_patch, in_one_dtype, kernels_of, scores_in_fp32
from .core_layers import CoreLayers, Switching, int8_patches
from .per_model import PerModel
from .ruled_attention import NO_ATTENTION, NO_BLOCK, RuledAttention, blocks_of, outermost

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

LISTED = 3
_fell_back: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""The models whose plans run in their fallback: not told on the model, whose attributes a repeat puts back."""
_unclamped = SharedScope(lambda: patched([(comfy.ldm.lumina.model, "clamp_fp16", lambda x: x)]))
"""Lumina and Z-Image put 65504 in place of what overflows in fp16, where a look at the result is to find it."""


def set_compute(patcher, plan: ComputePlan) -> None:
    """Make ``patcher``, a clone or a model just loaded, run as planned. An earlier plan is replaced.

    A plan that exchanges nothing and has nothing to fall back to adds no wrapper.
    """
    for kind in (WrappersMP.APPLY_MODEL, WrappersMP.OUTER_SAMPLE):
        patcher.remove_wrappers_with_key(kind, COMPUTE)
    compute = Compute(plan)
    patcher.set_attachments(COMPUTE, compute)
    if plan.exchanges or plan.fallback:
        set_wrapper(patcher, COMPUTE, compute)
        set_wrapper(patcher, COMPUTE, compute.sampling, WrappersMP.OUTER_SAMPLE)


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


class Compute:
    """Wrap the calls of models (ComfyUI's APPLY_MODEL) for one plan. It keeps what it learns of each model it runs, not
    the model."""

    def __init__(self, plan: ComputePlan):
        self.plan = plan
        self.fallback = Compute(plan.fallback) if plan.fallback else None
        self.runs: PerModel[PlannedModel] = PerModel(lambda model: PlannedModel(plan, model, fp16_results=plan.is_safe))
        self.adapters: PerModel[PlannedModel] = PerModel(lambda model: PlannedModel(plan, model))

    def acting(self, model) -> "Compute":
        """Return what runs a model now: the fallback after an overflow, else this."""
        return self.fallback if self.fallback and model in _fell_back else self

    def __call__(self, executor, *args, **kwargs):
        call = Call(executor, *args, **kwargs)
        acting = self.acting(call.model)
        watched = self.fallback and acting is self
        with attending(call.model, call, scores_in_fp32 if watched and not fuses_by_default() else None):
            return acting.run(call) if acting.plan.exchanges else call.make({})

    def run(self, call: Call) -> torch.Tensor:
        """Make a call with the plan's forwards and attention in place of the model's."""
        with self._between(call.model, self.runs) as run, attending(call.model, call, run.attend, run.inputs):
            run.hand_out(fp32=has_attention_patch(call.options))
            return run.call(call)

    def planned_modes(self, patcher: "ModelPatcher") -> dict[str, str]:
        """Return layer -> planned mode; what layers cannot do is known from the first call on."""
        run = self.runs.last_of(patcher)
        modes = {name: decision.mode for name, decision in self.plan.decisions.items()}
        return modes | run.planned_modes() if run else modes

    def observed_modes(self, patcher: "ModelPatcher") -> dict[str, str]:
        """Return layer -> mode, as found in the calls made so far; planned before that."""
        run, adapter = self.runs.last_of(patcher), self.adapters.last_of(patcher)
        modes = self.planned_modes(patcher) | (run.observed_modes() if run else {})
        if adapter is None:
            return modes
        ran = adapter.calibration.flops
        return modes | {name: mode for name, mode in adapter.observed_modes().items() if ran[name]}

    def modes_by_device(self, patcher: "ModelPatcher") -> dict[str, dict[str, str]]:
        """Return device -> layer -> mode, as found in the calls of each device that made some (MultiGPU)."""
        return {device: run.observed_modes() for device, run in self.runs.by_device(patcher).items()}

    def sampling(self, executor, *args, **kwargs):
        """Wrap a sampler's run: what the model does with its text before its calls follows the plan too."""
        model = executor.class_obj.model_patcher.model
        if not adapts_text(model):
            return executor(*args, **kwargs)
        with conditions_through(model, lambda make: self.acting(model).conditions(model, make)):
            return executor(*args, **kwargs)

    def conditions(self, model, make: Make) -> dict:
        """Make a text's conditions as the plan has it."""
        if not self.plan.exchanges:
            return make()
        with self._between(model, self.adapters) as run:
            # The text's one call in a run returns objects of ComfyUI's, which no look sees through.
            run.calibration.recalibrate()
            return run.call(make)

    @contextmanager
    def _between(self, model, runs: "PerModel[PlannedModel]") -> "Iterator[PlannedModel]":
        """Give a model what the plan exchanges, and fp32 between its layers where it is loaded to cast to fp16."""
        uncast = self.plan.is_safe and cast_dtype(model) != torch.float32
        with patched(in_fp32(model) if uncast else []):
            run = runs.of(model)
            with patched([*run.patches, *(run.casting if uncast else [])]):
                yield run

    def ranges(self, patcher: "ModelPatcher") -> dict[str, float]:
        """Return layer -> the largest magnitude of its operands, of the layers that met any."""
        run = self.runs.last_of(patcher)
        return run.calibration.largest() if run else {}

    def attention_in_fp32(self, patcher: "ModelPatcher") -> list[str]:
        """List the blocks whose attention ran in fp32 by a rule in the calls made so far."""
        run = self.runs.last_of(patcher)
        return outermost(run.ruled.ran_in) if run else []

    def idle_attention_rules(self, patcher: "ModelPatcher") -> Iterator[tuple[str, str]]:
        """Yield (rule, reason) for the rules on attention that match no block, or only blocks that made none."""
        blocks, run = blocks_of(self.plan.attention, modules_of(patcher.model)), self.runs.last_of(patcher)
        for rule in self.plan.attention:
            matched = outermost([name for name, rules in blocks.items() if rule in rules])
            if not matched:
                yield str(rule), NO_BLOCK
            elif run and not any(rule in rules for rules in run.ruled.ran_in.values()):
                yield str(rule), NO_ATTENTION.format(", ".join(matched[:LISTED]))

    def fp16_share_text(self, patcher: "ModelPatcher") -> str:
        """Say in one line what share of the matmul FLOPs has fp16 operands; empty before a call and without any."""
        run = self.runs.last_of(patcher)
        share = run.fp16_share() if run else None
        if share is None:
            return ""
        in_int8 = any(decision.mode == INT8.name for decision in self.plan.decisions.values())
        work = "matrix work outside of int8 layers" if in_int8 else "matrix work"
        return f"{share:.1%} of the {work} has fp16 operands; {run.calibration.repeats} calls were repeated"


class PlannedModel:
    """Run the calls of a model of ComfyUI under a plan, and record their modes and ranges.

    Args:
        plan: what to do.
        model: as it is during a call, inside of the wrappers around this one.
        inside: tell whether one of the other modules can be given fp32 activations, where the plan mixes them in.
        fp16_results: layers between a block's norms and its residual stream may return fp16.
    """

    def __init__(
        self, plan: ComputePlan, model, inside: Callable[[str], bool] = lambda name: True, fp16_results: bool = False
    ):
        named = modules_of(model)
        self.modules = planned = {name: module for name, module in named.items() if name in plan.decisions}
        self.plan = plan
        self._safe, self._mixes = plan.is_safe, plan.mixes_fp32_in  # a graph breaks where it reads the plan's mappings
        self._model = weakref.ref(model)
        self._switching = Switching()
        self._has_rules = any(plan.decisions[name].sums for name in planned)
        in_int8 = [name for name, module in planned.items() if _stays_int8(plan.decisions[name], module)]
        decisions = {name: _without_int8(plan, name) for name in planned if name not in in_int8}
        modules = {name: self.modules[name] for name in decisions}
        host = CoreLayers(plan.activation_dtype, self._switching)
        self.layers = PlannedLayers(decisions, modules, host, safe=plan.is_safe)
        self.calibration = self.layers.calibration
        self._fp16_results = self.calibration.results.allowed = fp16_results
        self._hands_out_fp32 = False
        clamps = plan.is_safe and any(type(m).__module__ == comfy.ldm.lumina.model.__name__ for m in named.values())
        self._clamping = _unclamped if clamps else nullcontext()
        self._alike: bool | None = None
        self.ruled = RuledAttention(plan.attention, named)
        self.attention = SafeAttention(self.calibration, self.ruled.is_inside)
        self._patches = list(self.layers.patches)
        for name in in_int8:
            self._patches += int8_patches(self.modules[name], plan.decisions[name])
        self.calling = calling_layers(planned.values())
        self.casting = [patch for module in named.values() for patch in casting(module)]
        if self._mixes:
            self._patches += [patch for name, module in named.items() if inside(name) for patch in casting(module)]

    @property
    def patches(self) -> list[Patch]:
        """What to set on the model's modules for the length of a call."""
        return [*self._patches, *self.ruled.patches()]

    def hand_out(self, fp32: bool) -> None:
        """Return fp32 from every layer and attention, for nodes whose code takes the results of attentions: what is
        made of them there may overflow in fp16 and be finite (a 1-norm, in comfy_extras/nodes_nag.py)."""
        if fp32 != self._hands_out_fp32:
            self._hands_out_fp32 = fp32
            self.calibration.results.allowed = self._fp16_results and not fp32
            self.calibration.recalibrate()

    def call(self, call: Call | Make):
        """Make one call of the model, or of its text adapter, its patches set; it is repeated with calibration when a
        proof does not hold."""
        patcher = self._model().current_patcher
        off = needs_fp32_accumulation(self.plan, patcher)
        self.calibration.by_layer = not off
        self._switching.by_layer = not self._has_rules or switches_by_layer(patcher)

        def once():
            self.attention.begin()
            self.ruled.begin()
            free = nullcontext() if self._allocates_alike() else compiler_off()
            with fp32_accumulation() if off else nullcontext(), free, self.calling, self._clamping:
                return call()

        return self.calibration.run(once)

    def _allocates_alike(self) -> bool:
        """Tell whether each block runs, and allocates, as the block before."""
        if self.calibration.calibrating:
            self._alike = None
            return False
        if self._alike is None:
            kinds = {name: self.plan.decisions[name].mode for name in self.modules} | self.layers.allocations()
            attention_is_alike = not self.ruled.rules and len({*self.attention.calls_in_fp32}) < 2
            self._alike = attention_is_alike and are_alike(kinds, modules_of(self._model()))
        return self._alike

    @property
    def attend(self) -> Callable | None:
        """This plan's attention, to stand in front of whatever override is there already; None for a plan without
        one."""
        return self._attend if self._safe or self._mixes or self.ruled.rules else None

    @property
    def inputs(self) -> Callable | None:
        """Return what is told the model's inputs in each call; None for a plan that multiplies nothing in fp16."""
        return self.calibration.watch_inputs if self.layers.operations else None

    def _attend(self, function: Callable, attention: Callable, q, k, v, heads: int, *args, **kwargs) -> torch.Tensor:
        if self.calibration.calibrating:
            self.ruled.note()
        kernels = kernels_of(function, attention)
        if self._safe:
            return self.attention(kernels, q, k, v, heads, *args, **kwargs)
        if self.ruled.is_inside():
            return run_in_fp32(kernels, AttentionCall(q, k, v, heads, args, kwargs))
        if not self._mixes:
            return attention(q, k, v, heads, *args, **kwargs)
        return in_one_dtype(attention, q, k, v, heads, *args, **kwargs)

    def planned_modes(self) -> dict[str, str]:
        """Return layer -> the mode of its forward, of the layers with another forward than ComfyUI's."""
        return self.layers.planned_modes()

    def observed_modes(self) -> dict[str, str]:
        """Return layer -> the mode it was last found to run in, of the same layers."""
        return self.layers.observed_modes()

    def fp16_share(self) -> float | None:
        """Return the share of floating-point operations with fp16 operands; None before a call and without any."""
        total = sum(self.calibration.flops.values())
        return (self.layers.fp16_flops + self.attention.fp16_flops) / total if total else None


def _stays_int8(decision: ComputeDecision, module: torch.nn.Module) -> bool:
    return decision.mode == INT8.name and is_quantized(module)


def _without_int8(plan: ComputePlan, name: str) -> ComputeDecision:
    """Return a layer's decision; int8 of a weight that is not stored in it is what the other layers compute in."""
    decision = plan.decisions[name]
    return replace(decision, mode=MODE_OF[plan.choice.used]) if decision.mode == INT8.name else decision


def in_fp32(model) -> list[Patch]:
    """Cast a model's entry to fp32 and clone its input."""
    # In fp16 that cast copies the input; in fp32 it is a no-op, and EasyCache (comfy_extras/nodes_easycache.py) would
    # add to the sampler's own latent in place.
    entry = scaled_input(model.model_sampling)
    cloning = with_scaled_input(model.model_sampling, lambda sigma, noise: entry(sigma, noise).clone())
    return [with_cast_dtype(model, torch.float32), cloning]


def needs_fp32_accumulation(plan: ComputePlan, patcher: "ModelPatcher") -> bool:
    """Tell whether to hold fp16 accumulation off for whole calls: some layer has fp32 results, and either no layer
    could accumulate in fp16 or the flag cannot be switched by layer. Otherwise each ``SafeOperation`` holds it off for
    itself."""
    modes = {decision.mode for decision in plan.decisions.values()}
    if FP16_WIDE.name not in modes:
        return False
    return (plan.is_safe and FP16.name not in modes) or not switches_by_layer(patcher)
