"""Guards that the page's setting puts into every prompt: what they do, and what stays as it was."""

from __future__ import annotations

import asyncio
import io
import json
from types import SimpleNamespace

import pytest
from halfsafe.nodes.host import watch
from halfsafe.nodes.host.watch import Watched, with_guards
from PIL import Image
from setup.comfyui_server import Server
from support import tiny_models
from support.guarded_runs import MODEL, brightness, graph, picture, told

SETTING = "Halfsafe.WatchEveryRun"


def unguarded(seed: int = 1) -> dict:
    prompt = graph("retry_higher", seed=seed)
    prompt["6"]["inputs"]["model"] = ["1", 0]
    del prompt["9"], prompt["10"]
    return prompt


@pytest.fixture(scope="module")
def running(server: Server, small_models) -> Server:
    """A server that has a Wan model which overflows in fp16."""
    tiny_models.wan_overflowing(small_models / "diffusion_models" / MODEL)
    return server


@pytest.fixture
def watching(running: Server):
    yield lambda value: running.post("/settings", {SETTING: value})
    running.post("/settings", {SETTING: "off"})


def test_every_run_is_guarded_and_pictures_and_history_are_as_asked(running: Server, watching) -> None:
    watching("retry_higher")
    prompt = unguarded(seed=41)
    events, entry = told(running, prompt)
    assert [event["kind"] for event in events] == ["event", "verdict"] and events[0]["verdict"] == "recovered"
    png = picture(running, entry)
    assert max(brightness(png)) > 4
    assert b"halfsafe_1_0" not in png and b"tEXtprompt\0" + json.dumps(prompt).encode() in png
    assert json.dumps(entry["prompt"][2]) == json.dumps(prompt)


def test_what_ran_already_is_cached_and_off_leaves_the_prompt_alone(running: Server, watching) -> None:
    watching("retry_higher")
    told(running, unguarded(seed=42))
    _, again = told(running, unguarded(seed=42))
    cached = next(detail["nodes"] for name, detail in again["status"]["messages"] if name == "execution_cached")
    assert {"1", "6", "7", "8", "halfsafe_1_0"} <= {*cached}
    watching("off")
    prompt = unguarded(seed=43)
    events, entry = told(running, prompt)
    png = picture(running, entry)
    assert not events and max(brightness(png)) <= 4
    held = json.loads(Image.open(io.BytesIO(png)).text["prompt"])
    for node in held.values():
        node.pop("is_changed", None)  # ComfyUI keeps there what a node's fingerprint was
    assert held == prompt


@pytest.mark.parametrize(("request_of", "watches"), [({"user": "ann"}, True), ({"user": "default"}, False), ({}, False)])
def test_each_user_has_a_setting_of_their_own(comfy, monkeypatch, tmp_path, request_of: dict, watches: bool) -> None:
    for user, setting in (("default", "off"), ("ann", "report")):
        (tmp_path / user).mkdir()
        (tmp_path / user / "comfy.settings.json").write_text(json.dumps({SETTING: setting}), encoding="utf-8")
    users = SimpleNamespace(get_request_user_id=lambda request: request["user"])
    monkeypatch.setattr(watch.folder_paths, "get_user_directory", lambda: str(tmp_path))
    monkeypatch.setattr(watch, "PromptServer", SimpleNamespace(instance=SimpleNamespace(user_manager=users)))

    async def queue(_: dict) -> dict:
        return watch.watched({"prompt": unguarded()})

    queued = asyncio.run(watch.note_user(request_of, handler=queue))
    assert isinstance(queued["prompt"], Watched) == watches


def test_report_only_tells(running: Server, watching) -> None:
    watching("report")
    events, entry = told(running, unguarded(seed=44))
    assert events and max(brightness(picture(running, entry))) <= 4


def test_guards_stand_where_models_and_vaes_are_used_up_and_never_twice(comfy) -> None:
    prompt = unguarded()
    prompt["11"] = {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["1", 0], "lora_name": "a", "strength_model": 1.0}}
    prompt["6"]["inputs"]["model"] = ["11", 0]
    guarded = with_guards(prompt, "report")
    assert guarded["6"]["inputs"]["model"] == ["halfsafe_11_0", 0] and guarded["11"] == prompt["11"]
    assert guarded["7"]["inputs"]["vae"] == ["halfsafe_3_0", 0]
    assert with_guards(guarded, "report") == guarded
    seen = Watched(prompt, guarded)
    assert json.loads(json.dumps(seen)) == prompt and seen["6"] == guarded["6"] and "halfsafe_3_0" in seen
