"""Routes of the page: what they answer to bodies of any kind, and where they work."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from halfsafe.precision.devices.detect import detect

PAGE = "an open page"
SETTING = {"client_id": PAGE, "on_nan": "report"}
NOT_JSON = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"x" * (1 << 21)]
NO_FILES = [None, 1, {}, "a", ["a"], [["a"]], [["a", 1]], [["a", "b", "c"]], [{"folder": "a"}]]
LOADER = {"folder": "vae", "names": ["none.safetensors"], "in_8_bits": False, "size": None}
NO_LOADERS = [
    None, 1, {}, "a", ["a"], [["vae", "a"]], [{}], [{**LOADER, "folder": 1}], [{**LOADER, "names": "a"}], [{**LOADER, "names": [1]}],
    [{**LOADER, "smaller": 64}], [{**LOADER, "smaller": [64]}], [{**LOADER, "storages": "int8"}], [{**LOADER, "storages": ["int9"]}], [{**LOADER, "size": 64}], [{**LOADER, "size": {"width": 64}}], [{**LOADER, "size": {"width": 64, "height": 64, "length": 1, "batch_size": "1"}}],
]  # fmt: skip
NO_SETTING = [
    None, [], "a", {}, {"client_id": PAGE}, {"on_nan": "stop"}, {**SETTING, "client_id": None}, {**SETTING, "client_id": [PAGE]},
    {**SETTING, "client_id": "a page that is not open"}, {**SETTING, "on_nan": "x" * 1000}, {**SETTING, "on_nan": None}, {**SETTING, "on_nan": ["stop"]},
]  # fmt: skip


@pytest.fixture
def routes(comfy, monkeypatch):
    """The pack's handlers, and ComfyUI's server with one page connected to it."""
    from halfsafe.nodes.host.guard import watch
    from halfsafe.nodes.host.reporting import routes

    monkeypatch.setattr(watch, "_settings", {})
    handlers = {}
    table = SimpleNamespace(
        get=lambda path: str, post=lambda path: lambda handler: handlers.update({path.split("/")[-1]: handler})
    )
    server = SimpleNamespace(sockets={PAGE: None}, routes=table)
    monkeypatch.setattr(watch.PromptServer, "instance", server, raising=False)
    routes.serve_page()
    return SimpleNamespace(routes=routes, watch=watch, handlers={**handlers, "watch": watch._keep_setting})


def posted(routes, bodies: dict[str, list[bytes]]) -> list[tuple[int, str]]:
    """The status and text of each answer."""

    async def run():
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post(f"/{name}", handler) for name, handler in routes.handlers.items()])
        async with TestClient(TestServer(app)) as client:
            answers = [
                await client.post(f"/{name}", data=body) for name, of_route in bodies.items() for body in of_route
            ]
            return [(answer.status, await answer.text()) for answer in answers]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("profile", "gains"),
    [
        ("sm_75", False),
        ("sm_86", True),
        ("sm_89", True),
        ("sm_90", False),
        ("sm_100", False),
        ("gfx1100", False),
        ("mps_m3", False),
        ("cpu", False),
    ],
)
def test_speed_is_promised_only_on_a_device_where_int8_gains(routes, monkeypatch, profile, gains):
    monkeypatch.setattr(routes.routes, "current_device", lambda: detect(profile=profile))
    answer = json.loads(asyncio.run(routes.routes._device(None)).text)
    assert answer["int8_gains"] is gains


def test_every_malformed_body_is_answered_with_a_sentence(routes):
    encoded = {"computing": NO_FILES, "halving": NO_LOADERS, "watch": NO_SETTING}
    bodies = {name: [*NOT_JSON, *(json.dumps(value).encode() for value in values)] for name, values in encoded.items()}
    bodies["rules"] = [b"\xff\xfe", b"#" * 100_001]
    answers = posted(routes, bodies)
    assert [status for status, _ in answers] == [400] * len(answers)
    assert all(text.startswith("The ") and text.endswith(".") for _, text in answers), answers
    assert routes.watch._settings == {}


def test_what_the_page_sends_is_answered(routes):
    """As web/memory.mjs and web/guard.mjs send it."""
    size = {"width": 64, "height": 64, "length": 1, "batch_size": 1}
    sized = {**LOADER, "size": size, "smaller": [size], "storages": ["int8", "auto"]}
    bodies = {
        "halving": [json.dumps([LOADER, sized]).encode()],
        "computing": [json.dumps([["vae", "none.safetensors"]]).encode()],
    }
    (halved, loaders), computing = posted(routes, bodies)
    assert (
        halved == 200 and [loader["missing"] for loader in json.loads(loaders)["loaders"]] == [["none.safetensors"]] * 2
    )
    assert computing == (200, '{"files": [], "messages": {}}')


def test_a_setting_is_kept_of_an_open_page_and_ends_with_it(routes):
    routes.watch._settings["a page that is gone"] = "stop"
    assert posted(routes, {"watch": [json.dumps(SETTING).encode()]}) == [(200, "")]
    assert routes.watch._settings == {PAGE: "report"}


def test_rules_are_read_beside_the_event_loop(routes, monkeypatch):
    threads, read = [], routes.routes.read
    monkeypatch.setattr(routes.routes, "read", lambda text: threads.append(threading.current_thread()) or read(text))
    ((status, text),) = posted(routes, {"rules": [b"blocks.* storage=bf16\nwrong"]})
    answer = json.loads(text)
    assert (status, answer["count"], [mistake["line"] for mistake in answer["mistakes"]]) == (200, 1, [2])
    assert threads and threads[0] is not threading.main_thread()
