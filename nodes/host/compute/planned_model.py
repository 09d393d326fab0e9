"""Run one model of ComfyUI under a compute plan: the patches of a call, and the measurements of its
calls."""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ....precision.arithmetic.attention import SafeAttention, run_in_fp32
from ....precision.arithmetic.attention_bounds import AttentionCall
from ....precision.arithmetic.casting import Results
from ....precision.base.flags import fp32_accumulation
from ....precision.base.layer_names import are_alike
from ....precision.base.modes import FP16_WIDE, INT8
from ....precision.base.patching import Patch, patched
from ....precision.base.surroundings import own_dtypes
from ....precision.plan.compute import ComputePlan
from ..comfyui.attributes import CAST_DTYPE, SCALES_INPUT, casting
from ..comfyui.execution import switches_by_layer
from ..comfyui.layer_forward import LayerForward
from ..comfyui.layers import is_quantized, modules_of
from ..comfyui.weights import calling_layers, uncast_norm
from ..replay.calibrated import CalibratedActing
from ..replay.call import Call
from ..replay.model_compiler import compiler_off
from .attention import attending, fuses_by_default, in_one_dtype, kernels_of, scores_in_fp32
from .borders import bordered, borders_in, with_borders
from .core_layers import PlannedLayers, bound_forward, holds_sums, int8_patches, is_unpacked
from .per_model import put_on
from .ruled_attention import RuledAttention

logger = logging.getLogger("halfsafe.compute")


class PlannedModel(CalibratedActing):
    """Run the calls of a model of ComfyUI under a plan, and record their modes and ranges.

    ``binds``: fp8 layers without a decision, whose weights ComfyUI unpacks in each call, have their
    kernels looked up once. ``restates``: a node changed the dtype that the model computes in, after
    other packs may have made layers for it. ``is_in_fp32``: all values between layers are fp32,
    which a caller's autocast would round to 16 bit."""

    def __init__(self, plan: ComputePlan, model, binds: bool = False, restates: bool = False):
        named = modules_of(model)
        decided = {name: module for name, module in named.items() if name in plan.decisions}
        follow = {name: module for name, module in named.items() if name not in decided and is_unpacked(module)}
        self.modules = {**decided, **follow} if binds else decided
        self.found = put_on(self.modules)
        self.plan = plan
        self.is_in_fp32 = plan.is_in_fp32
        self.restates = restates
        self._safe, self._mixes = plan.is_safe, plan.mixes_fp32_in  # a graph breaks where it reads the plan's mappings
        self._model: Callable[[], Any] = weakref.ref(model)  # alive in its own calls, where it is asked for
        # Whether flags are switched by layer is found by a walk over the model: asked where the answer matters.
        self._has_rules = any(plan.decisions[name].sums for name in decided)
        in_int8 = {
            name: module
            for name, module in decided.items()
            if plan.decisions[name].mode == INT8.name and is_quantized(module)
        }
        exchanged = {name: module for name, module in decided.items() if name not in in_int8}
        self.layers = PlannedLayers(plan, exchanged)
        self.calibration = self.layers.calibration
        self.calibration.calibrating = plan.exchanges
        self._known = frozenset(named.values())
        self._borders: list[Patch] | None = None
        self._borders_of: tuple | None = ()
        self._stood: list = []
        self._sums_off = False
        self._needs_fp32_sums = fp32_sums_of(plan)
        self.ruled = RuledAttention(plan.attention, named)
        self.attention = SafeAttention(self.calibration, self.ruled.is_inside)
        self._patches = list(self.layers.patches)
        for name, module in in_int8.items():
            self._patches += int8_patches(module, plan.decisions[name], plan.activation_dtype)
        if binds:
            for module in follow.values():
                self._patches += LayerForward(module, bound_forward(module)).put_on()
        self.calling = calling_layers(decided.values())
        # ComfyUI casts the norms of a model with quantized layers whatever dtype they are in.
        uncasts = plan.is_safe or (binds and any(map(is_quantized, self.modules.values())))
        self._norms = [patch for module in named.values() for patch in uncast_norm(module)] if uncasts else []
        self.casting = [patch for module in named.values() for patch in casting(module)]
        if self._mixes:
            self._patches += self.casting

    @property
    def not_called(self) -> frozenset[str]:
        """Layers that did not run in the calibrating call; none before that call."""
        flops, fp8 = self.calibration.flops, self.layers.fp8
        idle = (name for name in self.layers.forwards if not (fp8[name].ran if name in fp8 else flops[name]))
        return frozenset(idle) if flops else frozenset()

    @property
    def patches(self) -> list[Patch]:
        """Patches of the model's modules during a call. A norm that another pack gave a forward
        since this run was made keeps it."""
        norms = [patch for patch in self._norms if "forward" not in vars(patch[0])]
        return [*self._patches, *norms, *self.ruled.patches()]

    def patches_of_call(self) -> list[Patch]:
        """Patches for a call of a diffusion model, including its entry in fp32 if a safe plan needs
        it."""
        model = self._model()
        if self._safe and (getattr(model, CAST_DTYPE) or model.get_dtype()) != torch.float32:
            return [*in_fp32(model), *self.patches, *self.casting]
        return self.patches

    def run(self, make: Callable, patches: Callable[[], Iterable[Patch]]):
        """Run a call of the model's text adapter, or of a ControlNet, with ``patches``, and repeat
        it until its check succeeds."""
        self._settle_flags()

        def once():
            with self._scope(), self.calling, patched(patches()):
                return make()

        return self.calibration.run(once)

    def begin_call(self) -> None:
        self._settle_flags()
        self.calibration.begin_call()

    @contextmanager
    def attempt(self, call: Call) -> Iterator[None]:
        options, patches = call.options, self.patches_of_call()
        measuring = self.calibration.attempt()
        call.options = self.options_of_call(options)
        if self.has_borders:
            patches = [*patches, *self.borders(call.model)]
        attention = attending(call, self.attend, self.inputs)
        try:
            with measuring, self._scope(), self.calling, patched(patches), attention:
                yield
        finally:
            call.options = options

    @property
    def has_borders(self) -> bool:
        """True if values between layers may be of another dtype than the code of other packs
        expects."""
        return self.is_in_fp32 or self._mixes or self.restates

    @property
    def _results(self) -> Results:
        """The dtype in which code of other packs returns its results."""
        if self.is_in_fp32:
            return "fp32"
        return "computed" if self._mixes else "given"

    def options_of_call(self, options: dict) -> dict:
        """Return ``transformer_options`` for an attempt, with the functions that nodes patched into
        the model as they run in it."""
        change = partial(bordered, results=self._results)
        return with_borders(options, change, change) if self.has_borders else options

    def borders(self, model) -> list[Patch]:
        """Return the patches of other packs' modules in a model. They are searched once in a
        sampler's run of a patcher, and again if a pack or a watch of ours has changed the forwards
        or hooks below them."""
        patcher = model.current_patcher
        state = patcher and (weakref.ref(patcher), patcher.is_injected)
        if self._borders is None or state != self._borders_of or _standing(self._borders) != self._stood:
            modules = modules_of(model)
            # AnimateDiff puts ComfyUI's layers in, of the class that does not cast.
            added = (patch for module in modules.values() if module not in self._known for patch in casting(module))
            self._borders = [*added, *borders_in(modules, {*self.modules.values()}, self._results)]
            self._borders_of = state
            self._stood = _standing(self._borders)
        return self._borders

    def begin_run(self) -> None:
        """Start a sampler's run: packs may have changed the model since the last one."""
        self._borders = None

    def stands(self, result: torch.Tensor) -> bool:
        measures = self.calibration.calibrating
        stands = super().stands(result)
        if measures and stands:
            logger.debug("Halfsafe: %s", self.layers)
        return stands

    def _settle_flags(self) -> None:
        """Decide whether fp16 accumulation is switched off for the whole call or layer by layer."""
        patcher = self._model().current_patcher
        self._sums_off = self._needs_fp32_sums(patcher)
        self.layers.switches_flags = not self._has_rules or switches_by_layer(patcher)
        self.calibration.by_layer = not self._sums_off

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Prepare an attempt, and hold accumulation, ComfyUI's compiler and a caller's autocast for
        it."""
        self.attention.begin()
        self.ruled.begin()
        sums = fp32_accumulation() if self._sums_off else nullcontext()
        compiler = nullcontext() if self.allocates_alike() else compiler_off
        own = own_dtypes(self._model().current_patcher.load_device) if self.is_in_fp32 else nullcontext()
        with sums, compiler, own:
            yield

    def blocks_are_alike(self) -> bool:
        decisions = self.plan.decisions
        kinds = {name: decisions[name].mode for name in self.modules if name in decisions} | self.layers.allocations()
        attention_is_alike = not self.ruled.rules and len({*self.attention.calls_in_fp32}) < 2
        return attention_is_alike and are_alike(kinds, modules_of(self._model()))

    @property
    def attend(self) -> Callable | None:
        """This plan's attention override; None for a plan that does not change attention. The plain
        fp16 of ``auto`` needs the scores of unfused attentions in fp32."""
        if self._safe or self._mixes or self.ruled.rules:
            return self._attend
        return scores_in_fp32 if self.plan.fallback and not fuses_by_default() else None

    @property
    def inputs(self) -> Callable | None:
        """Callback for the model's inputs in each call; None for a plan without fp16 products."""
        return self.calibration.watch_inputs if self.layers.operations else None

    def _attend(self, function: Callable, attention: Callable, q, k, v, heads: int, *args, **kwargs) -> torch.Tensor:
        if self.calibration.calibrating:
            self.ruled.note()
        kernels = kernels_of(function, attention, args, kwargs)
        if self._safe:
            return self.attention(kernels, q, k, v, heads, *args, **kwargs)
        if self.ruled.is_inside():
            return run_in_fp32(kernels, AttentionCall(q, k, v, heads, args, kwargs))
        if not self._mixes:
            return attention(q, k, v, heads, *args, **kwargs)
        return in_one_dtype(attention, q, k, v, heads, *args, **kwargs)


def in_fp32(model) -> list[Patch]:
    """Patches that cast a model's entry to fp32 and clone its input."""
    # In fp16 that cast copies the input; in fp32 it is a no-op, and EasyCache (comfy_extras/nodes_easycache.py) would
    # add to the sampler's own latent in place.
    entry = getattr(model.model_sampling, SCALES_INPUT)
    cloning = model.model_sampling, SCALES_INPUT, lambda *args, **kwargs: entry(*args, **kwargs).clone()
    return [(model, CAST_DTYPE, torch.float32), cloning]


def fp32_sums_of(plan: ComputePlan) -> Callable[[ModelPatcher], bool]:
    """Return the function that is true for a patcher if fp16 accumulation has to be off for whole
    calls: some layer returns fp32, and either no layer could accumulate in fp16 or the flag cannot
    be switched per layer. Else each ``SafeOperation`` switches it off."""
    holds, wide = holds_sums(plan), FP16_WIDE.name in {decision.mode for decision in plan.decisions.values()}
    return lambda patcher: holds or (wide and not switches_by_layer(patcher))


def _standing(patches: Iterable[Patch]) -> list:
    """Return what stands now where patches of ``borders_in`` will: functions, and the hooks of a
    module by key."""
    values = [vars(module).get(attribute) for module, attribute, _ in patches]
    return [tuple(value.items()) if isinstance(value, OrderedDict) else value for value in values]
