"""A call that gave NaN or Inf: where it became so, whether a higher precision cures it, and what is wrong if not."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ....precision.amax import amax_value
from ....precision.arithmetic.compiling import compile_disabled
from ....precision.devices import probes
from ....precision.guard.ladder import escalation_after, first_finite, model_rungs, random_state_kept
from ....precision.guard.localize import Localizer, Origin, first_bad_weight
from ....precision.guard.log import CallPosition, GuardLog, event_of
from ....precision.guard.policy import COMPILED, NO_MEMORY, Escalation
from ..load.devices import is_oom
from ..run.call import Call
from ..run.execution import is_compiled
from ..run.modules import top_level_parts
from .causes import bad_input, bad_weight, opaque_attention
from .escalation import EscalatedLayers, RangeObserver
from .state import Guarded

INSIDE = "halfsafe_guard"
"""The entry of ``transformer_options`` that tells the guard's innermost wrapper how to run a call; the model is given none."""


@dataclass
class FailedCall:
    """One failed call.

    Args:
        call: the call, and ``result`` what it gave.
        guarded: what the guard knows of its model, and ``log`` what it said of it.
        max_retries: how often it may be repeated.
        hidden: the result is finite, but the model's own code clamped what was not.
        origin: what failed, once it was located.
        observer: what measured the last repeat in a higher precision.
    """

    call: Call
    result: torch.Tensor
    guarded: Guarded
    log: GuardLog
    max_retries: int
    hidden: bool
    origin: Origin | None = None
    observer: RangeObserver = field(init=False)

    def __post_init__(self):
        self.model = self.call.model
        self.position = _position(self.call, self.log.calls, self.result)

    def resolved(self) -> torch.Tensor:
        """The result to go on with.

        Raises:
            NonFinite: there is none, or the guard is to stop.
        """
        problem = None if self.hidden else bad_input(self.call, self.log.calls == 1)
        if problem:
            self.log.give_up(self.position, *problem)
            return self.result
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
        return self._give_up("bad_weights" if weight else "stopped", weight or None)

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
                self._note_unchanged(True, "device_fault", COMPILED if is_compiled(self.model.current_patcher) else None)
                return again
            if weight := self._weight_at_fault():
                return self._give_up("bad_weights", weight)
        rungs = model_rungs(self.guarded.modes, self.guarded.stream, self.guarded.escalation)
        repeat = first_finite(rungs[:left], self._attempt)
        if repeat is None:
            return self._not_cured(left < len(rungs))
        self._recovered(repeat.rung)
        return repeat.result

    def _attempt(self, rung: Escalation) -> tuple[torch.Tensor, float]:
        """Repeat the call at a rung: (result, its largest magnitude)."""
        layers = EscalatedLayers(rung, self.model, self.guarded.modes)
        self.observer = RangeObserver(layers)
        result = self._again(functools.partial(layers.call, observing=self.observer.patches))
        return result, amax_value(result)

    def _again(self, run: Callable[[Call], torch.Tensor]) -> torch.Tensor:
        """Repeat the call, with ``run`` in the place of the model inside of all wrappers."""
        self.log.extra_calls += 1
        return self.call(**{INSIDE: run})

    def _locate(self) -> torch.Tensor:
        """The call again as it was, every operation watched, to find what failed: its result."""
        localizer, layers = Localizer(self.model.diffusion_model), self.guarded.layers

        def run(call: Call) -> torch.Tensor:
            call.executor = functools.partial(_watched, localizer, call.executor)
            return layers.call(call) if layers else call()

        with compile_disabled(), random_state_kept():
            result = self._again(run)
        self.origin = localizer.origin(result)
        return result

    def _recovered(self, rung: Escalation) -> None:
        self.call.forget_dtype()
        guarded, parts = self.guarded, top_level_parts(self.model.diffusion_model)
        ranges = self.observer.ranges()
        guarded.remember(escalation_after(rung, guarded.escalation, ranges, self.origin, guarded.modes, guarded.half, parts))
        self._note(True, "recovered")

    def _not_cured(self, untried: bool) -> torch.Tensor:
        if untried:
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

    def _give_up(self, verdict: str, advice: str | None = None) -> torch.Tensor:
        mode, _ = self.guarded.modes_at(self.origin)
        self.log.give_up(self.position, self.origin, verdict, advice, mode)
        return self.result

    def _note(self, recovered: bool, verdict: str) -> None:
        event = event_of(self.position, self.origin, *self.guarded.modes_at(self.origin), recovered)
        self.log.note(event, self.origin, verdict)

    def _note_unchanged(self, recovered: bool, verdict: str, advice: str | None) -> None:
        """Note what is no layer's fault, the arithmetic being as it was."""
        event = event_of(self.position, None, self.guarded.stream, self.guarded.stream, recovered)
        self.log.note(event, None, verdict, advice)


def _watched(localizer: Localizer, executor: Callable, *args, **kwargs) -> torch.Tensor:
    """Make a call with every operation watched."""
    call = Call(executor, *args, **kwargs)
    call.options = opaque_attention(localizer, call.options)
    with localizer.watching():
        return call()


def bad_rows(tensor: torch.Tensor) -> list[int]:
    """The places along the first dimension that hold NaN or Inf."""
    return (~torch.isfinite(tensor.flatten(1))).any(1).nonzero().flatten().tolist()


def sigma_of(call: Call) -> float:
    """Read the noise level of a call back from the device."""
    return float(call.options.get("sigmas", call.t).flatten()[0])


def _position(call: Call, number: int, result: torch.Tensor) -> CallPosition:
    sigma = sigma_of(call)
    schedule = call.options.get("sample_sigmas")
    step = int((schedule.float().cpu() - sigma).abs().argmin()) if schedule is not None else 0
    images = max(1, result.shape[0] // max(1, len(call.options.get("cond_or_uncond") or [0])))
    rows = sorted({row % images for row in bad_rows(result)})
    return CallPosition(number, step, sigma, rows, spoils_all=len(rows) >= images)
