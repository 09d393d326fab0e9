"""Send the open page what guards say while a prompt runs, and keep it for the prompt's report."""

import functools
import logging

from comfy_execution.graph_utils import is_link
from comfy_execution.progress import get_progress_state

from ....precision.base.message import Message
from ....precision.base.modes import label_of
from ....precision.check import drift
from ....precision.guard.log import GuardLog, Notify
from ....precision.guard.policy import EVENT, OFF, OnNan
from ....precision.guard.verdicts import EVERY_RUN, LINES, NAN_GUARD, ONE_NODE, VERDICTS, Place
from ....precision.report.schema import EncoderReport, GuardEvent, Verdict, plain
from ..comfyui.page import running_node_id, running_prompt, running_prompt_id, send, show_progress

_ENCODER_KINDS = {"vae": "VAE", "clip": "text encoder"}
GUARDED = {
    "HalfsafeNaNGuard": ("model",), "HalfsafeGuardVAE": ("vae",), "HalfsafeGuardCLIP": ("clip",),
    "HalfsafeAutoPrecision": ("model", "vae", "clip"),
}  # fmt: skip
"""A node that guards -> its inputs that it guards, where they are connected."""
_PLACES = {"HalfsafeAutoPrecision": ONE_NODE}
WATCHED = "halfsafe_"
"""What the ids of the guards begin with that *Guard every run* adds."""
logger = logging.getLogger("halfsafe")
SENT = "halfsafe_sent"
"""The attribute of ComfyUI's progress registry that holds what was sent in a prompt: ComfyUI makes a
registry for each prompt and drops it with the next one."""


def guard_log(
    on_nan: OnNan, node_id: str | None, prompt: str | None = None, of: str = "", planner: str | None = None
) -> GuardLog:
    """Make the log of the guard of a node: what it notes is told in ComfyUI's log and on the page.

    ``prompt``: None for the running prompt. ``of``: the guarded object, ``vae`` or ``clip``; empty for a model.
    ``planner``: id of the node whose plan the model runs under.
    """
    place = functools.partial(_place_of, node_id, of)
    return GuardLog(on_nan, _notifier(node_id, prompt, of, planner), prompt=prompt, place=place)


def _shown_id(node_id: str | None, of: str) -> str | None:
    """Return the id by which the running prompt has a guard.

    ComfyUI's cache gives a guard that was made under one id to a node with another id and the same inputs: then it is
    the guard nearest before the running node. ``of``: as for :func:`guard_log`.
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


def _place_of(node_id: str | None, of: str) -> Place:
    """Return where a user finds a guard, with the arguments of :func:`_shown_id`."""
    page_id = _shown_id(node_id, of) or ""
    if page_id.startswith(WATCHED):
        return EVERY_RUN
    return _PLACES.get(running_prompt().get(page_id, {}).get("class_type"), NAN_GUARD)


def _notifier(node_id: str | None, prompt: str | None, of: str, planner: str | None) -> Notify:
    """Return a function that logs a guard's events, and sends events, verdicts and numbers of checked calls to the page
    that queued the prompt, if any; with the arguments of :func:`guard_log`."""

    def notify(
        kind: str, verdict: Verdict, message: str, advice: str, event: GuardEvent | None = None, calls: int = 0
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
            "about": VERDICTS[verdict].shown(),
            "message": message,
            "brief": event.brief if event else message,
            "advice": advice,
            "line": _line_of(advice),
            "of": of,
            "fell_back": planner if event and event.fell_back else None,
            "planner": planner,
            "calls": calls,
            "event": plain(event) if event else None,
        }
        running = get_progress_state()
        if data["prompt_id"] == running.prompt_id:
            vars(running).setdefault(SENT, []).append(data)
        send(EVENT, data)

    return notify


def _line_of(advice: str) -> str:
    """Return what a card shows of advice: its first sentence, or the line in its place if it is long."""
    first, *_ = getattr(advice, "sentences", ()) or (advice,)
    return {**LINES, **drift.LINES}.get(getattr(advice, "template", advice), first)


def encoder_reports() -> list[EncoderReport]:
    """Report what the Guard VAE and Guard CLIP nodes of the running prompt have sent so far."""
    sent = vars(get_progress_state()).get(SENT, [])
    return [
        _encoder_report(node_id, _ENCODER_KINDS[of], [m for m in sent if (m["node_id"], m["of"]) == (node_id, of)])
        for node_id, node in running_prompt().items()
        for of in GUARDED.get(node["class_type"], ())
        if of in _ENCODER_KINDS and of in node["inputs"] and node["inputs"].get("guard") != OFF
    ]


def _encoder_report(node_id: str, kind: str, messages: list[dict]) -> EncoderReport:
    """Make the report of a guard: the first verdict other than a recovery stands, else the last verdict."""
    texts = [message["message"] for message in messages if message["message"]]
    report = EncoderReport(node_id, kind, messages=texts, calls=sum(message["calls"] for message in messages))
    for message in messages:
        if VERDICTS[report.verdict].cured:
            report.verdict, report.advice = message["verdict"], message["advice"]
    report.about = VERDICTS[report.verdict].shown()
    return report
