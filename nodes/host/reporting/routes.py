"""What the page asks ComfyUI's server for: this device in a sentence, what ComfyUI does here, how loaders halve memory,
and which lines of rules cannot be read."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web
from server import PromptServer

from ....precision.commands import doctor
from ....precision.devices.probes import flags_left_alone
from ....precision.plan.rules import read
from ..comfyui import self_test
from ..load.alone import computing
from ..load.devices import current_device
from ..load.halving import halving
from .bodies import json_of, text_of
from .here import facts_here

MOST_OF_RULES = 100_000
"""Bytes of rules that are read while they are written: thousands of lines."""


def serve_page() -> None:
    """Let ComfyUI's server answer the page."""
    if server := getattr(PromptServer, "instance", None):
        server.routes.get("/halfsafe/device")(_device)
        server.routes.get("/halfsafe/here")(_here)
        server.routes.post("/halfsafe/rules")(_rules)
        server.routes.post("/halfsafe/halving")(_of_files(halving))
        server.routes.post("/halfsafe/computing")(_of_files(computing))


async def _device(_: web.Request) -> web.Response:
    with flags_left_alone():
        found = await asyncio.to_thread(lambda: doctor.diagnose(current_device()))
    return web.json_response({**asdict(doctor.diagnosis_result(found)), "refused": self_test.found})


def _of_files(answer: Callable[[list], Any]) -> Callable:
    """Return the handler of a route that answers for the model files that it is sent."""

    async def handle(request: web.Request) -> web.Response:
        files = await json_of(request, "a list of pairs of texts, a folder and a file's name each", _are_files)
        with flags_left_alone():
            return web.json_response(await asyncio.to_thread(answer, files))

    return handle


def _are_files(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
    return pairs and all(isinstance(text, str) for pair in value for text in pair)


async def _here(_: web.Request) -> web.Response:
    return web.json_response([asdict(fact) for fact in facts_here()])


async def _rules(request: web.Request) -> web.Response:
    rules, wrong = await asyncio.to_thread(read, await text_of(request, MOST_OF_RULES))
    mistakes = [{"line": error.line, "mistake": error.mistake, "advice": error.advice} for error in wrong]
    return web.json_response({"count": len(rules), "mistakes": mistakes})
