"""Guards put into every prompt that is queued, where the page's setting asks for it."""

import contextlib
import copy
import json
import logging
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import folder_paths
import nodes
from aiohttp import web
from server import PromptServer

from ...precision.guard.policy import ON_NAN

SETTING = "Halfsafe.WatchEveryRun"
GUARDS = {"MODEL": ("HalfsafeNaNGuard", "model"), "VAE": ("HalfsafeGuardVAE", "vae")}
OURS = "Halfsafe"
logger = logging.getLogger("halfsafe")
_asking: ContextVar[str] = ContextVar("halfsafe_asking", default="default")
"""Who queues the prompt; ComfyUI has users where it was started with --multi-user."""


class Watched(dict):
    """A prompt's nodes as they run, by id. Read as a whole, as pictures and the history keep it, it is as asked.

    What runs reads ids and single nodes: validate_prompt and PromptExecutor.execute_async in ComfyUI's execution.py
    (``for x in prompt``, ``prompt[x]``, ``prompt.keys()``), DynamicPrompt in comfy_execution/graph.py, and the caches'
    keys through it. What is kept goes through :meth:`items`: PromptQueue.get copies the item for the queue's list and
    the history with copy.deepcopy, which fills a dict subclass's copy from its items, and every save node writes
    json.dumps, whose C encoder calls them for a subclass. NodeReplaceManager.apply_replacements finds what it replaces
    by them too, and writes it into what runs alone.
    """

    def __init__(self, asked: dict, running: dict):
        super().__init__(running)
        self.asked = copy.deepcopy(asked)

    def items(self):
        """List the nodes that were asked for."""
        return self.asked.items()


def watch_every_run() -> None:
    """Let ComfyUI show each prompt to :func:`watched` before it is queued."""
    if server := getattr(PromptServer, "instance", None):
        server.add_on_prompt_handler(watched)
        server.app.middlewares.append(note_user)


@web.middleware
async def note_user(request: web.Request, handler: Any) -> web.StreamResponse:
    """Keep whose request is answered, which ComfyUI does not hand to what looks at prompts."""
    with contextlib.suppress(KeyError):  # a user that ComfyUI does not know
        _asking.set(PromptServer.instance.user_manager.get_request_user_id(request))
    return await handler(request)


def watched(request: dict) -> dict:
    """Return a request to queue a prompt, with guards in it if the setting asks for them."""
    on_nan, prompt = _setting(), request.get("prompt")
    if on_nan not in ON_NAN or not isinstance(prompt, dict):
        return request
    running = with_guards(prompt, on_nan)
    return request if running == prompt else {**request, "prompt": Watched(prompt, running)}


def with_guards(prompt: dict, on_nan: str) -> dict:
    """Return the nodes of a prompt with a guard before each node that uses a model or VAE up."""
    running = dict(prompt)
    for node_id, node in prompt.items():
        inputs = {name: _guarded(running, prompt, node, link, on_nan) for name, link in node.get("inputs", {}).items()}
        if inputs != node.get("inputs", {}):
            running[node_id] = {**node, "inputs": inputs}
    return running


def _guarded(running: dict, prompt: dict, node: dict, value: Any, on_nan: str) -> Any:
    """Return an input's value, or a link to the guard of what it links to, which is added to ``running``."""
    kind = _kind(prompt, value)
    if kind not in GUARDS or kind in _returned(node) or node["class_type"].startswith(OURS):
        return value
    if _has_guard(prompt, value):
        return value
    cls, name = GUARDS[kind]
    guard_id = f"halfsafe_{value[0]}_{value[1]}"
    retries = {"max_retries": 8} if kind == "MODEL" else {}
    running[guard_id] = {"class_type": cls, "inputs": {name: value, "on_nan": on_nan, **retries}}
    return [guard_id, 0]


def _has_guard(prompt: dict, link: list) -> bool:
    """Tell whether a node of the pack that guards stands anywhere before a link, on the way of its model or VAE."""
    kind, source = _kind(prompt, link), prompt[link[0]]
    guards = (GUARDS[kind][0], "HalfsafeAutoPrecision")
    before = [value for value in source.get("inputs", {}).values() if _kind(prompt, value) == kind]
    return source["class_type"] in guards or any(_has_guard(prompt, value) for value in before)


def _kind(prompt: dict, value: object) -> str:
    """Return the type that a link carries; empty for what is no link to a known node."""
    if not isinstance(value, list) or len(value) != 2 or value[0] not in prompt:
        return ""
    returned = _returned(prompt[value[0]])
    return returned[value[1]] if isinstance(value[1], int) and value[1] < len(returned) else ""


def _returned(node: dict) -> tuple:
    return tuple(getattr(nodes.NODE_CLASS_MAPPINGS.get(node.get("class_type")), "RETURN_TYPES", ()))


def _setting() -> str:
    """Read the page's setting, which ComfyUI keeps with the user; off where there is none."""
    file = Path(folder_paths.get_user_directory(), _asking.get(), "comfy.settings.json")
    try:
        return json.loads(file.read_text(encoding="utf-8")).get(SETTING, "off")
    except FileNotFoundError:
        return "off"
    except ValueError as error:
        logger.warning("Halfsafe: %s cannot be read (%s), so runs are not watched.", file.name, error)
        return "off"
