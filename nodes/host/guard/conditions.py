"""The guard around text adapters: layers of the diffusion model that ComfyUI runs once per run, before any call of it."""

import math
from typing import TYPE_CHECKING

import torch

from ....precision.amax import amax_value
from ....precision.guard.ladder import RandomStart
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition, GuardLog, event_of
from ....precision.guard.policy import ALL_IN_FP32
from ..run.conditions import TEXT, Make
from .causes import bad_weight
from .escalation import EscalatedLayers
from .state import Guarded

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

ADAPTED = "The text was finite before the model's own adapter, and in fp32 it is after it too."
FAILS_IN_FP32 = "The text was finite before the model's own adapter; after it it is NaN or Inf in fp32 too."


class GuardedConditions:
    """One sampler's run: checks each text that the model's adapter gives, and makes one that is not finite again in fp32.

    Args:
        max_retries: how often one may be made again.
    """

    def __init__(self, model: "BaseModel", guarded: Guarded, log: GuardLog, max_retries: int):
        self.model = model
        self.guarded = guarded
        self.log = log
        self.max_retries = max_retries
        self._layers: EscalatedLayers | None = None

    def inside(self, make: Make) -> dict:
        """Make the conditions inside of the compute plan, in fp32 while a repeat asks for it."""
        return self._layers.around(make) if self._layers else make()

    def checked(self, make: Make) -> dict:
        """Make the conditions outside of the compute plan, and again where that is needed.

        Raises:
            NonFinite: there is no finite text, or the guard is to stop.
        """
        start = RandomStart.of(self.guarded.device)
        conditions = self._in_fp32(make) if self.guarded.text_in_fp32 else make()
        if _finite(conditions) or self.log.given_up or not _was_finite(make):
            return conditions
        origin = self._located(make, start)
        if self.log.on_nan == "retry_higher" and self.max_retries:
            return self._repeated(make, conditions, origin, start)
        return self._give_up(conditions, origin, "stopped")

    def _repeated(self, make: Make, conditions: dict, origin: Origin, start: RandomStart) -> dict:
        with start.again():
            again = self._in_fp32(make)
        self.log.extra_calls += 1
        if _finite(again):
            self.guarded.text_in_fp32 = True
            mode, _ = self.guarded.modes_at(origin)
            self.log.note(event_of(CallPosition(0), origin, mode, "fp32", True, ADAPTED), origin, "recovered")
            return again
        if origin.kind == "weights":
            return self._give_up(conditions, origin, "bad_weights", bad_weight(self.model.current_patcher, origin.op), FAILS_IN_FP32)
        return self._give_up(conditions, origin, "not_precision", None, FAILS_IN_FP32)

    def _in_fp32(self, make: Make) -> dict:
        self._layers = EscalatedLayers(ALL_IN_FP32, self.model, self.guarded.modes)
        try:
            return make()
        finally:
            self._layers = None

    def _located(self, make: Make, start: RandomStart) -> Origin:
        localizer = Localizer(self.model.diffusion_model)
        with start.again(), localizer.watching():
            text = make()[TEXT].cond
        self.log.extra_calls += 1
        return localizer.origin(text) or Origin("", "", "unknown", self.guarded.stream, math.nan)

    def _give_up(self, conditions: dict, origin: Origin, verdict: str, advice: str | None = None, evidence: str = "") -> dict:
        mode, _ = self.guarded.modes_at(origin)
        self.log.give_up(CallPosition(0, spoils_all=True), origin, verdict, advice, mode, evidence)
        return conditions


def _finite(conditions: dict) -> bool:
    text = conditions.get(TEXT)
    return text is None or math.isfinite(amax_value(text.cond))


def _was_finite(make: Make) -> bool:
    """Tell whether what the adapter was given is finite; else the model's call shows whether that matters."""
    given = (make.keywords.get(name) for name in ("cross_attn", "t5xxl_weights"))
    return all(math.isfinite(amax_value(value)) for value in given if isinstance(value, torch.Tensor))
