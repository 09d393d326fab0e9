"""The NaN guard on a ModelPatcher: check the result of each call, and go up the ladder if it is not finite."""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator

import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher

from ....precision.base.amax import amax
from ....precision.base.message import Message
from ....precision.base.modes import FP32
from ....precision.base.nested import tensors_in
from ....precision.devices import probes
from ....precision.devices.random_start import RandomStart
from ....precision.guard.inputs import SIGMAS, NotFiniteInput, inputs_not_finite
from ....precision.guard.ladder import Ladder
from ....precision.guard.log import (
    CallPosition,
    GuardLog,
)
from ....precision.guard.policy import OFF, OnNan
from ....precision.plan.in_use import PlanInUse
from ....precision.report.schema import GuardReport
from ..comfyui.execution import adapts_text, conditions_through, is_oom
from ..comfyui.layers import activation_dtype, matrix_layers
from ..comfyui.page import running_node_id, running_prompt_id
from ..compute.executor import Compute
from ..compute.layer_modes import LayerState, states_of
from ..compute.per_model import PerModel, branch_of
from ..replay.call import Call
from ..replay.interceptor import GUARD, Run, Stage, put_stage, take_stages
from ..replay.restart import Sampling, StartAgain
from .asked import holds_nan
from .clamps import hiding_is_seen
from .escalation import Guarded, WiderModel, depends_on, watches_clamps
from .failure import REPEATED_BESIDE, ModelCall
from .notices import guard_log

LOGS_KEPT = 8
MAX_RETRIES = 8
CONTROLNET = (
    "A ControlNet was active. Its output is checked, but the guard's retries reuse it and do not run it again. It "
    "follows the plan of Load ControlNet only."
)


def with_guard(patcher, on_nan: OnNan, max_retries: int, node_id: str | None = None, check: Callable | None = None):
    """Return a clone of the model with a guard on its calls, which replaces an earlier guard.

    ``check``: makes the comparison of a call with fp32 (``check.drift.checking``).
    """
    clone = patcher.clone()
    put_stage(clone, GUARD, Guard(on_nan, max_retries, node_id, check))
    return clone


def look_at_results(patcher: ModelPatcher) -> None:
    """Check the results of a patcher whose plan has a fallback, unless a guard does already; remove the check
    otherwise."""
    guard, compute = Guard.on(patcher), Compute.on(patcher)
    if guard and guard.on_nan != OFF:
        return
    take_stages(patcher, GUARD)
    if compute and compute.fallback:
        put_stage(patcher, GUARD, Guard(OFF, 0, running_node_id()))


class Guard(Stage):
    """Check the result of each call of a model, and repeat a call whose result is not finite.

    With ``on_nan`` off only the fallback of the compute plan is tried.
    """

    name = GUARD

    def __init__(self, on_nan: OnNan, max_retries: int, node_id: str | None, check: Callable | None = None):
        self.on_nan = on_nan
        self.max_retries = max_retries
        self.node_id = node_id
        self.check = check
        self.states: PerModel[Guarded] = PerModel(lambda model: Guarded(model, on_nan == "retry_higher"), depends_on)
        self._logs: dict[tuple, GuardLog] = {}

    def around_call(self, run: Run, call: Call) -> torch.Tensor:
        """Make a call; repeat or report it if its result is NaN or Inf."""
        guarded, log = self.states.of(call.model), self._log(call.model.current_patcher)
        number = log.begin_call()
        if self.on_nan != OFF:
            log.remarks |= {CONTROLNET} if call.control else set()
            self._check_device(call, guarded, log)
        start = RandomStart.of(call.x.device)
        check = self.check and self.check(call, number, guarded, log)
        watching = check.watching() if check else contextlib.nullcontext()
        asking = contextlib.nullcontext() if self.on_nan == OFF else guarded.asking()
        with guarded.clamps(call.x.device) as watch, watching, asking as asked:
            call.rung = guarded.layers
            try:
                result = run(call)
            except BaseException:
                log.drop_call()
                raise
        sizes = [amax(result)]
        if asked:
            sizes.append(asked.largest().to(result.device))
        numbers = torch.stack(sizes)
        if watch:
            numbers = torch.cat([numbers, watch.largest])
        largest, *hidden = numbers.tolist()
        of_weights = hidden.pop(0) if asked else 0.0
        finite = math.isfinite(largest)
        sites = watch.hidden(hidden) if watch and finite else frozenset()
        nan_weights, nan_inputs = finite and math.isnan(of_weights), finite and log.nan_given and not log.harmless
        if asked:
            log.remarks |= asked.remarks()
        if check:
            check.compare(run, result) if finite and not sites else check.leave_out()
        if log.given_up or (finite and not (sites or nan_weights or nan_inputs)):
            return result
        failed = ModelCall(run, call, number, start, result, guarded, sites, nan_weights, nan_inputs)
        if nan_weights or log.nan_given:  # what is hidden in fp32 too may be that NaN: it says nothing of other calls
            failed.by_design = set(failed.by_design)
        if failed.packs and not failed.can_start_again:
            log.remarks.add(Message(REPEATED_BESIDE, failed.packs))
        try:
            return Ladder(failed, log, self.max_retries).resolved()
        finally:
            failed.settle()

    def around_sampling(self, executor, noise, latent_image, sampler, sigmas, denoise_mask=None, *args, **kwargs):
        """Check the inputs and the result of a sampler's run."""
        guider = executor.class_obj
        log = self._begin(guider.model_patcher)
        before, again = log.calls, Sampling(guider, sampler)
        for guarded in self.states.kept():
            guarded.begin_run()
        try:
            if self.on_nan != OFF:
                given = _inputs_of_run(noise, latent_image, sigmas, denoise_mask, guider.conds)
                log.blame_inputs(given, len(noise))
                log.nan_given = holds_nan(tensors_in([*guider.conds.values()]))
            hiding = hiding_is_seen if watches_clamps(guider.model_patcher) else contextlib.nullcontext()
            with _text_adapter_in_fp32(guider.model_patcher.model, log.adapted), hiding:
                result = again.run(executor, noise, latent_image, sampler, sigmas, denoise_mask, *args, **kwargs)
            if self.on_nan != OFF:
                log.blame_between_calls(result, sigmas)
            if log.given_up:
                self._take_back(again, log)
            return result
        except StartAgain:  # of a sampler around this one, which runs this one again
            self._take_back(again, log)
            raise
        except BaseException as error:
            self._take_back(again, log)
            log.blame_end(error, is_oom)
            raise
        finally:
            if self.on_nan != OFF:
                log.notify_calls(log.calls - before)
            log.notify_verdict(self._plan(guider.model_patcher))

    def _take_back(self, sampling: Sampling, log: GuardLog) -> None:
        if sampling.take_back():
            log.take_back()

    def report(self, patcher: ModelPatcher) -> GuardReport:
        """Report on the last prompt of a patcher, or of a clone with the same arithmetic.

        The plans of all devices are merged, because rules apply to all of them.
        """
        if self.on_nan == OFF and not self._log(patcher).events:
            return GuardReport()
        return self._log(patcher).report(self._plan(patcher))

    def _plan(self, patcher: ModelPatcher) -> PlanInUse:
        return functools.reduce(operator.or_, (run.plan for run in self.states.runs_of(patcher)), PlanInUse())

    def remarks(self, patcher: ModelPatcher) -> list[str]:
        """List remarks on other nodes' code that ran with the model."""
        return sorted(self._log(patcher).remarks)

    def states_of(self, patcher: ModelPatcher) -> dict[str, LayerState]:
        """Return layer -> how it runs; layers that the guard widened, as they run now."""
        states, guarded = states_of(patcher), self.states.last_of(patcher)
        wider = guarded.layers if guarded else None
        modes = (wider.modes() if wider else {}) | dict.fromkeys(self._log(patcher).adapted, FP32.name)
        for name in states.keys() & modes.keys():
            states[name] = states[name].in_fp32_stream(modes[name], called=not wider or name not in wider.not_called)
        return states

    def ranges(self, patcher: ModelPatcher) -> dict[str, float]:
        """Map each layer that runs wider to the amax of its operands."""
        guarded = self.states.last_of(patcher)
        return guarded.layers.calibration.largest() if guarded and guarded.layers else {}

    def _log(self, patcher: ModelPatcher) -> GuardLog:
        return self._logs.get(self._branch(patcher)) or self._begin(patcher)

    def _branch(self, patcher: ModelPatcher) -> tuple:
        """Return the key of a patcher's log. MultiGPU clones on other devices and a patcher that fell back have the
        same key."""
        return *branch_of(patcher), Compute.on(patcher), activation_dtype(patcher)

    def _begin(self, patcher: ModelPatcher) -> GuardLog:
        """Return the log for a sampler's run: the last one if it is of the same prompt, else a new one. The logs of
        the last ``LOGS_KEPT`` branches are kept."""
        branch = self._branch(patcher)
        prompt = running_prompt_id()
        planned = Compute.on(patcher)
        log = self._logs.pop(branch, None)
        if log is None or prompt is None or log.prompt != prompt:
            log = guard_log(self.on_nan, self.node_id, prompt, planner=planned.node_id if planned else None)
        log.begin_run()
        self._logs[branch] = log
        for oldest in list(self._logs)[:-LOGS_KEPT]:
            del self._logs[oldest]
        return log

    def _check_device(self, call: Call, guarded: Guarded, log: GuardLog) -> None:
        """Check test operations in the model's dtype once per device: some devices return zeros."""
        device, mode = guarded.device, guarded.plan.dtype
        if str(device) in log.devices:
            return
        log.devices.add(str(device))
        if mode not in probes.GEMM_TOLERANCE or guarded.plan.whole:
            return
        ok, detail = probes.canary(device, mode)
        if not ok and log.blame_device(CallPosition(log.calls, 0, call.sigma()), device, mode, detail):
            guarded.remember(guarded.plan.fp32())


def _inputs_of_run(noise, latent_image, sigmas, denoise_mask, conds: dict) -> list[NotFiniteInput]:
    """List the inputs of a sampler's run with NaN."""
    masks = [cond.get("mask") for group in conds.values() for cond in group]
    named = [
        (SIGMAS, sigmas.sum()),
        ("latent image", latent_image),
        ("noise", noise),
        ("noise mask", denoise_mask),
        ("mask of a conditioning", masks),
    ]
    return [one for one in inputs_not_finite(named) if one.has_nan]


@contextlib.contextmanager
def _text_adapter_in_fp32(model: BaseModel, ran: set[str]) -> Iterator[None]:
    """Run the text adapter of a model in fp32 inside of the context, and add the names of its layers to ``ran``.

    A text adapter is small, runs once per prompt, and an overflow in it would be blamed on the conditioning.
    """
    if not adapts_text(model):
        yield
        return
    layers = WiderModel(PlanInUse({name: FP32.name for name, _ in matrix_layers(model)}).fp32(), model)
    with conditions_through(model, layers.adapted):
        yield
    ran.update(layers.calibration.flops)
