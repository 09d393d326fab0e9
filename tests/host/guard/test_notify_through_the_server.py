"""The guard in a running ComfyUI: prompts that fail or are rescued, and what the page is told meanwhile."""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import Iterator

import aiohttp
import pytest
from safetensors.torch import load_file, save_file
from setup.comfyui_server import Server, error_text
from setup.workflow import node
from support import tiny_models

MODEL = "guarded_overflowing.safetensors"


@pytest.fixture(scope="module")
def running(server: Server, small_models) -> Server:
    """A server that has a Wan model which overflows in fp16."""
    tiny_models.wan_overflowing(small_models / "diffusion_models" / MODEL)
    return server


def graph(on_nan: str, model: str = MODEL, seed: int = 1) -> dict:
    """A text-to-image prompt in plain fp16 with the guard as node 9 and the report as node 10."""
    sampled = {"positive": ["4", 0], "negative": ["4", 0], "latent_image": ["5", 0], "seed": seed, "steps": 2, "cfg": 1.0}
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


def told(server: Server, prompt: dict) -> tuple[list[dict], dict]:
    """Run a prompt as an open page does: the guard's events it was sent, and the history's entry."""
    return asyncio.run(_told(server, prompt))


async def _told(server: Server, prompt: dict) -> tuple[list[dict], dict]:
    events = []
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{server.url}/ws?clientId=page") as socket:
        async with session.post(f"{server.url}/prompt", json={"prompt": prompt, "client_id": "page"}) as answer:
            assert answer.status == 200, await answer.text()
            prompt_id = (await answer.json())["prompt_id"]
        async for message in _messages(socket):
            if message["type"] == "halfsafe.guard":
                events.append(message["data"])
            elif message["type"] in ("execution_success", "execution_error") and message["data"]["prompt_id"] == prompt_id:
                break
    return events, await asyncio.to_thread(server.wait, prompt_id)


async def _messages(socket: aiohttp.ClientWebSocketResponse):
    while True:
        message = await socket.receive(timeout=120)
        if message.type == aiohttp.WSMsgType.TEXT:
            yield json.loads(message.data)


def brightness(png: bytes) -> Iterator[int]:
    """The bytes of a PNG's rows as stored, filters and all: all zero for a black picture."""
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    return iter(zlib.decompress(data))


def picture(server: Server, entry: dict) -> bytes:
    assert entry["status"]["status_str"] == "success", error_text(entry)
    return server.view(entry["outputs"]["8"]["images"][0])


def test_without_the_guard_the_picture_is_black(running: Server) -> None:
    prompt = graph("retry_higher")
    prompt["6"]["inputs"]["model"] = prompt["10"]["inputs"]["model"] = ["1", 0]
    del prompt["9"]
    events, entry = told(running, prompt)
    assert not events
    assert max(brightness(picture(running, entry))) <= 4, "nothing but PNG's row filters"


def test_retry_higher_gives_the_picture_and_tells_the_page(running: Server) -> None:
    events, entry = told(running, graph("retry_higher"))
    assert max(brightness(picture(running, entry))) > 4
    assert [event["kind"] for event in events] == ["event", "verdict"]
    first, last = events
    assert first["node_id"] == last["node_id"] == "9"
    assert first["prompt_id"] == last["prompt_id"]
    assert first["verdict"] == last["verdict"] == "recovered"
    assert first["event"]["layer"] == "blocks.0.ffn.2" and first["event"]["to"] == "fp16_wide"
    assert "blocks.0.ffn.2" in first["message"] and last["event"] is None
    (report,) = entry["outputs"]["10"]["halfsafe_report"]
    assert json.loads(report)["guard"]["verdict"] == "recovered"


def test_the_next_prompt_starts_wide_and_says_nothing(running: Server) -> None:
    told(running, graph("retry_higher"))
    events, entry = told(running, graph("retry_higher", seed=2))
    assert not events
    assert max(brightness(picture(running, entry))) > 4


def test_stop_ends_the_prompt_with_the_layer_and_the_next_prompt_runs(running: Server) -> None:
    events, entry = told(running, graph("stop", seed=3))
    assert entry["status"]["status_str"] == "error"
    text = error_text(entry)
    assert text.startswith("KSampler: Step 0")
    for part in ("blocks.0.ffn.2", "fp16", "Verdict: stopped", "retry_higher"):
        assert part in text
    assert [(event["kind"], event["verdict"]) for event in events] == [("event", "stopped"), ("verdict", "stopped")]
    assert max(brightness(picture(running, told(running, graph("retry_higher", seed=4))[1]))) > 4


def test_report_lets_the_prompt_go_on_and_tells(running: Server) -> None:
    events, entry = told(running, graph("report", seed=5))
    assert max(brightness(picture(running, entry))) <= 4
    assert events[0]["verdict"] == "stopped" and not events[0]["event"]["recovered"]


def test_a_clean_model_is_not_mentioned(running: Server) -> None:
    events, entry = told(running, graph("stop", model="wan.safetensors"))
    assert not events
    assert max(brightness(picture(running, entry))) > 4


def test_the_report_tells_what_the_guard_of_the_vae_saw_in_its_prompt(running: Server, small_models) -> None:
    path = tiny_models.wan_vae(small_models / "vae" / "overflowing_vae.safetensors")
    tensors = load_file(str(path))
    tensors["decoder.middle.0.residual.6.weight"] *= 2e5
    save_file(tensors, str(path))
    prompt = graph("retry_higher", seed=7)
    prompt["3"] = node("HalfsafeLoadVAE", vae_name=path.name, dtype="fp16")
    prompt["11"] = node("HalfsafeGuardVAE", vae=["3", 0], on_nan="retry_higher")
    prompt["7"]["inputs"]["vae"] = ["11", 0]
    prompt["10"]["inputs"]["after"] = ["7", 0]
    for seed in (7, 8):
        prompt["6"]["inputs"]["seed"] = seed
        _, entry = told(running, prompt)
        (report,) = entry["outputs"]["10"]["halfsafe_report"]
        (encoder,) = json.loads(report)["encoders"]
        assert (encoder["node"], encoder["kind"], encoder["verdict"]) == ("11", "VAE", "recovered")
        assert len(encoder["messages"]) == 1 and "VAE decode" in encoder["messages"][0], "of this prompt alone"
    prompt["3"]["inputs"]["dtype"] = "fp32"
    _, entry = told(running, prompt)
    (report,) = entry["outputs"]["10"]["halfsafe_report"]
    assert json.loads(report)["encoders"] == [{"node": "11", "kind": "VAE", "verdict": "clean", "messages": [], "advice": ""}]
