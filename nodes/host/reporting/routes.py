"""What the page asks ComfyUI's server for: this device in a sentence, what ComfyUI does here, how loaders halve memory,
and which lines of rules cannot be read."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web
from server import PromptServer

from ....precision.base.message import messages_in
from ....precision.base.options import STORAGE_OPTIONS
from ....precision.devices.measurements import gains_in
from ....precision.devices.probes import flags_left_alone
from ....precision.formats.registry import FORMAT_OF_STORAGE
from ....precision.plan.auto import int8_as_run
from ....precision.plan.rules import read
from ....precision.report import doctor
from ....precision.report.view import STORAGE_COLOURS
from ..comfyui.bodies import json_of, text_of
from ..comfyui.gate import UNEQUAL
from ..comfyui.model_facts import held_storages
from ..load.alone import computing
from ..load.devices import current_device
from ..load.halving import halving
from ..load.kept_speeds import kept_speeds
from .here import facts_here

MOST_OF_RULES = 100_000
"""Bytes of rules that are read while they are written: thousands of lines."""
FILES = "a list of pairs of texts, a folder and a file's name each"
LOADERS = (
    "a list of loaders, each with the text folder, the list names of texts, size: numbers or null, and perhaps "
    "smaller: a list of such sizes, and storages: a list of texts"
)
SIZES = {"width", "height", "length", "batch_size"}


def serve_page() -> None:
    """Let ComfyUI's server answer the page."""
    if server := getattr(PromptServer, "instance", None):
        server.routes.get("/halfsafe/device")(_device)
        server.routes.get("/halfsafe/here")(_here)
        server.routes.post("/halfsafe/rules")(_rules)
        server.routes.post("/halfsafe/halving")(_answering(halving, LOADERS, _are_loaders))
        server.routes.post("/halfsafe/computing")(_answering(computing, FILES, _are_files))


async def _device(_: web.Request) -> web.Response:
    with flags_left_alone():
        return _json(await asyncio.to_thread(_about_device))


def _about_device() -> dict:
    """Describe the device in a sentence, and tell whether int8 is faster: as measured on this machine, else as others
    measured it."""
    device = current_device()
    found, here = doctor.diagnose(device), [one.speeds for one in kept_speeds(device)]
    measured = gains_in(row for rows in here for row in rows)
    gains = measured.get(int8_as_run(device), not found["int8"]["slow"])
    held = held_storages()
    later = {name: format.since for name, format in FORMAT_OF_STORAGE.items() if name not in held}
    more = {"refused": [*UNEQUAL.values()], "later": later, "int8_gains": gains}
    more |= {"storages": {name: {"colour": colour} for name, colour in STORAGE_COLOURS.items()}}
    return {**asdict(doctor.diagnosis_result(found, here)), **more}


def _json(answer: dict) -> web.Response:
    """Answer with JSON data and its messages."""
    return web.json_response({**answer, "messages": messages_in(answer)})


def _answering(answer: Callable[[list], Any], expected: str, fits: Callable[[Any], bool]) -> Callable:
    """Return a route handler that gives the request's JSON to ``answer``. Data that do not satisfy ``fits`` are
    refused: ``expected`` says what was expected."""

    async def handle(request: web.Request) -> web.Response:
        asked = await json_of(request, expected, fits)
        with flags_left_alone():
            return _json(await asyncio.to_thread(answer, asked))

    return handle


def _are_files(value: Any) -> bool:
    return isinstance(value, list) and all(_are_texts(pair) and len(pair) == 2 for pair in value)


def _are_loaders(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(loader, dict) and _is_loader(**loader) for loader in value)


def _is_loader(folder: Any = None, names: Any = None, size: Any = None, smaller: Any = (), storages: Any = (), **_):
    sized = (size is None or _is_size(size)) and isinstance(smaller, (list, tuple)) and all(map(_is_size, smaller))
    stored = not storages or (_are_texts(storages) and {*STORAGE_OPTIONS}.issuperset(storages))
    return isinstance(folder, str) and _are_texts(names) and sized and stored


def _is_size(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == SIZES and {int, float}.issuperset(map(type, value.values()))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


async def _here(_: web.Request) -> web.Response:
    return _json({"facts": facts_here()})


async def _rules(request: web.Request) -> web.Response:
    rules, wrong = await asyncio.to_thread(read, await text_of(request, MOST_OF_RULES))
    mistakes = [{"line": error.line, "mistake": error.mistake, "advice": error.advice} for error in wrong]
    return _json({"count": len(rules), "mistakes": mistakes})
