"""Carry out an accumulation request on a ModelPatcher: flags, fp16 accumulation and attention,
during each model call."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from ....precision.arithmetic.attention import SafeAttention, run_in_fp32
from ....precision.arithmetic.attention_bounds import AttentionCall
from ....precision.arithmetic.calibration import Calibration
from ....precision.arithmetic.fp16_accumulation import Fp16Sums
from ....precision.base import flags
from ....precision.base.layer_names import are_alike
from ....precision.base.layers import kind_of
from ....precision.base.message import Message
from ....precision.base.modes import FP16
from ....precision.base.patching import Patch, patched
from ....precision.devices.detect import detect
from ....precision.formats.fp8 import Refused, fast_accumulation
from ....precision.plan.accumulation import UNCHANGED, AccumulationPlan, MatmulProfile, Request
from ....precision.report.schema import Sums
from ..comfyui.execution import COMPILE_KWARGS, is_compiled, is_on_several_devices, switches_by_layer, trains
from ..comfyui.layer_forward import LayerForward
from ..comfyui.layers import modules_of
from ..comfyui.weights import exchanged, only_multiplies, weights_of
from ..compute.attention import attending, kernels_of
from ..compute.executor import compute_of
from ..compute.layer_modes import LayerState, settings_of, states_of
from ..compute.per_model import PerModel, put_on
from ..replay.calibrated import CalibratedActing
from ..replay.call import Call
from ..replay.interceptor import ACCUMULATION, Acting, Stage, put_stage
from ..replay.model_compiler import compiler_off


def with_accumulation(patcher, request: Request):
    """Return a clone of the model that runs as requested; what the request leaves unchanged is as
    an earlier node asked."""
    clone = patcher.clone()
    if request == Request():
        return clone
    earlier = Accumulation.on(patcher)
    accumulation = Accumulation(request.over(earlier.request) if earlier else request)
    put_stage(clone, ACCUMULATION, accumulation)
    return clone


class Accumulation(Stage):
    """Run the calls of models under one request. It keeps what it learns of each model it runs, not
    the model."""

    name = ACCUMULATION

    def __init__(self, request: Request):
        self.request = request
        self.runs: PerModel[AccumulationRun] = PerModel(lambda model: AccumulationRun(request, model), _settings)

    def in_call(self, call: Call) -> Acting | None:
        """Return the model's sums as asked; under a rung that decides about every layer, torch's
        flags alone; None while Train LoRA trains, whose backward pass would have other sums."""
        if trains():
            return None
        sums = self.runs.of(call.model)
        return _FlagsAlone(sums.plan) if call.rung and call.rung.everywhere else sums

    def plan_for(self, patcher) -> AccumulationPlan:
        """Return the plan its calls followed, else the one the next call will."""
        run = self.runs.last_of(patcher)
        return run.plan if run else _planned(self.request, patcher)


class _FlagsAlone(Acting):
    """Hold the flags of a plan, and measure nothing."""

    def __init__(self, plan: AccumulationPlan):
        self.plan = plan

    def attempt(self, call: Call) -> contextlib.AbstractContextManager:
        return flags.flags_set(self.plan.flags)


class AccumulationRun(CalibratedActing):
    """Keep one model under a request: its plan, its patches and what its calls have shown."""

    def __init__(self, request: Request, model):
        patcher = model.current_patcher
        self.plan = plan = _planned(request, patcher)
        self.calibration = Calibration(looks_at_result=plan.trying)
        self.operations: dict[str, Fp16Sums] = {}
        if plan.trying:
            self.operations = {operation.name: operation for operation in self._operations(patcher)}
        self.calibration.in_fp16 = bool(self.operations)
        self.modules = {name: operation.module for name, operation in self.operations.items()}
        self.found = put_on(self.modules)
        self.attention = SafeAttention(self.calibration) if plan.attention == "auto" else None
        self.watches = bool(self.operations) or self.attention is not None
        self.refused_fp8: Refused = {}
        self._names = list(modules_of(model))
        self.patches: list[Patch] = []
        for operation in self.operations.values():
            found = LayerForward.on(operation.module)
            forward = LayerForward(operation.module, found.product, sums=operation, otherwise=found)
            self.patches += exchanged(forward)

    def _operations(self, patcher) -> Iterator[Fp16Sums]:
        modules = modules_of(patcher.model)
        ruled = asked_by_rule(patcher) if switches_by_layer(patcher) else {}
        for name, state in states_of(patcher).items():
            module = modules[name]
            if multiplies_in_fp16(module, state) and name not in ruled:
                weights = weights_of(module) if only_multiplies(module) else None
                yield self.calibration.add(Fp16Sums(name, module, self.calibration, weights))

    @contextlib.contextmanager
    def attempt(self, call: Call) -> Iterator[None]:
        if self.attention:
            self.attention.begin()
        measuring = self.calibration.attempt() if self.watches else contextlib.nullcontext()
        fast = fast_accumulation(self.refused_fp8) if self.plan.fp8_fast else contextlib.nullcontext()
        compiler = contextlib.nullcontext() if self.allocates_alike() else compiler_off
        attention = attending(call, self.attend)
        with measuring, patched(self.patches), attention, flags.flags_set(self.plan.flags), fast, compiler:
            yield

    def blocks_are_alike(self) -> bool:
        sums = {name: (operation.in_fp16, operation.device) for name, operation in self.operations.items()}
        in_fp32 = {*self.attention.calls_in_fp32} if self.attention else set()
        return len(in_fp32) < 2 and are_alike(sums, self._names)

    @property
    def attend(self) -> Callable | None:
        """The attention override of an attempt; None if attention is neither changed nor
        observed."""
        notes = self.calibration.calibrating and self.operations
        return self._attend if notes or self.plan.attention != UNCHANGED else None

    def _attend(
        self, function: Callable, attention: Callable, q: torch.Tensor, k, v, heads: int, *args, **kwargs
    ) -> torch.Tensor:
        """Run an fp16 attention so that it cannot overflow, in front of whatever override is there
        already: as it was measured, or each in fp32."""
        in_fp16 = q.dtype == torch.float16
        if self.calibration.calibrating and not (in_fp16 and self.attention):
            self.calibration.hiding.look_behind()  # Inf in q may leave zeros; a safe attention looks at q itself
        if not in_fp16 or self.plan.attention == UNCHANGED:
            return attention(q, k, v, heads, *args, **kwargs)
        kernels = kernels_of(function, attention, args, kwargs)
        if self.attention is None:
            return run_in_fp32(kernels, AttentionCall(q, k, v, heads, args, kwargs))
        return self.attention(kernels, q, k, v, heads, *args, **kwargs).to(q.dtype)

    def attention_text(self) -> str:
        """Return how the attentions of a call ran; empty before a call, and for a plan that leaves
        them alone."""
        if self.attention is None:
            return "" if self.plan.attention == UNCHANGED else "all fp16 attentions run in fp32"
        in_fp32 = self.attention.calls_in_fp32
        if not in_fp32:
            return ""
        counts = in_fp32.count(False), in_fp32.count(True)
        return Message("{0} attentions run in fp16, {1} in fp32 to avoid overflow", *counts)


def multiplies_in_fp16(module: torch.nn.Module, state: LayerState) -> bool:
    """True if a Linear is planned to multiply in fp16. A weight that is multiplied as it is stored,
    such as nvfp4, has sums of its own, whatever dtype its input is."""
    return state.planned == FP16.name and kind_of(module) == "linear" and not state.as_stored


def _planned(request: Request, patcher) -> AccumulationPlan:
    return request.plan(detect(patcher.load_device), _matmul_profile(patcher))


def _matmul_profile(patcher) -> MatmulProfile:
    modules = modules_of(patcher.model)
    multiplying = frozenset(state.planned for name, state in states_of(patcher).items() if kind_of(modules[name]))
    return MatmulProfile(multiplying, is_compiled(patcher), is_on_several_devices(patcher))


def _settings(patcher) -> tuple:
    return *settings_of(patcher), COMPILE_KWARGS in patcher.model_options


def asked_by_rule(patcher) -> dict[str, Sums]:
    """Return layer -> the accumulation that a rule asks for."""
    compute = compute_of(patcher)
    decisions = compute.plan.decisions if compute else {}
    return {name: decision.sums for name, decision in decisions.items() if decision.sums}
