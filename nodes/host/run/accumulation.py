"""An accumulation request on a ModelPatcher: flags, sums and attention hold for the length of each model call."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from ....precision.arithmetic import flags
from ....precision.arithmetic.attention import BoundedAttention
from ....precision.arithmetic.compiling import eager
from ....precision.arithmetic.fp16_sums import FLAG, BoundedLinear, SumSlot
from ....precision.arithmetic.linear import kind_of
from ....precision.arithmetic.patching import Patch, patched
from ....precision.arithmetic.ranges import Ranges
from ....precision.devices.detect import detect
from ....precision.modes import FP8, FP16
from ....precision.plan.accumulation import PARTS, AccumulationPlan, Request, Work, plan_accumulation
from ....precision.report.schema import flag_report, flag_reports
from ..execution import COMPILE_KWARGS, is_compiled, is_on_several_devices
from . import fast_accumulation
from .attention import attending, full_precision_attention, is_fused
from .call import Call
from .compute import compute_of, needs_fp32_sums
from .layers import modes_of, settings_of
from .modules import exchanged, modules_of, only_multiplies, weights_of
from .per_model import PerModel
from .wrappers import ACCUMULATION, set_wrapper

NAMED = 8
HELD_OFF = "Held off while this model runs: its fp16 products have fp32 results, which fp16 sums cannot give."


def with_accumulation(patcher, request: Request):
    """A clone of the model that runs as requested; what the request leaves unchanged is as an earlier node asked."""
    clone = patcher.clone()
    if request.changes_nothing:
        return clone
    earlier = accumulation_of(patcher)
    accumulation = Accumulation(request.over(earlier.request) if earlier else request)
    set_wrapper(clone, ACCUMULATION, accumulation)
    clone.set_attachments(ACCUMULATION, accumulation)
    return clone


def accumulation_of(patcher) -> "Accumulation | None":
    """The request's executor on a patcher, if it has one."""
    return patcher.attachments.get(ACCUMULATION)


class Accumulation:
    """ComfyUI's APPLY_MODEL wrapper for one request. It keeps what it learns of each model it runs, not the model."""

    def __init__(self, request: Request):
        self.request = request
        self.runs: PerModel[_Run] = PerModel(lambda model: _Run(request, model), _settings)

    def __call__(self, executor, *args, **kwargs):
        run, call = self.runs.of(executor.class_obj), Call(executor, *args, **kwargs)

        def once():
            with run.scope():
                return call()

        with patched(run.patches), attending(executor.class_obj, call, run.attend):
            return run.ranges.run(once) if run.watches else once()

    def plan_for(self, patcher) -> AccumulationPlan:
        """The plan its calls followed, else the one the next call will."""
        run = self.runs.last(patcher.model)
        return run.plan if run else plan_accumulation(self.request, detect(patcher.load_device), _work(patcher))


class _Run:
    """One model under a request: its plan, its patches and what its calls have shown."""

    def __init__(self, request: Request, model):
        patcher = model.current_patcher
        self.plan = plan = plan_accumulation(request, detect(patcher.load_device), _work(patcher))
        self.ranges = Ranges()
        self.operations: dict[str, BoundedLinear] = {}
        if plan.proving or plan.naming:
            self.operations = dict(self._operations(patcher))
        self.modules = {name: operation.module for name, operation in self.operations.items()}
        auto = plan.attention == "auto"
        self.attention = BoundedAttention(self.ranges, not auto) if plan.attention in ("auto", "fp32") else None
        self.watches = bool(self.operations) or auto
        self._patches: list[Patch] = [patch for op in self.operations.values() for patch in exchanged(op.module, op.__call__)]

    def _operations(self, patcher) -> Iterator[tuple[str, BoundedLinear]]:
        modes, ruled = modes_of(patcher), _ruled(patcher)
        for name, module in modules_of(patcher.model).items():
            if modes.get(name) == FP16.name and kind_of(module) == "linear" and name not in ruled:
                slot = self.ranges.slots[name] = SumSlot(name)
                weights = weights_of(module) if only_multiplies(module) else None
                yield name, BoundedLinear(module, slot, self.ranges, weights, not self.plan.whole)

    @property
    def patches(self) -> list[Patch]:
        return self._patches if self.plan.proving or self.ranges.measuring else []

    @contextlib.contextmanager
    def scope(self):
        """Around one call of the model."""
        if self.attention:
            self.attention.begin()
        held = {**self.plan.flags, FLAG: self.sums_in_fp16} if self.plan.proving else self.plan.flags
        fast = fast_accumulation.fast_sums() if _sums_fp8_fast(self.plan) else contextlib.nullcontext()
        with flags.flags_set(held), fast, eager(self.plan.whole and self.watches and self.ranges.measuring):
            yield

    @property
    def sums_in_fp16(self) -> bool:
        """Whether all sums may be in fp16 at once; only asked where they cannot be switched layer by layer."""
        if not self.plan.whole or self.ranges.measuring:
            return False
        return self._attention_is_known and all(op.weights and op.slot.proven for op in self._used())

    @property
    def _attention_is_known(self) -> bool:
        return self.attention is not None and not self.attention.unfused

    def _used(self) -> list[BoundedLinear]:
        """The layers that met fp16 inputs, and those whose weight is out of reach."""
        return [op for op in self.operations.values() if op.slot.terms or not op.weights]

    @property
    def attend(self) -> Callable | None:
        """Bounded attention, to stand around whatever override is there already; None where none was asked for."""
        return self._attend if self.attention else None

    def _attend(self, function: Callable, attention: Callable, *args, **kwargs) -> torch.Tensor:
        how = {"fused": is_fused(function), "foreign": attention is not function}
        return self.attention(attention, full_precision_attention(function), *args, **how, **kwargs)

    def sums(self) -> dict[str, tuple[str, str]]:
        """Layer name -> (accumulation, reason)."""
        on = self.plan.naming
        whole = self.sums_in_fp16 if self.plan.whole else True
        return {
            name: ("fp16" if on or (op.slot.proven and whole) else "fp32", _reason(op.slot.reason, on, whole))
            for name, op in self.operations.items()
        }

    def unproven(self) -> list[str]:
        return [] if self.ranges.measuring else [op.slot.name for op in self._used() if not op.slot.proven]

    def state_of_sums(self) -> str:
        """One line on the fp16 sums of this model, empty before its first call."""
        used = self._used()
        if not self.plan.proving or self.ranges.measuring:
            return ""
        proven = [op.slot for op in used if op.slot.proven]
        scaled = sum(slot.exponent > 0 for slot in proven)
        line = f"{len(proven)} of {len(used)} fp16 layers are proven ({scaled} with their input scaled)"
        line += f"; {self.ranges.repeats} calls were repeated."
        if not self.plan.whole:
            return line
        outcome = "on for all" if self.sums_in_fp16 else "off"
        outcome += "" if self._attention_is_known else ", as attention's own products are not bounded"
        return f"{line} Under torch.compile or on several devices it cannot be switched layer by layer: {outcome}."


def _reason(reason: str, on: bool, whole: bool) -> str:
    if on:
        return reason.replace("fp32 sums: ", "fp16 sums as asked, not proven: ")
    return reason if whole else reason.replace("fp16 sums: ", "fp32 sums, as not all layers are proven: ")


def _sums_fp8_fast(plan: AccumulationPlan) -> bool:
    return plan.fp8_fast and not fast_accumulation.why_unavailable()


def _work(patcher) -> Work:
    modes = modes_of(patcher)
    multiplying = {modes.get(name) for name, module in modules_of(patcher.model).items() if kind_of(module)}
    return Work(frozenset(multiplying - {None}), is_compiled(patcher), is_on_several_devices(patcher))


def _settings(patcher) -> tuple:
    return *settings_of(patcher), COMPILE_KWARGS in patcher.model_options


def _ruled(patcher) -> dict[str, tuple[str, str]]:
    """Layer name -> (accumulation, reason) of the layers that a rule of the compute plan decides."""
    compute = compute_of(patcher)
    decisions = compute.plan.decisions if compute else {}
    return {name: (decision.sums, f"{decision.sums} sums by rule") for name, decision in decisions.items() if decision.sums}


def sums_of(patcher) -> dict[str, tuple[str, str]]:
    """Layer name -> (accumulation, reason) of the layers whose products can sum in anything but fp32."""
    return _planned_sums(patcher) | _ruled(patcher)


def _planned_sums(patcher) -> dict[str, tuple[str, str]]:
    accumulation, modes = accumulation_of(patcher), modes_of(patcher)
    run = accumulation.runs.last(patcher.model) if accumulation else None
    if run and run.operations:
        return run.sums()
    plan = accumulation.plan_for(patcher) if accumulation else AccumulationPlan(Request())
    sums = {}
    if plan.naming or _sums_in_fp16_by_itself(patcher, plan):
        modules = modules_of(patcher.model)
        half = (name for name, mode in modes.items() if mode == FP16.name and kind_of(modules[name]) == "linear")
        sums = dict.fromkeys(half, ("fp16", ""))
    if _sums_fp8_fast(plan):
        sums |= dict.fromkeys((name for name, mode in modes.items() if mode == FP8.name), ("fp8_fast", ""))
    return sums


def _sums_in_fp16_by_itself(patcher, plan: AccumulationPlan) -> bool:
    """Whether ComfyUI was started with fp16 accumulation and nothing of ours holds it off."""
    if FLAG in plan.flags or torch.version.hip or _held_off(patcher):
        return False
    return torch.cuda.is_available() and bool(flags.outside(FLAG))


def _held_off(patcher) -> bool:
    compute = compute_of(patcher)
    return compute is not None and needs_fp32_sums(compute.plan, patcher)


def flags_of(patcher) -> dict[str, dict]:
    """The report's ``flags``: each setting as requested, inside and outside of the model's calls."""
    accumulation = accumulation_of(patcher)
    if accumulation is None:
        return flag_reports() | ({FLAG: flag_report(FLAG, reason=HELD_OFF, in_scope=False)} if _held_off(patcher) else {})
    plan, run = accumulation.plan_for(patcher), accumulation.runs.last(patcher.model)
    inside = {name: plan.flags[parts[0]] for name, parts in PARTS.items() if plan.flags.keys() & set(parts)}
    reasons = dict(plan.reasons)
    if plan.proving:
        sums = run.sums().values() if run else ()
        inside[FLAG] = any(accumulates == "fp16" for accumulates, _ in sums)
        reasons[FLAG] = (run.state_of_sums() if run else "") or plan.reasons[FLAG]
    if _held_off(patcher):
        inside[FLAG] = False
    inside["fp8_fast_accumulation"] = _sums_fp8_fast(plan)
    return {name: flag_report(name, getattr(plan.request, name), reasons[name], inside.get(name)) for name in PARTS}


def remarks_of(patcher) -> tuple[list[tuple[str, str]], dict[str, str], list[str]]:
    """What the report adds for a request: settings without effect, decisions, notes."""
    accumulation = accumulation_of(patcher)
    if accumulation is None:
        return [], {}, []
    plan, run = accumulation.plan_for(patcher), accumulation.runs.last(patcher.model)
    without_effect = list(plan.without_effect)
    if plan.fp8_fast and (problem := fast_accumulation.why_unavailable()):
        without_effect.append(("fp8_fast_accumulation=on", problem))
    summary = run.attention.summary() if run and run.attention else ""
    decisions = {"attention": f"{plan.request.attention}: {summary}"} if summary else {}
    return without_effect, decisions, _notes(run) if run and plan.naming else []


def _notes(run: _Run) -> list[str]:
    """The layers that sum in fp16 because it was asked for, though their bound passes fp16's range."""
    names = run.unproven()
    if not names:
        return []
    lines = [f"{name} ({run.operations[name].slot.reason.removeprefix('fp32 sums: ')})" for name in names[:NAMED]]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"fp16_accumulation=on, not proven safe in {len(names)} layers: {'; '.join(lines)}{more}"]
