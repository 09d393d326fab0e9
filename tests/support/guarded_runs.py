"""Prompts that a model overflows in, run by a real server as an open page runs them: what the page is told, and the picture."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json

import aiohttp
from PIL import Image
from setup.comfyui_server import Server, error_text
from setup.workflow import node

MODEL = "guarded_overflowing.safetensors"


def graph(on_nan: str, model: str = MODEL, seed: int = 1) -> dict:
    """A text-to-image prompt in plain fp16 with the guard as node 9 and the report as node 10."""
    sampled = {
        "positive": ["4", 0],
        "negative": ["4", 0],
        "latent_image": ["5", 0],
        "seed": seed,
        "steps": 2,
        "cfg": 1.0,
    }
    return {
        "1": node("HalfsafeLoadDiffusionModel", model_name=model, storage="fp16", compute="fp16"),
        "9": node("HalfsafeNaNGuard", model=["1", 0], on_nan=on_nan, max_retries=8),
        "2": node("CLIPLoader", clip_name="clip_l.safetensors", type="sd3"),
        "3": node("VAELoader", vae_name="wan_vae.safetensors"),
        "4": node("CLIPTextEncode", clip=["2", 0], text="a lighthouse"),
        "5": node("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1),
        "6": node("KSampler", model=["9", 0], sampler_name="euler", scheduler="simple", denoise=1.0, **sampled),
        "7": node("VAEDecode", samples=["6", 0], vae=["3", 0]),
        "8": node("SaveImage", images=["7", 0], filename_prefix="guarded"),
        "10": node("HalfsafeReport", model=["9", 0], after=["6", 0]),
    }


def told(
    server: Server, prompt: dict, extra: dict | None = None, settings: dict[str, str] | None = None
) -> tuple[list[dict], dict]:
    """Run a prompt as an open page does, with ``extra_data``: the guard's events it was sent, and the history's entry.

    ``settings``: page -> what that page, open as well, sends as its setting before.
    """
    return asyncio.run(
        _told(server, {"prompt": prompt, "client_id": "page", "extra_data": extra or {}}, settings or {})
    )


async def _told(server: Server, request: dict, settings: dict[str, str]) -> tuple[list[dict], dict]:
    events = []
    async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as pages:
        sockets = {
            page: await pages.enter_async_context(session.ws_connect(f"{server.url}/ws?clientId={page}"))
            for page in {"page", *settings}
        }
        for page, on_nan in settings.items():
            async with session.post(
                f"{server.url}/halfsafe/watch", json={"client_id": page, "on_nan": on_nan}
            ) as answer:
                assert answer.status == 200, await answer.text()
        async with session.post(f"{server.url}/prompt", json=request) as answer:
            assert answer.status == 200, await answer.text()
            prompt_id = (await answer.json())["prompt_id"]
        async for message in _messages(sockets["page"]):
            if message["type"] == "halfsafe.guard" and message["data"]["kind"] == "calls":
                continue  # of a guard that found nothing
            if message["type"] == "halfsafe.guard":
                events.append(message["data"])
            elif (
                message["type"] in ("execution_success", "execution_error")
                and message["data"]["prompt_id"] == prompt_id
            ):
                break
    return events, await asyncio.to_thread(server.wait, prompt_id)


async def _messages(socket: aiohttp.ClientWebSocketResponse):
    while True:
        message = await socket.receive(timeout=120)
        if message.type == aiohttp.WSMsgType.TEXT:
            yield json.loads(message.data)


def brightness(png: bytes) -> bytes:
    """The values of a picture's pixels: all zero for a black one."""
    return Image.open(io.BytesIO(png)).tobytes()


def picture(server: Server, entry: dict) -> bytes:
    assert entry["status"]["status_str"] == "success", error_text(entry)
    return server.view(entry["outputs"]["8"]["images"][0])
