"""What the open page is told while a prompt runs."""

from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...precision.guard.policy import EVENT
from ...precision.report.schema import GuardEvent, plain


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


def tell_page(
    node_id: str | None, prompt: str | None, kind: str, verdict: str, message: str, advice: str, event: GuardEvent | None = None
) -> None:
    """Send what a guard has to say, an event or a run's verdict, to the page that queued the prompt, if there is one."""
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        data = {"node_id": node_id, "prompt_id": prompt, "kind": kind, "verdict": verdict, "message": message, "advice": advice}
        server.send_sync(EVENT, {**data, "event": plain(event) if event else None}, server.client_id)
