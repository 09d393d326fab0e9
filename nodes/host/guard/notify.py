"""Notify the user of what a guard found: a line in ComfyUI's log and a message to the page."""

import functools
import logging

from ....precision.guard.log import Notify
from ....precision.guard.verdicts import asks_for_action
from ....precision.report.schema import GuardEvent
from ..page import running_prompt_id, send_to_page, show_progress

logger = logging.getLogger("halfsafe")


def notifier(node_id: str | None, prompt: str | None = None, of: str = "") -> Notify:
    """Return what notifies the user of the events of a node, in ``prompt`` or else the one that runs at the time.

    ``of``: what is guarded, as for :func:`send_to_page`.
    """
    return functools.partial(_notify, node_id, prompt, of)


def _notify(
    node_id: str | None,
    prompt: str | None,
    of: str,
    kind: str,
    verdict: str,
    message: str,
    advice: str,
    event: GuardEvent | None = None,
) -> None:
    if event:
        if event.recovered and event.to_mode:
            show_progress(f"{event.layer or 'The model'}: repeated in {event.to_mode}, finite")
        logger.warning("Halfsafe guard: %s %s", message, advice if asks_for_action(verdict) else "")
    send_to_page(node_id, prompt or running_prompt_id(), kind, verdict, message, advice, event, of)
