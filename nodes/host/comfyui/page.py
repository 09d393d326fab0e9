"""Send the open page what guards and long work say while a prompt runs, and keep what guards say for its report."""

import contextlib
import logging
import weakref
from collections.abc import Iterator
from contextvars import ContextVar

from comfy_execution.graph_utils import is_link
from comfy_execution.progress import ProgressRegistry, get_progress_state
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ....precision.base.errors import HalfsafeError
from ....precision.base.message import Message, messages_in
from ....precision.base.modes import label_of
from ....precision.guard.log import Notify
from ....precision.guard.policy import EVENT, OFF
from ....precision.guard.verdicts import CURED, EVERY_RUN, NAN_GUARD, ONE_NODE, Place
from ....precision.report.schema import EncoderReport, GuardEvent, plain

REPORT_EVENT = "halfsafe.report"
REFUSED_EVENT = "halfsafe.refused"
MESSAGES_EVENT = "halfsafe.messages"
"""Sent ahead of a text that ComfyUI sends: its messages."""
BADGE_EVENT = "halfsafe.badge"
ENCODER_KINDS = {"vae": "VAE", "clip": "text encoder"}
GUARDED = {
    "HalfsafeNaNGuard": ("model",), "HalfsafeGuardVAE": ("vae",), "HalfsafeGuardCLIP": ("clip",),
    "HalfsafeAutoPrecision": ("model", "vae", "clip"),
}  # fmt: skip
"""A node that guards -> its inputs that it guards, where they are connected."""
PLACES = {"HalfsafeAutoPrecision": ONE_NODE}
WATCHED = "halfsafe_"
"""What the ids of the guards begin with that *Guard every run* adds."""
queued_by: ContextVar[str | None] = ContextVar("halfsafe_queued_by", default=None)
"""The id of the page that queues the prompt which the server is checking; None where no page does."""
logger = logging.getLogger("halfsafe")
# ComfyUI makes a registry for each prompt and drops it with the next one: what is kept with it is the prompt's own.
_sent: weakref.WeakKeyDictionary[ProgressRegistry, list[dict]] = weakref.WeakKeyDictionary()


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


def _shown_id(node_id: str | None, of: str) -> str | None:
    """Return the id by which the running prompt has a guard.

    ComfyUI's cache gives a guard that was made under one id to a node with another id and the same inputs: then it is
    the guard nearest before the running node. ``of``: as for :func:`notifier`.
    """
    prompt, ways = running_prompt(), [running_node_id()]
    if node_id in prompt:
        return node_id
    for way in ways:
        node = prompt.get(way, {"class_type": "", "inputs": {}})
        if (of or "model") in GUARDED.get(node["class_type"], ()):
            return way
        links = (value[0] for value in node["inputs"].values() if is_link(value))
        ways += [link for link in links if link in prompt and link not in ways]
    return node_id


def place_of(node_id: str | None, of: str = "") -> Place:
    """Return where a user finds a guard, with the arguments of :func:`_shown_id`."""
    page_id = _shown_id(node_id, of) or ""
    if page_id.startswith(WATCHED):
        return EVERY_RUN
    return PLACES.get(running_prompt().get(page_id, {}).get("class_type"), NAN_GUARD)


def show_progress(text: str) -> None:
    """Show a text on the running node, if the prompt came from a page. ``main.js`` takes it away by the pack's name."""
    context, server = get_executing_context(), getattr(PromptServer, "instance", None)
    if context is not None and server is not None:
        _explain(text)
        server.send_progress_text(f"Halfsafe: {text}", context.node_id, server.client_id)


def notifier(node_id: str | None, prompt: str | None = None, of: str = "", planner: str | None = None) -> Notify:
    """Return a function that logs a guard's events, and sends events, verdicts and numbers of checked calls to the page
    that queued the prompt, if any.

    ``prompt``: None for the running prompt. ``of``: the guarded object, ``vae`` or ``clip``; empty for a model.
    ``planner``: id of the node whose plan the model runs under.
    """

    def notify(
        kind: str, verdict: str, message: str, advice: str, event: GuardEvent | None = None, calls: int = 0
    ) -> None:
        if event:
            if event.recovered and event.to_mode:
                what = Message("{0}: repeated in {1}, no NaN", event.layer or "the model", label_of(event.to_mode))
                show_progress(what)
            logger.warning("Halfsafe guard: %s %s", message, advice)
        data = {
            "node_id": _shown_id(node_id, of),
            "prompt_id": prompt or running_prompt_id(),
            "kind": kind,
            "verdict": verdict,
            "message": message,
            "brief": event.brief if event else message,
            "advice": advice,
            "of": of,
            "fell_back": planner if event and event.fell_back else None,
            "planner": planner,
            "calls": calls,
            "workflow": _workflow_id(),
            "event": plain(event) if event else None,
        }
        running = get_progress_state()
        if data["prompt_id"] == running.prompt_id:
            _sent.setdefault(running, []).append(data)
        _send(EVENT, data)

    return notify


def send_report(node_id: str | None, token: str, report: str, messages: dict) -> None:
    """Send the report of a run and its messages to the page that queued the prompt; ``token`` names the node's
    result."""
    data = {"node_id": node_id, "prompt_id": running_prompt_id(), "token": token, "report": report}
    _send(REPORT_EVENT, data, messages)


@contextlib.contextmanager
def errors_explained() -> Iterator[None]:
    """Send the page the messages of an error of the pack ahead of its text, which ComfyUI sends."""
    try:
        yield
    except HalfsafeError as error:
        _explain(str(error))
        raise


def _explain(text: str) -> None:
    _send(MESSAGES_EVENT, {"text": text})


def add_to_badge(node_id: str | None, words: list[str]) -> None:
    """Show words on the badge of a node from now on."""
    if words:
        _send(BADGE_EVENT, {"node_id": node_id, "words": words})


def refusal(error: Exception) -> str:
    """Return the message of a validation error, and send it to the page that queued the prompt."""
    page, server = queued_by.get(), getattr(PromptServer, "instance", None)
    if page and server is not None:
        message = str(error)
        server.send_sync(REFUSED_EVENT, {"message": message, "messages": messages_in([message])}, page)
    return str(error)


def _workflow_id() -> str:
    """Return the id of the workflow that the running prompt was queued from; empty where none was sent along."""
    item = _running_item()
    extra = item[3] if item else {}
    return str(((extra.get("extra_pnginfo") or {}).get("workflow") or {}).get("id") or "")


def _send(event: str, data: dict, messages: dict | None = None) -> None:
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_sync(event, {**data, "messages": messages or messages_in(data)}, server.client_id)


def encoder_reports() -> list[EncoderReport]:
    """Report what the Guard VAE and Guard CLIP nodes of the running prompt have sent so far."""
    sent = _sent.get(get_progress_state(), [])
    return [
        _encoder_report(node_id, ENCODER_KINDS[of], [m for m in sent if (m["node_id"], m["of"]) == (node_id, of)])
        for node_id, node in running_prompt().items()
        for of in GUARDED.get(node["class_type"], ())
        if of in ENCODER_KINDS and of in node["inputs"] and node["inputs"].get("guard") != OFF
    ]


def _encoder_report(node_id: str, kind: str, messages: list[dict]) -> EncoderReport:
    """Make the report of a guard: the first verdict other than a recovery stands, else the last verdict."""
    texts = [message["message"] for message in messages if message["message"]]
    report = EncoderReport(node_id, kind, messages=texts, calls=sum(message["calls"] for message in messages))
    for message in messages:
        if report.verdict in CURED:
            report.verdict, report.advice = message["verdict"], message["advice"]
    return report
