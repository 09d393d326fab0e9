"""A call that gave NaN or Inf, as ComfyUI can make it again; whom to notify of it."""

import functools
import logging
from collections.abc import Callable, Sequence

import torch

from ....precision.base.amax import amax_value
from ....precision.base.modes import FP16_WIDE, label_of
from ....precision.base.patching import Patch, compile_disabled, patched
from ....precision.guard.failed_call import Attempt, FailedCall
from ....precision.guard.inputs import NotFiniteInput
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition, Notify
from ....precision.guard.policy import ALL_IN_FP32, AS_PLANNED, Escalation, escalation_after, model_steps
from ....precision.guard.random_start import RandomStart
from ....precision.guard.verdicts import GOES_ON, MODEL, SAME_SEED
from ....precision.report.schema import GuardEvent
from ..comfyui.execution import is_compiled, is_on_several_devices, is_oom
from ..comfyui.gate import measuring
from ..comfyui.page import running_prompt_id, send_to_page, show_progress
from ..compute.attention import OVERRIDE, overridden
from ..compute.executor import fall_back, fallen_back, may_fall_back
from ..replay.call import Call
from ..replay.code_owner import code_owner, packs_on
from ..replay.interceptor import Run
from ..replay.restart import StartAgain
from .causes import LoadedWeights, call_inputs
from .escalation import EscalatedLayers, Guarded, RangeObserver

REPEATED_BESIDE = (
    "A failed call was repeated beside {0}, because the sampling could not restart: {0} may have kept state from the "
    "failed call."
)
OUR_PACKAGE = __name__.partition(".nodes.")[0]
logger = logging.getLogger("halfsafe")


def notifier(node_id: str | None, prompt: str | None = None, of: str = "", planner: str | None = None) -> Notify:
    """Return a function to notify the user of a node's events, in ``prompt`` or else in the running prompt.

    ``of``: what is guarded, as for :func:`send_to_page`. ``planner``: the node that planned what the model computes in.
    """

    def notify(kind: str, verdict: str, message: str, advice: str, event: GuardEvent | None = None) -> None:
        if event:
            if event.recovered and event.to_mode:
                show_progress(f"{event.layer or 'the model'}: repeated in {label_of(event.to_mode)}, no NaN")
            logger.warning("Halfsafe guard: %s %s", message, advice)
        fell_back = planner if event and event.fell_back else None
        send_to_page(node_id, prompt or running_prompt_id(), kind, verdict, message, advice, event, of, fell_back)

    return notify


class ModelCall(FailedCall):
    """One call of a diffusion model, the ``number``th of its run. Methods do what ``FailedCall`` says of them."""

    def __init__(
        self,
        run: Run,
        call: Call,
        number: int,
        start: RandomStart,
        result: torch.Tensor,
        guarded: Guarded,
        hidden: bool,
    ):
        self.model = call.model
        self.guarded = guarded
        self._run = run
        patcher = call.model.current_patcher
        promised = AS_PLANNED if may_fall_back(patcher) and not guarded.escalation else None
        can_start_again = call.sampling is not None and call.sampling.can_start_again
        self._last: Attempt | None = None
        super().__init__(
            call,
            result,
            start,
            CallPosition(number, step_of(call), sigma_of(call)),
            images=images_of(call, result),
            device=call.x.device,
            weights=LoadedWeights(patcher),
            wording=MODEL,
            steps=[ALL_IN_FP32] if promised else model_steps(guarded.modes, guarded.stream, guarded.escalation),
            in_fp32=ALL_IN_FP32,
            tell=show_progress,
            is_out_of_memory=is_oom,
            hidden=hidden,
            promised=promised,
            compiled=is_compiled(patcher),
            packs=" and ".join(packs_on(call)),
            can_start_again=can_start_again and not is_on_several_devices(patcher),
        )

    def run(self, given: Call) -> Attempt:
        return self._attempt(given.again(self.guarded.layers))

    def watched(self, given: Call) -> tuple[Attempt, Origin | None]:
        return self._watched(given.again(self.guarded.layers))

    def watched_at(self, step: Escalation, given: Call) -> Origin | None:
        return self._watched(given.again(EscalatedLayers(step, self.model, self.guarded.modes)))[1]

    def maker(self, layer: str) -> str:
        return code_owner(self.model.diffusion_model.get_submodule(layer).forward)

    def _watched(self, again: Call) -> tuple[Attempt, Origin | None]:
        localizer = Localizer(self.model.diffusion_model, measuring)
        again.executor = functools.partial(_watched, localizer, again.executor)
        with compile_disabled():
            attempt = self._attempt(again)
        return attempt, localizer.origin(attempt.result)

    def run_at(self, step: Escalation, given: Call, zeroed: Sequence[str] = ()) -> Attempt:
        if step == AS_PLANNED:
            with fallen_back(self.model):
                return self._attempt(given.again(None))
        layers = EscalatedLayers(step, self.model, self.guarded.modes)
        self._observer = RangeObserver(layers)
        again = given.again(layers)
        if zeroed:
            again.executor = functools.partial(_with_weights, self.weights.zeroed(zeroed), again.executor)
        with self._observer.watching():
            return self._attempt(again)

    def inputs(self, given: Call) -> list[NotFiniteInput]:
        return call_inputs(given, first=self.position.call == 1)

    def replaced(self, given: Call, function: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        return given.replaced(function)

    def modes(self, origin: Origin | None, step: Escalation | None = None) -> tuple[str, str]:
        if step == AS_PLANNED:
            return self.guarded.stream, FP16_WIDE.name
        return ("", "") if origin and origin.kind == "input" else self.guarded.modes_at(origin)

    def keep(self, step: Escalation, origin: Origin | None) -> str:
        if step == AS_PLANNED:
            fall_back(self.model)
            return f"{GOES_ON} {SAME_SEED}"
        guarded, ranges = self.guarded, self._observer.ranges()
        guarded.remember(escalation_after(step, guarded.escalation, ranges, origin, guarded.modes))
        return SAME_SEED

    def widened(self, step: Escalation) -> StartAgain:
        if step == AS_PLANNED:
            fall_back(self.model)
            return StartAgain(self.given.sampling)
        return StartAgain(self.given.sampling, self.guarded.remember(self.guarded.escalation | step))

    def settle(self) -> None:
        """Leave ComfyUI's state of the repeat that cured the call, or its state before the call, to later calls."""
        if self._last is None:
            return
        if self._last.finite:
            self.given.forget_dtype()
        else:
            self.given.forget()

    def _attempt(self, again: Call) -> Attempt:
        result = self._run(again)
        self._last = Attempt(result, amax_value(result))
        return self._last


def _watched(localizer: Localizer, executor: Callable, *args, **kwargs) -> torch.Tensor:
    """Run a model with every operation watched. Its ``transformer_options`` are the last of ComfyUI's positional
    arguments (``Call.run``)."""
    *others, options = args
    with localizer.watching():
        return executor(*others, _opaque_attention(localizer, options), **kwargs)


def _with_weights(weights: Sequence[Patch], executor: Callable, *args, **kwargs) -> torch.Tensor:
    with patched(weights):
        return executor(*args, **kwargs)


def _opaque_attention(localizer: Localizer, options: dict) -> dict:
    """Return ``transformer_options`` whose attention is watched as one operation, named after its kernel."""
    previous = options.get(OVERRIDE)
    others = previous is not None and not getattr(previous, "__module__", "").startswith(OUR_PACKAGE)

    def attend(function, attention, *args, **kwargs):
        name = getattr(previous, "__qualname__", type(previous).__name__) if others else function.__name__
        return localizer.opaque(f"attention by {name}", attention, *args, **kwargs)

    return overridden(options, attend)


def sigma_of(call: Call) -> float:
    """Read the noise level of a call back from the device."""
    return float(_sigma(call))


def _sigma(call: Call) -> torch.Tensor:
    return call.options.get("sigmas", call.t).flatten()[0].float()


def step_of(call: Call) -> int:
    """Find the step of the sampler's schedule that a call belongs to, with one read of the device; 0 where it has
    none."""
    schedule, sigma = call.options.get("sample_sigmas"), _sigma(call)
    return int((schedule.to(sigma) - sigma).abs().argmin()) if schedule is not None else 0


def images_of(call: Call, result: torch.Tensor) -> int:
    """Count the images of a call, whose batch has a row of each for every conditioning."""
    return max(1, result.shape[0] // max(1, len(call.options.get("cond_or_uncond") or [0])))
