"""A call that gave NaN or Inf: where it became so, whether a higher precision cures it, and what is wrong if not."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ....precision.amax import amax_value
from ....precision.arithmetic.compiling import compile_disabled
from ....precision.devices import probes
from ....precision.guard.ladder import escalation_after, first_finite, model_rungs
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition, GuardLog, event_of
from ....precision.guard.policy import COMPILED, NO_MEMORY, Escalation
from ..facts.layers import top_level_parts
from ..run.call import Call
from ..run.execution import is_compiled
from ..run.oom import is_oom
from .causes import (
    NAN_GIVEN,
    PATCH_ADVICE,
    WITHOUT_PATCHES,
    Blame,
    Suspect,
    bad_patch,
    bad_weight,
    bad_weights_of,
    call_patches,
    finite_weights,
    has_nan,
    made_finite,
    opaque_attention,
    suspects,
    without_nan,
    without_patches,
)
from .repeats import Repeats
from .state import Guarded

MOST_SUSPECTS = 4
SAME_AGAIN = "The same call, in the same arithmetic and with the same random numbers, is finite."
EAGER_IS_FINITE = "The compiled call is NaN or Inf each time; without torch.compile it is finite."
FAILS_IN_FP32 = "In fp32 the call is NaN or Inf too."
MADE_FINITE = "In fp32 the call is NaN or Inf with it, and finite with a zero for each of its NaN and Inf."
PATCH_READ = "The first operation whose result is NaN or Inf reads this patch."
NAN_READ = "The weight holds NaN, and the first operation whose result is NaN or Inf reads it."
WEIGHTS_MADE_FINITE = "In fp32 the call is NaN or Inf too, and finite with a zero for each NaN and Inf of the weights."


@dataclass
class FailedCall:
    """One failed call.

    Args:
        repeats: repeats the call, whose first result was ``result``; ``number``: the call's own, from 1.
        guarded: what the guard knows of its model, and ``log`` what it said of it.
        hidden: the result is finite, but the model's own code clamped what was not.
        origin: what failed, once it was located.
    """

    repeats: Repeats
    number: int
    result: torch.Tensor
    guarded: Guarded
    log: GuardLog
    hidden: bool
    origin: Origin | None = None

    def __post_init__(self):
        self.call, self.model = self.repeats.call, self.repeats.call.model
        self.images = images_of(self.call, self.result)
        self.rows = set(bad_rows(self.result))
        self.lost: set[int] = set()
        self.suspects: list[Suspect] = []

    @property
    def position(self) -> CallPosition:
        """Where the call stands, with the images that are still to be explained."""
        return self._position(self.rows)

    def _position(self, result_rows: set[int]) -> CallPosition:
        rows = sorted({row % self.images for row in result_rows})
        spoils_all = len(self.log.lost.union(rows)) >= self.images
        return CallPosition(self.number, step_of(self.call), sigma_of(self.call), rows, spoils_all)

    def resolved(self) -> torch.Tensor:
        """The result to go on with.

        Raises:
            NonFinite: there is none, or the guard is to stop.
        """
        if self.hidden:
            self.suspects = suspects(self.repeats.call, self.number == 1)
            return self._as_asked()
        self._lose({row for row in self.rows if row % self.images in self.log.lost})
        self.suspects = suspects(self.repeats.call, self.number == 1)
        for suspect in self.suspects:
            self._lose_rows_given_nan(suspect)
        self.suspects = suspects(self.repeats.call, self.number == 1)
        if not self.rows:
            return self.result
        result = self._as_asked()
        return result.index_fill(0, torch.tensor(sorted(self.lost), device=result.device), math.nan) if self.lost else result

    def _lose(self, rows: set[int]) -> None:
        self.rows -= rows
        self.lost |= rows

    def _lose_rows_given_nan(self, suspect: Suspect) -> None:
        """Blame a suspect's NaN for the rows that were given it, and go on with the others as if it were finite there."""
        rows = suspect.nan_rows(len(self.result)) & self.rows
        self.repeats.call = without_nan(self.repeats.call, suspect)
        if rows:
            position, blame = self._position(rows), suspect.blame(NAN_GIVEN)
            self._lose(rows)
            self.log.give_up(position, blame.origin, blame.verdict, blame.advice, evidence=blame.evidence)

    def _as_asked(self) -> torch.Tensor:
        """What the node's setting gives for a call that no NaN it was given explains."""
        if self.log.on_nan == "retry_higher":
            return self._repeated()
        if self.hidden and self.log.verdict != "clean":
            return self.result
        self._locate()
        if self.hidden:
            self._note(False, "stopped")
            return self.result
        try:
            blame = self._weight_at_fault() or self._input_at_fault() or self._patch_at_fault()
        except RuntimeError as error:
            if not is_oom(error):
                raise
            blame = Blame(self.origin, "stopped", NO_MEMORY)
        return self._give_up(blame or Blame(self.origin, "stopped"))

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
        if self.repeats.most > 1:
            again = self._locate()
            if not self.hidden and math.isfinite(amax_value(again)):
                return self._finite_again(again)
            if blame := self._weight_at_fault():
                return self._give_up(blame)
        return self._up_the_ladder()

    def _up_the_ladder(self) -> torch.Tensor:
        rungs = model_rungs(self.guarded.modes, self.guarded.stream, self.guarded.escalation)
        if self._comes_from_inputs():
            rungs = rungs[-1:]
        if self.repeats.failed_in_fp32:
            rungs = rungs[:-1]
        repeat = first_finite(rungs[: self.repeats.left], self.repeats.attempt)
        if repeat is None:
            return self._not_cured()
        self._recovered(repeat.rung)
        return repeat.result

    def _finite_again(self, watched: torch.Tensor) -> torch.Tensor:
        """What to do where the call was finite with every operation watched: once more exactly as it was, to tell why."""
        if not self.repeats.left:
            return self._up_the_ladder()
        layers = self.guarded.layers
        plain = self.repeats.again(layers.call if layers else None)
        if math.isfinite(amax_value(plain)):
            self._note_unchanged(True, "device_fault", None, SAME_AGAIN)
            return plain
        if is_compiled(self.model.current_patcher):
            self._note_unchanged(True, "device_fault", COMPILED, EAGER_IS_FINITE)
            return watched
        return self._up_the_ladder()

    def _locate(self) -> torch.Tensor:
        """The call again as it was, every operation watched, to find what failed: its result."""
        localizer, layers = Localizer(self.model.diffusion_model), self.guarded.layers

        def run(call: Call) -> torch.Tensor:
            call.executor = functools.partial(_watched, localizer, call.executor)
            return layers.call(call) if layers else call()

        with compile_disabled():
            result = self.repeats.again(run)
        self.origin = localizer.origin(result)
        return result

    def _recovered(self, rung: Escalation) -> None:
        self.repeats.call.forget_dtype()
        guarded, parts = self.guarded, top_level_parts(self.model.diffusion_model)
        ranges = self.repeats.observer.ranges()
        guarded.remember(escalation_after(rung, guarded.escalation, ranges, self.origin, guarded.modes, guarded.half, parts))
        self._note(True, "recovered")

    def _not_cured(self) -> torch.Tensor:
        if self.repeats.failed_in_fp32 is None:
            return self._give_up(self._untried())
        blame = self._input_at_fault() or self._weight_at_fault(everywhere=True) or self._patch_at_fault()
        untold = self.suspects or bad_weights_of(self.model.diffusion_model) or call_patches(self.repeats.call)
        if not blame and not self.repeats.left and untold:
            return self._give_up(self._untried())
        ok, detail = probes.canary(self.call.x.device, "fp32")
        if not ok:
            blame = Blame(self.origin, "device_fault", f"{detail}.", "A test product in fp32 is wrong.")
        return self._give_up(blame or Blame(self.origin, "not_precision", None, FAILS_IN_FP32))

    def _untried(self) -> Blame:
        return Blame(self.origin, "stopped", f"max_retries is {self.repeats.most}, which left repeats untried: raise it.")

    def _comes_from_inputs(self) -> bool:
        """Tell whether what is infinite came in with the inputs, as far as the operations watched can tell."""
        return not self.hidden and bool(self.suspects) and self.origin is not None and self.origin.kind == "unknown"

    def _input_at_fault(self) -> Blame | None:
        """The input without whose infinite values the call is finite in fp32, where with them it is not."""
        if not self.suspects or (self.repeats.failed_in_fp32 is None and not self._comes_from_inputs()) or not self.repeats.fails_in_fp32():
            return None
        groups = [[suspect] for suspect in self.suspects]
        groups += [self.suspects] if len(groups) > 1 else []
        for group in groups[:MOST_SUSPECTS]:
            if self.repeats.finite_in_fp32(made_finite(self.repeats.call, group)):
                names = " and the ".join(suspect.name for suspect in group)
                advice = group[0].advice if len(group) == 1 else None
                return replace(group[0], name=names, advice=advice).blame(MADE_FINITE)
        return None

    def _patch_at_fault(self) -> Blame | None:
        """The functions that nodes put into the model's blocks, if the call is finite in fp32 without them and not with them."""
        names = call_patches(self.repeats.call)
        unknown = self.origin is not None and self.origin.kind == "unknown"
        if not names or (self.repeats.failed_in_fp32 is None and not unknown) or not self.repeats.fails_in_fp32():
            return None
        if not self.repeats.finite_in_fp32(without_patches(self.repeats.call)):
            return None
        return Blame(Origin(f"model patch {names}", "", "input", "", math.nan), "bad_input", PATCH_ADVICE, WITHOUT_PATCHES)

    def _weight_at_fault(self, everywhere: bool = False) -> Blame | None:
        """The weight or patch without whose values that are not finite the call would be finite.

        ``everywhere``: look at all weights, not only at what the operations watched lead to.
        """
        patcher, model, origin = self.model.current_patcher, self.model.diffusion_model, self.origin
        if origin and origin.kind == "unknown" and (patch := bad_patch(patcher, origin.layer)):
            return Blame(origin, "bad_weights", patch, PATCH_READ)
        bad = bad_weights_of(model) if everywhere or (origin and origin.kind == "weights") else {}
        name = origin.op if origin and origin.op in bad else next(iter(bad), "")
        if not name:
            return None
        if origin and name == origin.op and has_nan(bad[name]):
            return Blame(origin, "bad_weights", bad_weight(patcher, name), NAN_READ)
        if self.repeats.fails_in_fp32() and self.repeats.finite_in_fp32(self.repeats.call, finite_weights(model, list(bad))):
            return Blame(origin, "bad_weights", bad_weight(patcher, name), WEIGHTS_MADE_FINITE)
        return None

    def _give_up(self, blame: Blame) -> torch.Tensor:
        mode, _ = self.guarded.modes_at(self.origin)
        mode = "" if blame.origin and blame.origin.kind == "input" else mode
        self.log.give_up(self.position, blame.origin, blame.verdict, blame.advice, mode, blame.evidence)
        return self.result

    def _note(self, recovered: bool, verdict: str) -> None:
        event = event_of(self.position, self.origin, *self.guarded.modes_at(self.origin), recovered)
        self.log.note(event, self.origin, verdict)

    def _note_unchanged(self, recovered: bool, verdict: str, advice: str | None, evidence: str = "") -> None:
        """Note what is no layer's fault, the arithmetic being as it was."""
        event = event_of(self.position, None, self.guarded.stream, self.guarded.stream, recovered, evidence)
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


def step_of(call: Call) -> int:
    """Find the step of the sampler's schedule that a call belongs to; 0 where it has none."""
    schedule = call.options.get("sample_sigmas")
    return int((schedule.float().cpu() - sigma_of(call)).abs().argmin()) if schedule is not None else 0


def images_of(call: Call, result: torch.Tensor) -> int:
    """Count the images of a call, whose batch has a row of each for every conditioning."""
    return max(1, result.shape[0] // max(1, len(call.options.get("cond_or_uncond") or [0])))
