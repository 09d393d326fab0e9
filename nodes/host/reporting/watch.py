"""Guards put into every prompt that the page queues, where its setting asks for it."""

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import nodes
from comfy_execution.graph import DynamicPrompt
from execution import PromptExecutor

from ....precision.guard.policy import ON_NAN

ASKED_BY = "halfsafe_watch"
"""The entry of a prompt's ``extra_data`` with which the page sends its setting."""
GUARDS = {"MODEL": ("HalfsafeNaNGuard", "model"), "VAE": ("HalfsafeGuardVAE", "vae")}
OURS = "Halfsafe"
_asked: ContextVar[dict | None] = ContextVar("halfsafe_asked", default=None)
"""The nodes of the prompt that runs, as they were asked for; None where none were added."""


def watch_every_run() -> None:
    """Let ComfyUI run guards with a prompt whose queue, history and pictures keep the nodes as they were asked for."""
    PromptExecutor.execute_async = _guarding(PromptExecutor.execute_async)
    DynamicPrompt.get_original_prompt = _as_asked(DynamicPrompt.get_original_prompt)


def _guarding(execute: Callable) -> Callable:
    async def execute_async(self, prompt: dict, prompt_id: str, extra_data: dict, *args, **kwargs) -> None:
        running = watched(prompt, extra_data)
        # ComfyUI writes fingerprints of nodes into the prompt that runs (IsChangedCache in execution.py).
        token = _asked.set(copy.deepcopy(prompt) if running is not prompt else None)
        try:
            await execute(self, running, prompt_id, extra_data, *args, **kwargs)
        finally:
            _asked.reset(token)

    return execute_async


def _as_asked(original_prompt: Callable) -> Callable:
    """Give nodes that write the prompt into a picture the nodes that were asked for."""

    def get_original_prompt(self) -> dict:
        asked = _asked.get()
        return original_prompt(self) if asked is None else asked

    return get_original_prompt


def watched(prompt: dict, extra_data: dict) -> dict:
    """Return the nodes to run for a prompt: with guards if its ``extra_data`` asks for them, else itself."""
    on_nan = extra_data.get(ASKED_BY)
    running = with_guards(prompt, on_nan) if on_nan in ON_NAN else prompt
    return prompt if running == prompt else running


def with_guards(prompt: dict, on_nan: str) -> dict:
    """Return the nodes of a prompt with a guard before each node that uses a model or VAE up."""
    running, guarded = dict(prompt), _guarded(prompt)
    for node_id, node in prompt.items():
        given = node.get("inputs", {})
        inputs = {name: _through_guard(running, prompt, node, link, on_nan, guarded) for name, link in given.items()}
        if inputs != given:
            running[node_id] = {**node, "inputs": inputs}
    return running


def _through_guard(running: dict, prompt: dict, node: dict, value: Any, on_nan: str, guarded: set) -> Any:
    """Return an input's value, or a link to the guard of what it links to, which is added to ``running``."""
    kind = _kind(prompt, value)
    if kind not in GUARDS or kind in _returned(node) or node["class_type"].startswith(OURS):
        return value
    if (value[0], kind) in guarded:
        return value
    cls, name = GUARDS[kind]
    guard_id = f"halfsafe_{value[0]}_{value[1]}"
    retries = {"max_retries": 8} if kind == "MODEL" else {}
    running[guard_id] = {"class_type": cls, "inputs": {name: value, "on_nan": on_nan, **retries}}
    return [guard_id, 0]


def _guarded(prompt: dict) -> set[tuple[str, str]]:
    """Return (node, type) of the guards in a prompt and of what comes after them on the way of that type."""
    after: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for node_id, node in prompt.items():
        for value in node.get("inputs", {}).values():
            if kind := _kind(prompt, value):
                after.setdefault((value[0], kind), []).append((node_id, kind))
    guards = {cls: [kind] for kind, (cls, _) in GUARDS.items()} | {"HalfsafeAutoPrecision": [*GUARDS]}
    found: set[tuple[str, str]] = set()
    ways = [(node_id, kind) for node_id, node in prompt.items() for kind in guards.get(node["class_type"], ())]
    while ways:
        way = ways.pop()
        if way not in found:
            found.add(way)
            ways += after.get(way, [])
    return found


def _kind(prompt: dict, value: object) -> str:
    """Return the type that a link carries; empty for what is no link to a known node."""
    if not isinstance(value, list) or len(value) != 2 or value[0] not in prompt:
        return ""
    returned = _returned(prompt[value[0]])
    return returned[value[1]] if isinstance(value[1], int) and value[1] < len(returned) else ""


def _returned(node: dict) -> tuple:
    return tuple(getattr(nodes.NODE_CLASS_MAPPINGS.get(node.get("class_type")), "RETURN_TYPES", ()))
