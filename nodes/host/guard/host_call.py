"""What failed calls have in common in ComfyUI: memory that it manages, a node that shows progress, a page to notify."""

import functools
import logging

from ....precision.guard.failed_call import FailedCall, Given, Result, Step
from ....precision.guard.log import Notify
from ....precision.guard.verdicts import asks_for_action
from ....precision.report.schema import GuardEvent
from ..comfyui.oom import is_oom
from ..comfyui.page import running_prompt_id, send_to_page, show_progress

logger = logging.getLogger("halfsafe")


class HostCall(FailedCall[Given, Step, Result]):
    """A failed call on a device whose memory ComfyUI manages."""

    def tell(self, doing: str) -> None:
        """Show the progress in words on the running node."""
        show_progress(doing)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether an error means that a repeat found no memory, in ComfyUI's words too."""
        return is_oom(error)


def notifier(node_id: str | None, prompt: str | None = None, of: str = "") -> Notify:
    """Return a function to notify the user of a node's events, in ``prompt`` or else in the running prompt.

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
