"""What the sidebar greets with: this device in a sentence, asked for by the page."""

import asyncio
from dataclasses import asdict

from aiohttp import web
from server import PromptServer

from ...precision.commands import doctor
from .load.devices import current_device

ROUTE = "/halfsafe/device"


def serve_device() -> None:
    """Let ComfyUI's server answer what this device can do."""
    if server := getattr(PromptServer, "instance", None):
        server.routes.get(ROUTE)(_answer)


async def _answer(_: web.Request) -> web.Response:
    found = await asyncio.to_thread(lambda: doctor.diagnose(current_device()))
    return web.json_response(asdict(doctor.result_of(found)))
