"""The prompt that runs, and events to the page that queued it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from comfy_execution.utils import get_executing_context
from server import PromptServer

from ....precision.base.errors import HalfsafeError
from ....precision.base.message import messages_in

REPORT_EVENT = "halfsafe.report"
"""The report of a run; ``token`` names the result of the node that shows it."""
REFUSED_EVENT = "halfsafe.refused"
MESSAGES_EVENT = "halfsafe.messages"
"""Sent ahead of a text that ComfyUI sends: its messages."""
BADGE_EVENT = "halfsafe.badge"
"""Words that the badge of a node shows from now on."""
queued_by: ContextVar[str | None] = ContextVar("halfsafe_queued_by", default=None)
"""The id of the page that queues the prompt which the server is checking; None where no page
does."""


def running_prompt_id() -> str | None:
    """Return the id of the prompt that runs in the calling thread; None outside of a prompt."""
    return getattr(get_executing_context(), "prompt_id", None)


def running_node_id() -> str | None:
    """Return the id of the node that is running in this thread; None outside of one."""
    return getattr(get_executing_context(), "node_id", None)


def running_prompt() -> dict:
    """Return the running prompt, node id -> class and inputs; empty outside of one."""
    item = _running_item()
    return item[2] if item else {}


def _running_item() -> tuple | None:
    """Return the queue's entry of the running prompt: number, id, nodes, extra data ..."""
    prompt_id, server = running_prompt_id(), getattr(PromptServer, "instance", None)
    if prompt_id is None or server is None:
        return None
    running, _ = server.prompt_queue.get_current_queue_volatile()
    return next((item for item in running if item[1] == prompt_id), None)


def show_progress(text: str) -> None:
    """Show a text on the running node, if the prompt came from a page. ``main.js`` takes it away by
    the pack's name."""
    context, server = get_executing_context(), getattr(PromptServer, "instance", None)
    if context is not None and server is not None:
        _explain(text)
        server.send_progress_text(f"Halfsafe: {text}", context.node_id, server.client_id)


@contextlib.contextmanager
def errors_explained() -> Iterator[None]:
    """Send the page the messages of an error of the pack ahead of its text, which ComfyUI sends."""
    try:
        yield
    except HalfsafeError as error:
        _explain(str(error))
        raise


def _explain(text: str) -> None:
    send(MESSAGES_EVENT, {"text": text})


def refusal(error: Exception) -> str:
    """Return the message of a validation error, and send it to the page that queued the prompt."""
    page, server = queued_by.get(), getattr(PromptServer, "instance", None)
    if page and server is not None:
        message = str(error)
        server.send_sync(REFUSED_EVENT, {"message": message, "messages": messages_in([message])}, page)
    return str(error)


def _running_ids() -> dict[str, str | None]:
    """Return the ids of the running prompt and of its workflow; "" if no workflow was sent
    along."""
    item = _running_item()
    extra = item[3] if item else {}
    workflow = ((extra.get("extra_pnginfo") or {}).get("workflow") or {}).get("id")
    return {"prompt_id": running_prompt_id(), "workflow": str(workflow or "")}


def send(event: str, data: dict, messages: dict | None = None) -> None:
    """Send an event to the page that queued the running prompt, if any; ``messages``: None for
    those in the data."""
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_sync(event, {**_running_ids(), **data, "messages": messages or messages_in(data)}, server.client_id)
