"""Guards put into every prompt that the page queues, where its setting asks for it."""

from collections.abc import Callable
from typing import Any

import nodes
from aiohttp import web
from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import is_link
from server import PromptServer

from ....precision.guard.policy import OFF, ON_NAN
from ..comfyui.bodies import json_of
from ..comfyui.page import queued_by
from .notices import GUARDED, WATCHED

ASKED_BY = "halfsafe_watch"
"""The entry of a prompt's ``extra_data`` that asks for guards, for prompts that no page queues; and of each guard that
is added: the link that it guards."""
GUARDS = {"MODEL": ("HalfsafeNaNGuard", "model"), "VAE": ("HalfsafeGuardVAE", "vae")}
OURS = "Halfsafe"
_settings: dict[str | None, str] = {}
"""The id of a page -> its setting."""


def watch_every_run() -> None:
    """Let ComfyUI's server put guards into the prompts of the pages whose setting asks for them."""
    if server := getattr(PromptServer, "instance", None):
        server.routes.post("/halfsafe/watch")(_keep_setting)
        server.add_on_prompt_handler(watched)


async def _keep_setting(request: web.Request) -> web.Response:
    told = await json_of(request, "an object with the client_id of an open page, and on_nan", _is_setting)
    for page in _settings.keys() - PromptServer.instance.sockets.keys():
        del _settings[page]
    _settings[told["client_id"]] = told["on_nan"]
    return web.Response()


def _is_setting(value: Any) -> bool:
    """Tell whether a body is the setting of a page that ComfyUI's server is connected to."""
    texts = isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("client_id", "on_nan"))
    return texts and value["client_id"] in PromptServer.instance.sockets and value["on_nan"] in (OFF, *ON_NAN)


def watched(request: dict) -> dict:
    """Return a request that queues a prompt: with guards if its page's setting or its ``extra_data`` asks for them."""
    client = request.get("client_id")
    queued_by.set(client)
    on_nan = request.get("extra_data", {}).get(ASKED_BY, _settings.get(client))
    if on_nan not in ON_NAN:
        return request
    if DynamicPrompt.get_original_prompt.__module__ != __name__:
        DynamicPrompt.get_original_prompt = _without_guards(DynamicPrompt.get_original_prompt)
    return {**request, "prompt": _with_guards(request["prompt"], on_nan)}


def _without_guards(original_prompt: Callable) -> Callable:
    """Give nodes that write the prompt into a picture the nodes as asked for: ComfyUI has no other way to that."""

    def get_original_prompt(self) -> dict:
        return _as_asked(original_prompt(self))

    return get_original_prompt


def _as_asked(prompt: dict) -> dict:
    """Return the nodes of a prompt without the guards that :func:`_with_guards` added."""
    behind = {node_id: node[ASKED_BY] for node_id, node in prompt.items() if ASKED_BY in node}
    asked = {}
    for node_id, node in prompt.items():
        if node_id not in behind:
            inputs = {name: _behind(value, behind) for name, value in node["inputs"].items()}
            asked[node_id] = {**node, "inputs": inputs}
    return asked


def _behind(value: Any, behind: dict) -> Any:
    """Return an input's value, or for a link to a guard the link that the guard has."""
    links_to = [link for guard_id, link in behind.items() if value == [guard_id, 0]]
    return links_to[0] if links_to else value


def _guard_id(link: list, prompt: dict) -> str:
    """Return the id of the guard behind a node's output, which no node of the prompt has."""
    slot = str(link[1])
    while (guard_id := f"{WATCHED}{link[0]}_{slot}") in prompt:
        slot = f"0{slot}"
    return guard_id


def _with_guards(prompt: dict, on_nan: str) -> dict:
    """Return the nodes of a prompt with a guard before each node that uses a model or VAE up."""
    running, guarded = dict(prompt), _guarded(prompt)
    for node_id, node in prompt.items():
        given = node.get("inputs", {})
        inputs = {name: _through_guard(running, prompt, node, link, on_nan, guarded) for name, link in given.items()}
        if inputs != given:
            running[node_id] = {**node, "inputs": inputs}
    return running


def _through_guard(running: dict, prompt: dict, node: dict, value: Any, on_nan: str, guarded: set) -> Any:
    """Return an input's value; for a link that needs a guard, a link to the guard, which is added to ``running``."""
    kind = _kind(prompt, value)
    if kind not in GUARDS or kind in _returned(node) or node["class_type"].startswith(OURS):
        return value
    if (value[0], kind) in guarded:
        return value
    cls, name = GUARDS[kind]
    guard_id = _guard_id(value, prompt)
    retries = {"max_retries": 8} if kind == "MODEL" else {}
    running[guard_id] = {"class_type": cls, "inputs": {name: value, "on_nan": on_nan, **retries}, ASKED_BY: value}
    return [guard_id, 0]


def _guarded(prompt: dict) -> set[tuple[str, str]]:
    """Return (node, type) of each guard in a prompt, and of each node that an output of this type leads to from
    there."""
    after: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for node_id, node in prompt.items():
        for value in node.get("inputs", {}).values():
            if kind := _kind(prompt, value):
                after.setdefault((value[0], kind), []).append((node_id, kind))
    found: set[tuple[str, str]] = set()
    nodes_of = {node_id: GUARDED.get(node["class_type"], ()) for node_id, node in prompt.items()}
    ways = [(node_id, kind) for node_id, inputs in nodes_of.items() for kind in GUARDS if kind.lower() in inputs]
    while ways:
        way = ways.pop()
        if way not in found:
            found.add(way)
            ways += after.get(way, [])
    return found


def _kind(prompt: dict, value: Any) -> str:
    """Return the type that a link carries; empty for what is no link to a known node."""
    if not is_link(value) or value[0] not in prompt:
        return ""
    return dict(enumerate(_returned(prompt[value[0]]))).get(value[1], "")


def _returned(node: dict) -> tuple:
    return tuple(getattr(nodes.NODE_CLASS_MAPPINGS.get(node.get("class_type")), "RETURN_TYPES", ()))
