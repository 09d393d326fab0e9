"""What the open page is told while a prompt runs."""

from comfy_execution.utils import get_executing_context
from server import PromptServer


def running_prompt_id() -> str | None:
    """The id of the prompt that is running in this thread; None outside of one."""
    context = get_executing_context()
    return context.prompt_id if context else None


def running_prompt() -> dict:
    """The prompt that is running, node id -> class and inputs; empty outside of one."""
    prompt_id, server = running_prompt_id(), getattr(PromptServer, "instance", None)
    if prompt_id is None or server is None:
        return {}
    running, _ = server.prompt_queue.get_current_queue_volatile()
    return next((item[2] for item in running if item[1] == prompt_id), {})


def tell_page(event: str, data: dict) -> None:
    """Send an event to the page that queued the prompt, if there is one."""
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_sync(event, data, server.client_id)
