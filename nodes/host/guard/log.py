"""What a guard says of one model in one prompt: in the report, in the log and to the page."""

import logging
from dataclasses import dataclass

import torch

from ....precision.guard.localize import Origin
from ....precision.guard.policy import ADVICE, GuardLog, NonFinite, Where, event_of, sentence
from ....precision.report.schema import GuardEvent
from ..page import tell_page

logger = logging.getLogger("halfsafe")


@dataclass
class SpokenLog(GuardLog):
    """A log whose events are told as they happen, by the node ``node_id`` with its setting ``on_nan``."""

    on_nan: str = ""
    node_id: str | None = None

    def note(self, event: GuardEvent, message: str, verdict: str, advice: str = "") -> None:
        """Add an event and tell it."""
        advice = advice or ADVICE[verdict]
        self.add(event, verdict, advice)
        logger.warning("Halfsafe guard: %s %s", message, "" if event.recovered else advice)
        tell_page(self.node_id, self.prompt, "event", verdict, message, advice, event)

    def give_up(
        self, where: Where, origin: Origin | None, verdict: str, advice: str = "", mode: str = "", result=None
    ) -> torch.Tensor | None:
        """Note what repeats cannot cure. Raises where nothing is left to save; ``report`` never does."""
        event = event_of(where, origin, mode, mode, False)
        message = sentence(event, origin)
        self.note(event, message, verdict, advice)
        self.given_up = True
        if self.on_nan == "stop" or (self.on_nan == "retry_higher" and where.spoils_all):
            raise NonFinite(message, verdict, advice)
        return result

    def tell_verdict(self) -> None:
        """Sum up a sampler's run, unless there is nothing to tell."""
        if self.verdict != "clean":
            events, repeats = _count(len(self.events), "event"), _count(self.extra_calls, "repeated call")
            tell_page(self.node_id, self.prompt, "verdict", self.verdict, f"Guard: {self.verdict}, {events}, {repeats}.", self.advice)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
