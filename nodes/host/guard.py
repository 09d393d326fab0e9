"""The NaN guard on a ModelPatcher: each call's result is checked once; a call that failed is explained and repeated."""

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Iterator

import torch
from comfy.patcher_extension import WrappersMP

from ...precision import probes
from ...precision.eager import eager
from ...precision.guard import (
    ADVICE,
    COMPILED,
    EVENT,
    NO_MEMORY,
    Escalation,
    GuardLog,
    NonFinite,
    Where,
    escalate,
    escalate_to_fp32,
    event_of,
    random_state_kept,
    sentence,
)  # fmt: skip
from ...precision.localize import Localizer, Origin, first_bad_weight, reach, tensors_in
from ...precision.ranges import magnitude
from ...precision.report import GuardReport, plain
from .blame import bad_input, bad_weight, opaque_attention, sampler_inputs
from .clamps import ClampWatch
from .escalated import EscalatedLayers, Observed, top_level_parts
from .guarded import WHOLE, Call, Guarded, bad_rows, known_as, state_of
from .layers import is_compiled
from .page import running_prompt_id, tell_page
from .per_model import PerModel
from .wrappers import order_wrappers

KEY = "halfsafe.guard"
INNER_KEY = "halfsafe.guard.layers"
logger = logging.getLogger("halfsafe")


def with_guard(patcher, on_nan: str, max_retries: int, node_id: str | None = None):
    """A clone of the model whose calls are guarded. An earlier guard on it is replaced."""
    clone = patcher.clone()
    guard = Guard(on_nan, max_retries, node_id)
    for kind, key, wrapper in (
        (WrappersMP.APPLY_MODEL, KEY, guard),
        (WrappersMP.APPLY_MODEL, INNER_KEY, guard.inside),
        (WrappersMP.OUTER_SAMPLE, KEY, guard.sampling),
    ):
        clone.remove_wrappers_with_key(kind, key)
        clone.add_wrapper_with_key(kind, key, wrapper)
    order_wrappers(clone)
    clone.set_attachments(KEY, guard)
    return clone


def guard_of(patcher) -> "Guard | None":
    """The guard on a patcher, if it has one."""
    return patcher.attachments.get(KEY)


class Guard:
    """ComfyUI's wrappers for one guard node: around each call, inside of all others, and around each sampler run."""

    learned: "weakref.WeakKeyDictionary[torch.nn.Module, dict]" = weakref.WeakKeyDictionary()

    def __init__(self, on_nan: str, max_retries: int, node_id: str | None):
        self.on_nan = on_nan
        self.max_retries = max_retries
        self.node_id = node_id
        self.states: PerModel[Guarded] = PerModel(self._guarded, state_of)
        self._active: weakref.WeakKeyDictionary[torch.nn.Module, Callable] = weakref.WeakKeyDictionary()
        self._logs: weakref.WeakKeyDictionary[torch.nn.Module, GuardLog] = weakref.WeakKeyDictionary()

    def __call__(self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        model = executor.class_obj
        guarded, log = self.states.of(model), self._log(model)
        log.calls += 1
        call = Call(executor, x, t, c_concat, c_crossattn, control, transformer_options or {}, kwargs)
        if log.calls == 1:
            self._check_device(call, guarded, log)
        with ClampWatch(guarded.watches_clamps) as watch:
            result = self._run(call, guarded.layers)
        sizes = torch.stack([magnitude(result), *watch.sizes(result.device)]).tolist()
        if all(map(math.isfinite, sizes)) or log.given_up:
            return result
        with random_state_kept():
            return self._failed(call, guarded, log, result, hidden=math.isfinite(sizes[0]))

    def inside(self, executor, *args, **kwargs):
        """Inside of all other wrappers: the model as the guard wants it in this call."""
        active = self._active.get(executor.class_obj)
        return active(executor, *args, **kwargs) if active else executor(*args, **kwargs)

    def sampling(self, executor, noise, latent_image, sampler, sigmas, *args, **kwargs):
        """Around one run of a sampler: what goes in and what comes out."""
        model = executor.class_obj.model_patcher.model
        log = self._begin(model)
        try:
            for problem in sampler_inputs(noise, latent_image, sigmas):
                self._hopeless(log, Where(0, 0, math.nan, [0]), *problem)
            result = executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
            bad = [] if log.given_up else [tensor for tensor in tensors_in(result) if not math.isfinite(reach(tensor))]
            if bad:
                rows = bad_rows(bad[0])
                where = Where(log.calls, len(sigmas) - 1, float(sigmas[-1]), rows, len(bad[0]))
                self._hopeless(log, where, Origin("sampler", "", "nan", "fp32", math.nan), "not_precision")
            return result
        finally:
            self._tell_verdict(log)

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

    def _guarded(self, model) -> Guarded:
        """Only a guard that may change what runs begins with what others have learned."""
        known = self.learned.get(model, {}) if self.on_nan == "retry_higher" else {}
        return Guarded(model, known.get(known_as(model), Escalation()))

    def _remember(self, model, guarded: Guarded, escalation: Escalation) -> None:
        guarded.grow(escalation)
        self.learned.setdefault(model, {})[known_as(model)] = escalation

    def _log(self, model) -> GuardLog:
        return self._logs.setdefault(model, GuardLog())

    def _begin(self, model) -> GuardLog:
        prompt, log = running_prompt_id(), self._log(model)
        if prompt is None or log.prompt != prompt:
            log = self._logs[model] = GuardLog(prompt)
        for any_log in (*self._logs.values(), log):
            any_log.given_up = False
        return log

    def _run(self, call: Callable, layers: EscalatedLayers | None) -> torch.Tensor:
        return self._with(call, layers.call if layers else None)

    def _with(self, call: Callable, active: Callable | None) -> torch.Tensor:
        model = call.executor.class_obj
        self._active[model] = active
        try:
            return call()
        finally:
            del self._active[model]

    def _check_device(self, call: Call, guarded: Guarded, log: GuardLog) -> None:
        """Once per device and process: a product in the model's dtype, where some devices give zeros."""
        if guarded.stream not in probes.GEMM_TOLERANCE or guarded.escalation.whole:
            return
        ok, detail = probes.canary(call.x.device, guarded.stream)
        if ok:
            return
        origin = Origin("", "matmul", "canary", guarded.stream, math.nan)
        if self.on_nan == "retry_higher":
            self._remember(call.executor.class_obj, guarded, WHOLE)
        where = Where(log.calls, 0, float(call.t.flatten()[0]), [])
        event = event_of(where, origin, guarded.stream, "fp32" if guarded.escalation.whole else guarded.stream, guarded.escalation.whole)
        advice = f"{detail}. {ADVICE['device_fault']}"
        self._note(log, event, f"A test product on {call.x.device} is wrong.", "device_fault", advice)
        if self.on_nan == "stop":
            raise NonFinite(f"A test product on {call.x.device} is wrong.", "device_fault", advice)

    def _failed(self, call: Call, guarded: Guarded, log: GuardLog, result: torch.Tensor, hidden: bool) -> torch.Tensor:
        where = call.where(log.calls, result)
        problem = None if hidden else bad_input(call, log.calls == 1)
        if problem:
            return self._hopeless(log, where, *problem, result)
        if self.on_nan == "retry_higher":
            with self._lack_of_memory_told(guarded, log, where):
                return self._repeated(call, guarded, log, result, where, hidden)
        if hidden and log.events:
            return result
        origin, _ = self._located(call, guarded, log)
        if self.on_nan == "report" or hidden:
            self._note(log, event_of(where, origin, *self._modes_at(guarded, origin), False), origin, "stopped")
            log.given_up = not hidden
            return result
        weight = self._weight_at_fault(call, origin)
        verdict, advice = ("bad_weights", weight) if weight else ("stopped", "")
        return self._hopeless(log, where, origin, verdict, result, advice, guarded=guarded)

    @contextlib.contextmanager
    def _lack_of_memory_told(self, guarded: Guarded, log: GuardLog, where: Where) -> Iterator[None]:
        """A repeat needs more memory than the call did: ComfyUI's own message would not tell that there was one."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            self._note(log, event_of(where, None, guarded.stream, guarded.stream, False), None, "stopped", NO_MEMORY)
            raise

    def _repeated(self, call, guarded: Guarded, log: GuardLog, result, where: Where, hidden: bool) -> torch.Tensor:
        """The call again in the arithmetic of each rung, until its result is finite or nothing is left to try."""
        left, origin = self.max_retries, None
        if left > 1:
            left -= 1
            origin, again = self._located(call, guarded, log)
            if not hidden and math.isfinite(reach(again)):
                advice = COMPILED if is_compiled(call.executor.class_obj.current_patcher) else ""
                self._note(log, event_of(where, None, guarded.stream, guarded.stream, True), None, "device_fault", advice)
                return again
            if weight := self._weight_at_fault(call, origin):
                return self._hopeless(log, where, origin, "bad_weights", result, weight, guarded=guarded)
        for rung in guarded.rungs()[:left]:
            log.extra_calls += 1
            call.cache.put_back()
            layers = EscalatedLayers(rung, call.executor.class_obj, guarded.modes)
            observed = Observed(layers)
            repeated = self._run(call, layers)
            if math.isfinite(reach(repeated)):
                self._recovered(call, guarded, log, where, origin, rung, observed)
                return repeated
        return self._not_cured(call, guarded, log, result, where, origin, left)

    def _located(self, call: Call, guarded: Guarded, log: GuardLog) -> tuple[Origin | None, torch.Tensor]:
        """The call again as it was, every operation watched: what failed, and the result."""
        log.extra_calls += 1
        call.cache.put_back()
        localizer = Localizer(call.executor.class_obj.diffusion_model)

        def watched(executor, x, t, c_concat, c_crossattn, control, options, **kwargs):
            with localizer.watching():
                return executor(x, t, c_concat, c_crossattn, control, opaque_attention(localizer, options), **kwargs)

        def active(executor, *args, **kwargs):
            layers = guarded.layers
            return layers.call(lambda *a, **k: watched(executor, *a, **k), *args, **kwargs) if layers else watched(executor, *args, **kwargs)

        with eager(True):
            result = self._with(call, active)
        return localizer.origin(result), result

    def _recovered(self, call, guarded: Guarded, log: GuardLog, where, origin, rung: Escalation, observed: Observed) -> None:
        call.cache.forget_dtype()
        before = self._modes_at(guarded, origin)[0]
        present = guarded.escalation
        if rung.whole:
            parts = top_level_parts(call.executor.class_obj.diffusion_model)
            grown = WHOLE if guarded.half else escalate_to_fp32(present, origin, guarded.modes, parts)
        else:
            grown = escalate(present, observed.seen(), origin, guarded.modes)
        self._remember(call.executor.class_obj, guarded, grown)
        self._note(log, event_of(where, origin, before, self._modes_at(guarded, origin)[1], True), origin, "recovered")

    def _not_cured(self, call, guarded: Guarded, log: GuardLog, result, where, origin, left: int) -> torch.Tensor:
        if left < len(guarded.rungs()):
            advice = f"max_retries is {self.max_retries}, which left repeats untried: raise it."
            return self._hopeless(log, where, origin, "stopped", result, advice, guarded=guarded)
        if weight := self._weight_at_fault(call, origin, everywhere=True):
            return self._hopeless(log, where, origin, "bad_weights", result, weight, guarded=guarded)
        ok, detail = probes.canary(call.x.device, "fp32")
        verdict, advice = ("not_precision", "") if ok else ("device_fault", f"{detail}.")
        return self._hopeless(log, where, origin, verdict, result, advice, guarded=guarded)

    def _weight_at_fault(self, call: Call, origin: Origin | None, everywhere: bool = False) -> str:
        """Which weight of which file or LoRA is not finite, as a sentence; empty where none is."""
        model = call.executor.class_obj
        if origin and origin.kind == "weights":
            return bad_weight(model.current_patcher, origin.op)
        name = first_bad_weight(model.diffusion_model) if everywhere else None
        return bad_weight(model.current_patcher, name, origin.layer if origin else "")

    def _modes_at(self, guarded: Guarded, origin: Origin | None) -> tuple[str, str]:
        """(mode by itself, mode now) of the layer that failed, or of the values between layers."""
        layer = origin.layer if origin else ""
        now = guarded.layers.modes() if guarded.layers else {}
        own = guarded.modes.get(layer, guarded.stream)
        if layer in guarded.modes:
            return own, now.get(layer, own)
        return own, "fp32" if guarded.escalation else own

    def _hopeless(self, log, where, origin, verdict, result=None, advice="", guarded=None) -> torch.Tensor:
        """Note what repeats cannot cure. Raises where nothing is left to save; ``report`` never does."""
        mode = self._modes_at(guarded, origin)[0] if guarded else (origin.dtype if origin else "")
        event = event_of(where, origin, mode, mode, False)
        self._note(log, event, origin, verdict, advice)
        log.given_up = True
        if self.on_nan == "stop" or (self.on_nan == "retry_higher" and where.spoils_all):
            raise NonFinite(sentence(event, origin), verdict, advice)
        return result

    def _note(self, log: GuardLog, event, origin: Origin | str | None, verdict: str, advice: str = "") -> None:
        message, advice = origin if isinstance(origin, str) else sentence(event, origin), advice or ADVICE[verdict]
        log.add(event, verdict, advice)
        logger.warning("Halfsafe guard: %s %s", message, "" if event.recovered else advice)
        self._tell(log.prompt, "event", verdict, message, advice, plain(event))

    def _tell_verdict(self, log: GuardLog) -> None:
        if log.verdict != "clean":
            message = f"Guard: {log.verdict}, {_count(len(log.events), 'event')}, {_count(log.extra_calls, 'repeated call')}."
            self._tell(log.prompt, "verdict", log.verdict, message, log.advice)

    def _tell(self, prompt: str | None, kind: str, verdict: str, message: str, advice: str, event: dict | None = None) -> None:
        data = {"node_id": self.node_id, "prompt_id": prompt, "kind": kind, "verdict": verdict, "message": message}
        tell_page(EVENT, {**data, "advice": advice, "event": event})


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
