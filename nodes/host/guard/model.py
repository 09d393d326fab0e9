"""The NaN guard on a ModelPatcher: each call's result is checked once; one that is not finite is explained and repeated."""

import math
import weakref

import torch
from comfy.patcher_extension import WrappersMP

from ....precision.amax import amax, amax_value
from ....precision.devices import probes
from ....precision.guard.localize import Origin
from ....precision.guard.log import CallPosition, GuardLog, event_of
from ....precision.guard.policy import ADVICE, ALL_IN_FP32, Escalation
from ....precision.nested import tensors_in
from ....precision.report.schema import GuardReport
from ..page import running_prompt_id
from ..run.call import Call
from ..run.layers import settings_of
from ..run.per_model import PerModel
from ..run.wrappers import GUARD, GUARDED_LAYERS, set_wrapper
from .causes import sampler_inputs
from .clamps import ClampWatch
from .failure import INSIDE, FailedCall, bad_rows, sigma_of
from .notify import teller
from .state import Guarded


def with_guard(patcher, on_nan: str, max_retries: int, node_id: str | None = None):
    """A clone of the model whose calls are guarded. An earlier guard on it is replaced."""
    clone = patcher.clone()
    guard = Guard(on_nan, max_retries, node_id)
    set_wrapper(clone, GUARD, guard)
    set_wrapper(clone, GUARDED_LAYERS, guard.inside)
    set_wrapper(clone, GUARD, guard.sampling, WrappersMP.OUTER_SAMPLE)
    clone.set_attachments(GUARD, guard)
    return clone


def guard_of(patcher) -> "Guard | None":
    """The guard on a patcher, if it has one."""
    return patcher.attachments.get(GUARD)


class Guard:
    """ComfyUI's wrappers for one guard node: around each call, inside of all others, and around each sampler run."""

    def __init__(self, on_nan: str, max_retries: int, node_id: str | None):
        self.on_nan = on_nan
        self.max_retries = max_retries
        self.node_id = node_id
        self.states: PerModel[Guarded] = PerModel(lambda model: Guarded(model, on_nan == "retry_higher"), settings_of)
        self._logs: weakref.WeakKeyDictionary[torch.nn.Module, GuardLog] = weakref.WeakKeyDictionary()

    def __call__(self, executor, *args, **kwargs):
        call = Call(executor, *args, **kwargs)
        guarded, log = self.states.of(call.model), self._log(call.model)
        log.calls += 1
        if log.calls == 1:
            self._check_device(call, guarded, log)
        with ClampWatch(guarded.watches_clamps) as watch:
            result = call(**{INSIDE: guarded.layers and guarded.layers.call})
        sizes = torch.stack([amax(result), *watch.sizes(result.device)]).tolist()
        if all(map(math.isfinite, sizes)) or log.given_up:
            return result
        return FailedCall(call, result, guarded, log, self.max_retries, hidden=math.isfinite(sizes[0])).resolved()

    def inside(self, executor, *args, **kwargs):
        """Make a call inside of all other wrappers, as the guard's outermost one asked for in the call's options."""
        call = Call(executor, *args, **kwargs)
        call.options = dict(call.options)
        run = call.options.pop(INSIDE, None)
        return run(call) if run else call()

    def sampling(self, executor, noise, latent_image, sampler, sigmas, *args, **kwargs):
        """Around one run of a sampler: what goes in and what comes out."""
        log = self._begin(executor.class_obj.model_patcher.model)
        try:
            for origin, verdict in sampler_inputs(noise, latent_image, sigmas):
                log.give_up(CallPosition(0, 0, math.nan, [0], spoils_all=True), origin, verdict)
            result = executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
            bad = [] if log.given_up else [tensor for tensor in tensors_in(result) if not math.isfinite(amax_value(tensor))]
            if bad:
                rows = bad_rows(bad[0])
                position = CallPosition(log.calls, len(sigmas) - 1, float(sigmas[-1]), rows, len(rows) == len(bad[0]))
                log.give_up(position, Origin("sampler", "", "nan", "fp32", math.nan), "not_precision", mode="fp32")
            return result
        finally:
            log.tell_verdict()

    def report(self, patcher) -> GuardReport:
        """What was seen of a model in the last prompt that ran it."""
        guarded = self.states.last(patcher.model)
        return self._log(patcher.model).report(guarded.escalation if guarded else Escalation())

    def modes(self, patcher) -> dict[str, str]:
        """Layer -> mode, of the layers that run wider now."""
        guarded = self.states.last(patcher.model)
        return guarded.layers.modes() if guarded and guarded.layers else {}

    def ranges(self, patcher) -> dict[str, float]:
        """Layer -> the largest magnitude it was given, of the layers that run wider."""
        guarded = self.states.last(patcher.model)
        return guarded.layers.planned.ranges.largest() if guarded and guarded.layers else {}

    def _log(self, model) -> GuardLog:
        return self._logs.setdefault(model, self._new_log())

    def _new_log(self, prompt: str | None = None) -> GuardLog:
        return GuardLog(self.on_nan, teller(self.node_id, prompt), prompt=prompt)

    def _begin(self, model) -> GuardLog:
        """The log of a sampler's run: a new one, unless it is of the same prompt."""
        prompt = running_prompt_id()
        if prompt is None or self._log(model).prompt != prompt:
            self._logs[model] = self._new_log(prompt)
        for log in self._logs.values():
            log.given_up = False
        return self._logs[model]

    def _check_device(self, call: Call, guarded: Guarded, log: GuardLog) -> None:
        """Once per device and process: a product in the model's dtype, where some devices give zeros."""
        if guarded.stream not in probes.GEMM_TOLERANCE or guarded.escalation.whole:
            return
        ok, detail = probes.canary(call.x.device, guarded.stream)
        if ok:
            return
        cured = self.on_nan == "retry_higher"
        if cured:
            guarded.remember(ALL_IN_FP32)
        origin = Origin("", "matmul", "canary", guarded.stream, math.nan)
        position = CallPosition(log.calls, 0, sigma_of(call))
        event = event_of(position, origin, guarded.stream, "fp32" if cured else guarded.stream, cured)
        message, advice = f"A test product on {call.x.device} is wrong.", f"{detail}. {ADVICE['device_fault']}"
        error = log.note(event, origin, "device_fault", advice, message)
        if self.on_nan == "stop":
            raise error
