"""The guard around text adapters: layers of the diffusion model that ComfyUI runs once, before any call of it."""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ....precision.amax import amax_value
from ....precision.arithmetic.patching import patched
from ....precision.guard.case import Case
from ....precision.guard.failed_call import Attempt, Circumstances
from ....precision.guard.inputs import is_finite
from ....precision.guard.ladder import RandomStart
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition, GuardLog
from ....precision.guard.policy import ALL_IN_FP32, AS_PLANNED, Escalation
from ....precision.guard.wording import TEXT_ADAPTER
from ....precision.modes import FP16_WIDE
from ..run.compute import fall_back, fallen_back, may_fall_back
from ..run.conditions import TEXT, Make
from .causes import LoadedWeights
from .escalation import EscalatedLayers
from .failure import INSIDE
from .host_call import HostCall
from .state import Guarded

if TYPE_CHECKING:
    from comfy.model_base import BaseModel


def inside(make: Make) -> dict:
    """Make conditions inside of the compute plan, in fp32 where the guard's outermost wrapper asked for it."""
    layers = make.keywords.get(INSIDE)
    plain = functools.partial(make.func, **{name: value for name, value in make.keywords.items() if name != INSIDE})
    return layers.around(plain) if layers else plain()


def checked(make: Make, model: "BaseModel", guarded: Guarded, log: GuardLog, max_retries: int) -> dict:
    """Make conditions outside of the compute plan, and again where the model's adapter gives a text that is not finite.

    Args:
        max_retries: how often they may be made again to cure it.

    Raises:
        NonFinite: there is no finite text, or the guard is to stop.
    """
    start = RandomStart.of(guarded.device)
    call = AdapterCall(model, guarded)
    first = call.run(make)
    if first.finite or log.given_up or not _was_finite(make):
        return first.result
    return Case(call, start, log, make, first.result, max_retries).resolved()


class AdapterCall(HostCall[Make, Escalation, dict]):
    """The making of one text's conditions by a model's adapter."""

    wording = TEXT_ADAPTER

    def __init__(self, model: "BaseModel", guarded: Guarded):
        self.model, self.guarded = model, guarded
        self.weights = LoadedWeights(model.current_patcher)
        self.about = Circumstances(
            CallPosition(0),
            batch=1,
            images=0,
            device=guarded.device,
            steps=[] if guarded.text_in_fp32 else [ALL_IN_FP32],
            in_fp32=ALL_IN_FP32,
            promised=AS_PLANNED if may_fall_back(model.current_patcher) else None,
            nowhere=Origin("", "", "unknown", guarded.stream, math.nan),
        )

    def run(self, given: Make) -> Attempt[dict]:
        """Make the conditions again as they were."""
        return self.run_at(ALL_IN_FP32, given) if self.guarded.text_in_fp32 else _attempt(given)

    def watched(self, given: Make) -> tuple[Attempt[dict], Origin | None]:
        """Make the conditions again as they were with every operation watched: (attempt, what failed)."""
        localizer = Localizer(self.model.diffusion_model)
        with localizer.watching():
            attempt = self.run(given)
        return attempt, localizer.origin(attempt.result[TEXT].cond)

    def run_at(self, step: Escalation, given: Make, zeroed: Sequence[str] = ()) -> Attempt[dict]:
        """Make the conditions again under an escalation. ``zeroed``: weights that get a zero for each NaN and Inf."""
        if step == AS_PLANNED:
            with fallen_back(self.model):
                return _attempt(given)
        layers = EscalatedLayers(step, self.model, self.guarded.modes)
        with patched(self.weights.zeroed(zeroed)):
            return _attempt(functools.partial(given.func, **given.keywords, **{INSIDE: layers}))

    def rows(self, result: dict) -> set[int]:
        """Return the one row there is: a text is lost as a whole."""
        return {0}

    def with_nan(self, result: dict, rows: set[int]) -> dict:
        """Return the text as it is: one that is lost as a whole has no rows left to keep."""
        return result

    def modes(self, origin: Origin | None, step: Escalation | None = None) -> tuple[str, str]:
        """Return (mode in which the adapter failed, mode after ``step`` was kept)."""
        mode, _ = self.guarded.modes_at(origin)
        if step == AS_PLANNED:
            return mode, FP16_WIDE.name
        return mode, "fp32" if step else mode

    def keep(self, step: Escalation, attempt: Attempt[dict], origin: Origin | None) -> None:
        """Run the model's adapter in fp32 from now on, or all of the model as its plan promises."""
        if step == AS_PLANNED:
            fall_back(self.model)
        else:
            self.guarded.text_in_fp32 = True


def _attempt(make: Make) -> Attempt[dict]:
    conditions = make()
    text = conditions.get(TEXT)
    return Attempt(conditions, 0.0 if text is None else amax_value(text.cond))


def _was_finite(make: Make) -> bool:
    """Tell whether what the adapter was given is finite; else the model's call shows whether that matters."""
    given = (make.keywords.get(name) for name in ("cross_attn", "t5xxl_weights"))
    return all(is_finite(value) for value in given if isinstance(value, torch.Tensor))
