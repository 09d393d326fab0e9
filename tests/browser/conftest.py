"""A real ComfyUI, its pinned page and the newest one, and Chromium.

`scripts/test.py` provides all three through COMFYUI_DIR, HALFSAFE_FRONTEND and CHROMIUM. Without one the tests are skipped,
or fail where HALFSAFE_STRICT is set. HALFSAFE_SLOW=6 makes the page six times slower and
HALFSAFE_LATE=400 lets what the server sends arrive 400 ms later, to find tests that take a busy machine for a fault.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from setup.comfyui_server import MODEL_FOLDERS, Server, make_base_directory
from setup.environment import Environment, write_models

ROOT = Path(__file__).absolute().parents[2]
NEEDED = ("COMFYUI_DIR", "HALFSAFE_FRONTEND", "CHROMIUM")
MISSING = [name for name in NEEDED if not os.environ.get(name)]
WRITTEN_WITHIN = 300
"""Seconds that a process waits for the models that another writes."""
MODELS = {"wan": "diffusion_models", "wan_overflowing": "diffusion_models", "clip_l": "text_encoders", "wan_vae": "vae"}
FRONTENDS = ("pinned", "newest")
RENDERERS = ("canvas", "nodes2")
PLAIN = (("pinned", "canvas"), ("newest", "nodes2"))
CELLS = {"drawn": {(page, renderer) for page in FRONTENDS for renderer in RENDERERS}, "once": {PLAIN[0]}}
"""Where a test runs by its marker: in each renderer of each page, where it judges what they draw; in the first of `PLAIN`, where it judges
what the server or the pack's own words say. Any other runs in one of `PLAIN`, which the name of its file decides, because tests of a file
share a page in their order; before a release in both."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    left_out = [item for item in ours if not in_its_cells(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in ours:  # a process and a server for each page
        item.add_marker(
            pytest.mark.xdist_group(getattr(item, "callspec", None) and item.callspec.params.get("server", ""))
        )
    if not MISSING or not ours:
        return
    if os.environ.get("HALFSAFE_STRICT"):
        raise pytest.UsageError(f"The browser tests need {', '.join(MISSING)}: run scripts/test.py --tier browser.")
    for item in ours:
        item.add_marker(pytest.mark.skip(reason=f"set {', '.join(MISSING)}, or run scripts/test.py --tier browser"))


def in_its_cells(item: pytest.Item) -> bool:
    marker = next((name for name in CELLS if item.get_closest_marker(name)), None)
    turn = zlib.crc32(item.path.name.encode()) % len(PLAIN)
    cells = CELLS[marker] if marker else PLAIN if os.environ.get("HALFSAFE_RELEASE") else PLAIN[turn : turn + 1]
    chosen_by_hand = "server" in {name for mark in item.iter_markers("parametrize") for name in mark.args[0]}
    return chosen_by_hand or (item.callspec.params["server"], item.callspec.params["vue"]) in cells


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `models/` folder of this process with the small Wan, one that overflows fp16, CLIP-L and the Wan VAE."""
    models = tmp_path_factory.mktemp("models")
    written = written_once(tmp_path_factory)
    for name in MODEL_FOLDERS:
        (models / name).mkdir()
    for name, folder in MODELS.items():
        shutil.copy(written / f"{name}.safetensors", models / folder)
    return models


def written_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the models, which the first process of a run writes: it imports torch and ComfyUI for that. The others wait."""
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared) / "written"
    done = shared / "done"
    try:
        shared.mkdir()
    except FileExistsError:
        end = time.monotonic() + WRITTEN_WITHIN
        while not done.exists():
            assert time.monotonic() < end, "the process that writes the small models has not written them"
            time.sleep(0.2)
        return shared
    write_models(Environment(Path(sys.executable), Path(os.environ["COMFYUI_DIR"])), shared, *MODELS)
    done.touch()
    return shared


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """One Chromium for all tests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # No other host is found: a route that aborts requests would keep the page from its cache, and each opening costs twice as much.
        options = [
            "--no-sandbox",
            "--disable-gpu",
            "--force-color-profile=srgb",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ]
        running = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=options)
        yield running
        running.close()


@pytest.fixture(scope="session", params=FRONTENDS)
def server(
    request: pytest.FixtureRequest, small_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A real ComfyUI that serves one of the two pages."""
    base = make_base_directory(tmp_path_factory.mktemp("base"), ROOT)
    for pack in ("prompt_checks", "qwen_image_21"):
        shutil.copy(ROOT / "tests" / "support" / "custom_nodes" / f"{pack}.py", base / "custom_nodes")
    extra = ["--models-directory", str(small_models)]
    if request.param == "newest":
        extra += ["--front-end-root", os.environ["HALFSAFE_FRONTEND"]]
    with Server(os.environ["COMFYUI_DIR"], base, extra) as running:
        yield running


@pytest.fixture(scope="session")
def info(server: Server) -> dict:
    """The node definitions of that ComfyUI, which a server makes anew each time that it is asked."""
    return server.object_info()


@pytest.fixture(scope="session", params=RENDERERS)
def vue(request: pytest.FixtureRequest) -> bool:
    """Whether the nodes are drawn as elements of the page (Nodes 2.0)."""
    return request.param == "nodes2"


@pytest.fixture(scope="session")
def cell(request: pytest.FixtureRequest, server: Server, vue: bool) -> str:
    """The name of this cell of the matrix, for pictures."""
    return f"{'newest' if '--front-end-root' in server.extra_args else 'pinned'}-{RENDERERS[vue]}"


@pytest.fixture(scope="session")
def opened_page(browser, server: Server, vue: bool) -> Iterator:
    """ComfyUI's page, dark, for all tests of one cell: opening one takes longer than most tests."""
    from browser.comfy_page import VIEW, ComfyPage

    context = browser.new_context(viewport=VIEW)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    yield ComfyPage(context, server, vue).open()
    context.close()


@pytest.fixture
def comfy(opened_page):
    """That page; tests share it."""
    return opened_page


@pytest.fixture
def unseen(opened_page) -> Iterator:
    """That page while it draws nothing, for tests that open templates by the dozen."""
    from browser.graph_walk import HIDE, SHOW

    opened_page.evaluate(HIDE)
    yield opened_page
    opened_page.evaluate(SHOW)


@pytest.fixture(autouse=True)
def nothing_goes_wrong(request: pytest.FixtureRequest, opened_page) -> Iterator[None]:
    """The same page before each test, in its language; no error, no warning and no failed request of the pack's files in it after."""
    language = request.node.get_closest_marker("language")
    opened_page.begin(*(language.args if language else ()))
    yield
    assert not opened_page.problems


@pytest.fixture(scope="session")
def pictures() -> Path | None:
    """Where screenshots go: HALFSAFE_PICTURES; without it none is made."""
    folder = os.environ.get("HALFSAFE_PICTURES")
    return Path(folder) if folder else None
