"""A call that gave NaN or Inf: where it became so, whether a higher precision cures it, and what is wrong if not."""

import functools
import math
from dataclasses import dataclass

import torch

from ....precision.amax import amax_value
from ....precision.arithmetic.compiling import compile_disabled
from ....precision.devices import probes
from ....precision.guard.localize import Localizer, Origin, first_bad_weight
from ....precision.guard.policy import (
    COMPILED,
    NO_MEMORY,
    Escalation,
    Where,
    escalate,
    escalate_to_fp32,
    event_of,
    sentence,
)
from ..load.devices import is_oom
from ..run.call import Call
from ..run.execution import is_compiled
from ..run.modules import top_level_parts
from .causes import bad_input, bad_weight, opaque_attention
from .escalation import EscalatedLayers, Observed
from .log import SpokenLog
from .state import WHOLE, Guarded


@dataclass
class FailedCall:
    """One failed call.

    Args:
        call: the call, and ``result`` what it gave.
        guarded: what the guard knows of its model, and ``log`` what it said of it.
        max_retries: how often it may be repeated.
        hidden: the result is finite, but the model's own code clamped what was not.
        origin: what failed, once it was located.
    """

    call: Call
    result: torch.Tensor
    guarded: Guarded
    log: SpokenLog
    max_retries: int
    hidden: bool
    origin: Origin | None = None

    def __post_init__(self):
        self.model = self.call.executor.class_obj
        self.where = _where(self.call, self.log.calls, self.result)

    def resolved(self) -> torch.Tensor:
        """The result to go on with.

        Raises:
            NonFinite: there is none, or the guard is to stop.
        """
        problem = None if self.hidden else bad_input(self.call, self.log.calls == 1)
        if problem:
            return self.log.give_up(self.where, *problem, result=self.result)
        if self.log.on_nan == "retry_higher":
            return self._repeated()
        if self.hidden and self.log.events:
            return self.result
        self._locate()
        if self.log.on_nan == "report" or self.hidden:
            self._note(False, "stopped")
            self.log.given_up = not self.hidden
            return self.result
        weight = self._weight_at_fault()
        return self._give_up("bad_weights" if weight else "stopped", weight)

    def _repeated(self) -> torch.Tensor:
        """A repeat needs more memory than the call did: ComfyUI's own message would not tell that there was one."""
        try:
            return self._in_higher_precision()
        except RuntimeError as error:
            if is_oom(error):
                self._note_unchanged(False, "stopped", NO_MEMORY)
            raise

    def _in_higher_precision(self) -> torch.Tensor:
        """The call again in the arithmetic of each rung, until its result is finite or nothing is left to try."""
        left = self.max_retries
        if left > 1:
            left -= 1
            again = self._locate()
            if not self.hidden and math.isfinite(amax_value(again)):
                self._note_unchanged(True, "device_fault", COMPILED if is_compiled(self.model.current_patcher) else "")
                return again
            if weight := self._weight_at_fault():
                return self._give_up("bad_weights", weight)
        for rung in self.guarded.rungs()[:left]:
            layers = EscalatedLayers(rung, self.model, self.guarded.modes)
            observed = Observed(layers)
            repeated = self._again(layers.call)
            if math.isfinite(amax_value(repeated)):
                self._recovered(rung, observed)
                return repeated
        return self._not_cured(left)

    def _again(self, active) -> torch.Tensor:
        self.log.extra_calls += 1
        return self.guarded.run(self.call, active)

    def _locate(self) -> torch.Tensor:
        """The call again as it was, every operation watched, to find what failed: its result."""
        localizer, layers = Localizer(self.model.diffusion_model), self.guarded.layers

        def watched(executor, *args, **kwargs):
            call = Call(executor, *args, **kwargs)
            call.options = opaque_attention(localizer, call.options)
            with localizer.watching():
                return call()

        def active(executor, *args, **kwargs):
            inner = functools.partial(watched, executor)
            inner.class_obj = executor.class_obj
            return layers.call(inner, *args, **kwargs) if layers else inner(*args, **kwargs)

        with compile_disabled():
            result = self._again(active)
        self.origin = localizer.origin(result)
        return result

    def _recovered(self, rung: Escalation, observed: Observed) -> None:
        self.call.forget_dtype()
        present, modes = self.guarded.escalation, self.guarded.modes
        if not rung.whole:
            grown = escalate(present, observed.seen(), self.origin, modes)
        elif self.guarded.half:
            grown = WHOLE
        else:
            grown = escalate_to_fp32(present, self.origin, modes, top_level_parts(self.model.diffusion_model))
        self.guarded.remember(grown)
        self._note(True, "recovered")

    def _not_cured(self, left: int) -> torch.Tensor:
        if left < len(self.guarded.rungs()):
            return self._give_up("stopped", f"max_retries is {self.max_retries}, which left repeats untried: raise it.")
        if weight := self._weight_at_fault(everywhere=True):
            return self._give_up("bad_weights", weight)
        ok, detail = probes.canary(self.call.x.device, "fp32")
        return self._give_up("not_precision") if ok else self._give_up("device_fault", f"{detail}.")

    def _weight_at_fault(self, everywhere: bool = False) -> str:
        """Which weight of which file or LoRA is not finite, as a sentence; empty where none is."""
        patcher, layer = self.model.current_patcher, self.origin.layer if self.origin else ""
        if self.origin and self.origin.kind == "weights":
            return bad_weight(patcher, self.origin.op)
        return bad_weight(patcher, first_bad_weight(self.model.diffusion_model) if everywhere else None, layer)

    def _give_up(self, verdict: str, advice: str = "") -> torch.Tensor:
        mode, _ = self.guarded.modes_at(self.origin)
        return self.log.give_up(self.where, self.origin, verdict, advice, mode, self.result)

    def _note(self, recovered: bool, verdict: str) -> None:
        event = event_of(self.where, self.origin, *self.guarded.modes_at(self.origin), recovered)
        self.log.note(event, sentence(event, self.origin), verdict)

    def _note_unchanged(self, recovered: bool, verdict: str, advice: str) -> None:
        """Note what is no layer's fault, the arithmetic being as it was."""
        event = event_of(self.where, None, self.guarded.stream, self.guarded.stream, recovered)
        self.log.note(event, sentence(event, None), verdict, advice)


def bad_rows(tensor: torch.Tensor) -> list[int]:
    """The places along the first dimension that hold NaN or Inf."""
    return (~torch.isfinite(tensor.flatten(1))).any(1).nonzero().flatten().tolist()


def _where(call: Call, number: int, result: torch.Tensor) -> Where:
    sigma = float(call.options.get("sigmas", call.t).flatten()[0])
    schedule = call.options.get("sample_sigmas")
    step = int((schedule.float().cpu() - sigma).abs().argmin()) if schedule is not None else 0
    images = max(1, result.shape[0] // max(1, len(call.options.get("cond_or_uncond") or [0])))
    return Where(number, step, sigma, sorted({row % images for row in bad_rows(result)}), images)
