"""Carry out an accumulation request on a ModelPatcher: flags, fp16 accumulation and attention, during each model
call."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from ....precision.arithmetic import flags
from ....precision.arithmetic.attention import BoundedAttention
from ....precision.arithmetic.calibration import Calibration
from ....precision.arithmetic.compiling import compile_disabled
from ....precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION, Fp16AccumulationLinear, SumBound
from ....precision.arithmetic.linear import kind_of
from ....precision.arithmetic.patching import Patch, patched
from ....precision.devices.detect import detect
from ....precision.layer_names import are_alike
from ....precision.modes import FP8, FP16, INT8
from ....precision.plan.accumulation import (
    EXACT_SUMS,
    NO_SWITCH,
    PARTS,
    AccumulationPlan,
    MatmulProfile,
    Request,
    plan_accumulation,
)
from ....precision.plan.flag_report import flag_report, flag_reports
from ..facts.layers import modules_of
from ..replay.call import Call
from ..replay.model_compiler import compiler_off
from . import fast_accumulation
from .attention import attending, kernels_of
from .compute import compute_of, needs_fp32_accumulation
from .execution import COMPILE_KWARGS, is_compiled, is_on_several_devices, switches_by_layer
from .layer_modes import planned_modes_of, settings_of
from .modules import exchanged, only_multiplies, weights_of
from .per_model import PerModel
from .wrappers import ACCUMULATION, set_wrapper

NAMED = 8
HELD_OFF = "Held off while this model runs: its fp16 products have fp32 results, which fp16 sums cannot give."


def with_accumulation(patcher, request: Request):
    """Return a clone of the model that runs as requested; what the request leaves unchanged is as an earlier node
    asked."""
    clone = patcher.clone()
    if request.changes_nothing:
        return clone
    earlier = accumulation_of(patcher)
    accumulation = Accumulation(request.over(earlier.request) if earlier else request)
    set_wrapper(clone, ACCUMULATION, accumulation)
    clone.set_attachments(ACCUMULATION, accumulation)
    return clone


def accumulation_of(patcher) -> "Accumulation | None":
    """Return the request's executor on a patcher, if it has one."""
    return patcher.attachments.get(ACCUMULATION)


class Accumulation:
    """Wrap the calls of models (ComfyUI's APPLY_MODEL) for one request. It keeps what it learns of each model it runs,
    not the model."""

    def __init__(self, request: Request):
        self.request = request
        self.runs: PerModel[_Run] = PerModel(lambda model: _Run(request, model), _settings)

    def __call__(self, executor, *args, **kwargs):
        run, call = self.runs.of(executor.class_obj), Call(executor, *args, **kwargs)

        def once():
            with run.scope():
                return call()

        with patched(run.patches), attending(executor.class_obj, call, run.attend):
            return run.calibration.run(once) if run.watches else once()

    def plan_for(self, patcher) -> AccumulationPlan:
        """Return the plan its calls followed, else the one the next call will."""
        run = self.runs.last_of(patcher)
        return run.plan if run else _planned(self.request, patcher)


class _Run:
    """Keep one model under a request: its plan, its patches and what its calls have shown."""

    def __init__(self, request: Request, model):
        patcher = model.current_patcher
        self.plan = plan = _planned(request, patcher)
        self.calibration = Calibration()
        self.operations: dict[str, Fp16AccumulationLinear] = {}
        if plan.proving or plan.naming:
            self.operations = dict(self._operations(patcher))
        self.modules = {name: operation.module for name, operation in self.operations.items()}
        auto = plan.attention == "auto"
        self.attention = BoundedAttention(self.calibration, not auto) if plan.attention in ("auto", "fp32") else None
        self.watches = bool(self.operations) or auto
        self.refused_fp8: fast_accumulation.Refused = {}
        self._names = list(modules_of(model))
        self._alike: bool | None = None
        patches = (exchanged(operation.module, operation.__call__) for operation in self.operations.values())
        self._patches: list[Patch] = [patch for of_one in patches for patch in of_one]

    def _operations(self, patcher) -> Iterator[tuple[str, Fp16AccumulationLinear]]:
        modes, ruled = planned_modes_of(patcher), _ruled(patcher)
        for name, module in modules_of(patcher.model).items():
            if modes.get(name) == FP16.name and kind_of(module) == "linear" and name not in ruled:
                sums = self.calibration.add(SumBound(name))
                weights = weights_of(module) if only_multiplies(module) else None
                by_layer = not self.plan.whole
                yield name, Fp16AccumulationLinear(module, module.forward, sums, self.calibration, weights, by_layer)

    @property
    def patches(self) -> list[Patch]:
        return self._patches if self.plan.proving or self.calibration.calibrating else []

    @contextlib.contextmanager
    def scope(self):
        """Hold the flags for the length of one call of the model."""
        if self.attention:
            self.attention.begin()
        held = {**self.plan.flags, FP16_ACCUMULATION: self.all_in_fp16} if self.plan.proving else self.plan.flags
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(flags.flags_set(held))
            if _is_fp8_fast(self.plan):
                scopes.enter_context(fast_accumulation.fast_accumulation(self.refused_fp8))
            if self.plan.whole and self.watches and self.calibration.calibrating:
                scopes.enter_context(compile_disabled())
            if not self._allocates_alike():
                scopes.enter_context(compiler_off())
            yield

    def _allocates_alike(self) -> bool:
        """Tell whether each block runs as the one before it, so that it allocates the same."""
        if self.watches and self.calibration.calibrating:
            self._alike = None
            return False
        if self._alike is None:
            scaled = {name: (op.sums.proven, op.sums.exponent) for name, op in self.operations.items()}
            modes = {state.mode for state in getattr(self.attention, "states", ())}
            self._alike = len(modes) < 2 and are_alike(scaled, self._names)
        return self._alike

    @property
    def all_in_fp16(self) -> bool:
        """Tell whether every matmul may accumulate in fp16; only asked where the flag cannot be switched by layer."""
        if not self.plan.whole or self.calibration.calibrating:
            return False
        return self._attention_is_known and all(op.weights and op.sums.proven for op in self._used())

    @property
    def _attention_is_known(self) -> bool:
        return self.attention is not None and not self.attention.unfused

    def _used(self) -> list[Fp16AccumulationLinear]:
        """Return the layers that met fp16 inputs, and those whose weight is out of reach."""
        return [op for op in self.operations.values() if op.sums.terms or not op.weights]

    @property
    def attend(self) -> Callable | None:
        """Return bounded attention, to stand around whatever override is there already; None where none was asked
        for."""
        return self._attend if self.attention else None

    def _attend(self, function: Callable, attention: Callable, *args, **kwargs) -> torch.Tensor:
        return self.attention(kernels_of(function, attention), *args, **kwargs)

    def accumulation(self) -> dict[str, tuple[str, str]]:
        """Return layer -> (accumulation, reason)."""
        on = self.plan.naming
        whole = self.all_in_fp16 if self.plan.whole else True
        return {
            name: described(operation, on or (operation.sums.proven and whole))
            for name, operation in self.operations.items()
        }

    def unproven(self) -> list[str]:
        return [] if self.calibration.calibrating else [op.sums.name for op in self._used() if not op.sums.proven]

    def state_text(self) -> str:
        """Say in one line how many layers accumulate in fp16; empty before the first call."""
        used = self._used()
        if not self.plan.proving or self.calibration.calibrating:
            return ""
        proven = [op.sums for op in used if op.sums.proven]
        scaled = sum(sums.exponent > 0 for sums in proven)
        line = f"{len(proven)} of {len(used)} fp16 layers are proven ({scaled} with their input scaled)"
        line += f"; {self.calibration.repeats} calls were repeated."
        if not self.plan.whole:
            return line
        outcome = "on for all" if self.all_in_fp16 else "off"
        outcome += "" if self._attention_is_known else ", as attention's own products are not bounded"
        return f"{line} Under torch.compile or on several devices it cannot be switched layer by layer: {outcome}."


HOW = {
    (True, True): "fp16 sums",
    (False, False): "fp32 sums",
    (False, True): "fp16 sums as asked, not proven",
    (True, False): "fp32 sums, as not all layers are proven",
}
"""(a layer is proven, its sums are in fp16) -> how the reason begins."""
NOT_MEASURED = "fp32 sums until a call has proven more"


def described(operation: Fp16AccumulationLinear, in_fp16: bool) -> tuple[str, str]:
    """Return (accumulation, reason) of a layer."""
    why, how = _why(operation), HOW[operation.sums.proven, in_fp16]
    return "fp16" if in_fp16 else "fp32", f"{how}: {why}" if why else NOT_MEASURED


def _why(operation: Fp16AccumulationLinear) -> str:
    """Say what a layer's sums were decided by; empty before a call."""
    if operation.weights is None:
        return f"{type(operation.module).__name__} multiplies in its own way"
    return str(operation.sums.evidence or "")


def _planned(request: Request, patcher) -> AccumulationPlan:
    return plan_accumulation(request, detect(patcher.load_device), _matmul_profile(patcher))


def _is_fp8_fast(plan: AccumulationPlan) -> bool:
    return plan.fp8_fast and not fast_accumulation.why_unavailable()


def _matmul_profile(patcher) -> MatmulProfile:
    modes = planned_modes_of(patcher)
    multiplying = {modes.get(name) for name, module in modules_of(patcher.model).items() if kind_of(module)}
    return MatmulProfile(frozenset(multiplying - {None}), is_compiled(patcher), is_on_several_devices(patcher))


def _settings(patcher) -> tuple:
    return *settings_of(patcher), COMPILE_KWARGS in patcher.model_options


def _ruled(patcher) -> dict[str, tuple[str, str]]:
    """Return layer -> (accumulation, reason) of the layers that a rule of the compute plan decides."""
    asked = _asked_by_rule(patcher) if switches_by_layer(patcher) else {}
    return {name: (sums, f"{sums} sums by rule") for name, sums in asked.items()}


def _asked_by_rule(patcher) -> dict[str, str]:
    """Return layer -> the accumulation that a rule asks for."""
    compute = compute_of(patcher)
    decisions = compute.plan.decisions if compute else {}
    return {name: decision.sums for name, decision in decisions.items() if decision.sums}


def _inert_rules(patcher) -> list[tuple[str, str]]:
    """Return (setting, reason) of the rules on accumulation of a model whose layers cannot differ in it."""
    asked = {} if switches_by_layer(patcher) else _asked_by_rule(patcher)
    layers = {sums: [name for name in asked if asked[name] == sums] for sums in asked.values()}
    return [(f"accumulation={sums}", f"{NO_SWITCH}: {_named(names)}") for sums, names in layers.items()]


def _named(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def layer_accumulation(patcher) -> dict[str, tuple[str, str]]:
    """Return layer -> (accumulation, reason) of the layers whose products can sum in anything but fp32, and of int8
    layers: exact int32 sums, scaled in fp32, are listed as fp32."""
    return _planned_accumulation(patcher) | _ruled(patcher)


def _planned_accumulation(patcher) -> dict[str, tuple[str, str]]:
    accumulation, modes, modules = accumulation_of(patcher), planned_modes_of(patcher), modules_of(patcher.model)
    run = accumulation.runs.last_of(patcher) if accumulation else None
    plan = accumulation.plan_for(patcher) if accumulation else AccumulationPlan(Request())
    sums = {name: ("fp32", EXACT_SUMS) for name, mode in modes.items() if mode == INT8.name}
    if run and run.operations:
        sums |= run.accumulation()
    elif plan.naming or _is_fp16_by_default(patcher, plan):
        half = (name for name, mode in modes.items() if mode == FP16.name and kind_of(modules[name]) == "linear")
        sums |= dict.fromkeys(half, ("fp16", ""))
    if _is_fp8_fast(plan):
        refused = run.refused_fp8 if run else {}
        sums |= {name: _fp8_fast(modules[name], refused) for name, mode in modes.items() if mode == FP8.name}
    return sums


def _fp8_fast(module: torch.nn.Module, refused: fast_accumulation.Refused) -> tuple[str, str]:
    problem = refused.get(tuple(module.weight.shape))
    return ("fp32", f"torch refuses fast accumulation here: {problem}") if problem else ("fp8_fast", "")


def _is_fp16_by_default(patcher, plan: AccumulationPlan) -> bool:
    """Tell whether ComfyUI was started with fp16 accumulation and nothing of ours holds it off."""
    if FP16_ACCUMULATION in plan.flags or torch.version.hip or _held_off(patcher):
        return False
    return torch.cuda.is_available() and bool(flags.outside(FP16_ACCUMULATION))


def _held_off(patcher) -> bool:
    compute = compute_of(patcher)
    return compute is not None and needs_fp32_accumulation(compute.plan, patcher)


def flags_of(patcher) -> dict[str, dict]:
    """Make the report's ``flags``: each setting as requested, inside and outside of the model's calls."""
    accumulation = accumulation_of(patcher)
    if accumulation is None:
        found = flag_reports()
        if _held_off(patcher):
            found[FP16_ACCUMULATION] = flag_report(FP16_ACCUMULATION, reason=HELD_OFF, in_scope=False)
        return found
    plan, run = accumulation.plan_for(patcher), accumulation.runs.last_of(patcher)
    inside = {name: plan.flags[parts[0]] for name, parts in PARTS.items() if plan.flags.keys() & set(parts)}
    reasons = dict(plan.reasons)
    if plan.proving:
        sums = run.accumulation().values() if run else ()
        inside[FP16_ACCUMULATION] = any(accumulates == "fp16" for accumulates, _ in sums)
        reasons[FP16_ACCUMULATION] = (run.state_text() if run else "") or plan.reasons[FP16_ACCUMULATION]
    if _held_off(patcher):
        inside[FP16_ACCUMULATION] = False
    inside["fp8_fast_accumulation"] = _is_fp8_fast(plan)
    return {name: flag_report(name, getattr(plan.request, name), reasons[name], inside.get(name)) for name in PARTS}


def remarks_of(patcher) -> tuple[list[tuple[str, str]], dict[str, str], list[str]]:
    """Return what the report adds for a request: settings without effect, decisions, notes."""
    accumulation = accumulation_of(patcher)
    if accumulation is None:
        return _inert_rules(patcher), {}, []
    plan, run = accumulation.plan_for(patcher), accumulation.runs.last_of(patcher)
    without_effect = [*plan.without_effect, *_inert_rules(patcher)]
    if plan.fp8_fast and (problem := fast_accumulation.why_unavailable()):
        without_effect.append(("fp8_fast_accumulation=on", problem))
    summary = run.attention.summary() if run and run.attention else ""
    decisions = {"attention": f"{plan.request.attention}: {summary}"} if summary else {}
    return without_effect, decisions, _notes(run) if run and plan.naming else []


def _notes(run: _Run) -> list[str]:
    """Describe the layers that sum in fp16 because it was asked for, though their bound passes fp16's range."""
    names = run.unproven()
    if not names:
        return []
    lines = [f"{name} ({_why(run.operations[name])})" for name in names[:NAMED]]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"fp16_accumulation=on, not proven safe in {len(names)} layers: {'; '.join(lines)}{more}"]
