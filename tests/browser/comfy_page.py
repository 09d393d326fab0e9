"""ComfyUI's page in a real Chromium: open it in one renderer and theme, drive it, and note what goes wrong in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from halfsafe.precision.base.message import messages_in
from halfsafe.precision.guard.verdicts import LINES, VERDICTS
from setup.comfyui_server import Server

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Response

WORKFLOWS = Path(__file__).absolute().parents[2] / "workflows"
PACK = "/extensions/Halfsafe-Pack/"
REGISTRY = (
    "https://api.comfy.org/"  # ComfyUI looks up there the packs that a workflow names; nothing outside is reached here
)
LONGEST = 120_000
"""Milliseconds to wait for what is to come: on a busy machine it comes late."""
READY = "() => window.app?.extensionManager && window.app.graph && !document.getElementById('splash-loader')"
BASE_SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Workflow.Persist": False,
    "Comfy.Workflow.ShowMissingModelsWarning": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.Notification.ShowVersionUpdates": False,
    "Comfy.RightSidePanel.IsOpen": False,
    "Comfy.Locale": "en",
}
TEST_SETTINGS = {"halfsafe.toasts": True, "halfsafe.badges": True, "Halfsafe.WatchEveryRun": "off"}
STILL = """addEventListener("DOMContentLoaded", () => { const style = document.createElement("style");
    style.textContent = "*, *::before, *::after { animation: none !important; transition: none !important; }"; document.head.append(style); });"""
"""Nothing moves by itself: without a GPU a spinner costs as much as a run beside it."""
SELDOM = """window.requestAnimationFrame = (act) => setTimeout(() => act(performance.now()), 50); window.cancelAnimationFrame = clearTimeout;"""
"""Twenty frames a second: a page that shows a graph and does nothing asks for every frame there is, and took an eighth of a core."""
LATE = """(late) => { const { WebSocket, fetch: fetched } = window, listen = WebSocket.prototype.addEventListener;
    WebSocket.prototype.addEventListener = function (name, listener, ...rest) {
        return listen.call(this, name, name === "message" ? (event) => setTimeout(() => listener.handleEvent?.(event) ?? listener.call(this, event), late) : listener, ...rest); };
    window.fetch = async (...given) => {
        const answer = await fetched(...given);
        if (answer.url.includes("halfsafe")) await new Promise((done) => setTimeout(done, late));
        return answer; }; }"""
"""What the server sends, and answers to the pack's requests, arrive this many milliseconds late."""
VIEW = {"width": 1500, "height": 950}
BEGIN = """async (settings) => { const { setting, sidebarTab, toast } = app.extensionManager;
    Object.assign(toast, window.toastAs);
    (toast.removeAll ?? toast.dismissAll)();
    for (const [name, value] of Object.entries(settings)) if (setting.get(name) !== value) await setting.set(name, value);
    sidebarTab.activeSidebarTabId = null;
    app.canvas.deselectAll();
    document.activeElement?.blur(); }"""
MOUNTED = """() => app.canvas.low_quality || app.graph.nodes.filter((node) => app.canvas.isNodeVisible(node)).flatMap((node) => node.widgets ?? [])
    .every(({ element }) => !element?.classList.contains("halfsafe") || element.isConnected)"""
"""Whether the pack's elements are in the page, where it shows them: the newest one leaves out those of nodes that are not seen."""
SMALL_VALUES = {"width": 64, "height": 64, "length": 1, "batch_size": 1, "steps": 2}
STAND_INS = {
    "model_name": "wan.safetensors",
    "unet_name": "wan.safetensors",
    "clip_name": "clip_l.safetensors",
    "clip_name1": "clip_l.safetensors",
    "vae_name": "wan_vae.safetensors",
    "type": "sd3",
}


class ComfyPage:
    """One page of one ComfyUI. `problems` holds every complaint that concerns the pack's own files."""

    def __init__(self, context: BrowserContext, server: Server, vue: bool, theme: str = "dark") -> None:
        self.server, self.vue = server, vue
        self.settings = {**BASE_SETTINGS, **TEST_SETTINGS, "Comfy.ColorPalette": theme, "Comfy.VueNodes.Enabled": vue}
        self.problems: list[str] = []
        self.page: Page = context.new_page()
        self.page.add_init_script(STILL)
        self.page.add_init_script(SELDOM)
        self.page.set_default_timeout(LONGEST)
        if slower := os.environ.get("HALFSAFE_SLOW"):
            context.new_cdp_session(self.page).send("Emulation.setCPUThrottlingRate", {"rate": float(slower)})
        if late := os.environ.get("HALFSAFE_LATE"):
            self.page.add_init_script(f"({LATE})({float(late)})")
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self._note(f"{error.name}: {error.message} {error.stack}"))
        self.page.on("response", self._note_response)
        self.page.on("requestfailed", lambda request: PACK in request.url and self._note(f"failed: {request.url}"))

    def open(self, **settings: object) -> ComfyPage:
        """Load the page and wait until it stands, in the renderer asked for."""
        self.server.post("/settings", {**self.settings, **settings})
        self.page.goto(self.server.url)
        self.wait_ready()
        assert self.page.evaluate("() => window.LiteGraph.vueNodesMode ?? false") == self.vue, "the other renderer"
        return self

    def begin(self, language: str = "en") -> None:
        """Bring the page to the state that every test begins with, whatever the one before left."""
        self.page.unroute_all()
        self.page.set_viewport_size(VIEW)
        while (dialogs := self.page.locator("[role=dialog]:visible")).count():
            self.page.keyboard.press("Escape")
            dialogs.last.wait_for(state="hidden")
        # The language apart: the page loads the graph of the test before once more after a change, which has to be waited for.
        self.evaluate(BEGIN, {name: value for name, value in self.settings.items() if name != "Comfy.Locale"})
        self.speak(language)
        self.problems.clear()

    def wait_ready(self) -> None:
        """Wait until the page stands."""
        self.page.wait_for_function(READY)

    def set(self, name: str, value: object) -> None:
        """Change one of the page's settings."""
        self.evaluate(
            "async ([name, value]) => { await app.extensionManager.setting.set(name, value); }", [name, value]
        )

    def speak(self, language: str) -> None:
        """Change the page's language and wait until the page has fetched its node definitions and loaded the graph anew.

        It does so at its own time, and loads the graph as it was at the last click: one made in between is gone.
        """
        if self.evaluate("() => app.extensionManager.setting.get('Comfy.Locale')") == language:
            return
        code = """(language) => { window.dispatchEvent(new MouseEvent("mouseup")); app.extensionManager.setting.set("Comfy.Locale", language); }"""
        self.load_by(code, language)

    def load_by(self, expression: str, argument: object) -> None:
        """Run a function after which the page loads a graph by itself, and wait until it has."""
        self.evaluate("""() => { window.loaded = false; const load = app.loadGraphData.bind(app);
            app.loadGraphData = async (...given) => { delete app.loadGraphData; const done = await load(...given); window.loaded = true; return done; }; }""")
        self.evaluate(expression, argument)
        self.page.wait_for_function("() => window.loaded")

    def evaluate(self, expression: str, argument: object = None) -> object:
        """Run a JavaScript function in the page."""
        return self.page.evaluate(expression, argument)

    def found(self, expression: str, wanted: object) -> object:
        """Run a function in the page until it gives what is wanted, and return what it gave last."""
        end = time.monotonic() + LONGEST / 1000
        while (given := self.evaluate(expression)) != wanted and time.monotonic() < end:
            self.page.wait_for_timeout(50)
        return given

    def load(self, workflow: dict) -> None:
        """Open a workflow, as dropping its file would."""
        self.evaluate("async (workflow) => { await app.loadGraphData(workflow); }", workflow)
        self.page.wait_for_function(MOUNTED)

    def load_small(self) -> None:
        """Open a workflow with a report, on the small models."""
        self.load(json.loads((WORKFLOWS / "Halfsafe 3 - Half the memory.json").read_text(encoding="utf-8")))
        self.make_small()

    def saved(self) -> dict:
        """The workflow as the page would save it."""
        return self.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize()))")

    def add(self, *types: str) -> list[int]:
        """Put nodes side by side on an empty canvas and return their ids."""
        code = """async (types) => { app.canvas.setGraph(app.graph); app.graph.clear(); app.canvas.ds.reset(); await new Promise(requestAnimationFrame); let x = 0; return types.map((type) => {
            const node = LiteGraph.createNode(type); node.pos = [x, 100]; x += node.size[0] + 40;
            app.graph.add(node); return node.id; }); }"""
        ids = self.evaluate(code, list(types))
        self.page.wait_for_function(MOUNTED)
        return ids

    def make_small(self) -> None:
        """Give the open workflow the small models and sizes a CPU does in seconds, and the renderer's own seed: both share the server's cache."""
        code = """([values, files, seed]) => { for (const node of app.graph.nodes) for (const widget of node.widgets ?? []) {
            if (widget.name === "seed") widget.value = seed;
            if (typeof widget.value === "number" && widget.name in values) widget.value = Math.min(widget.value, values[widget.name]);
            const options = widget.options?.values;
            const absent = Array.isArray(options) && !options.includes(widget.value);
            if (widget.name in files && (absent || (widget.name === "type" && widget.value === "wan"))) widget.value = files[widget.name];
        } }"""
        self.evaluate(code, [SMALL_VALUES, STAND_INS, int(self.vue)])

    def run(self) -> None:
        """Queue the open workflow, as the Run button does, and wait for its end.

        Raises:
            AssertionError: it was refused or failed.
        """
        code = """async () => { const { api } = await import("/scripts/api.js");
            const ends = ["execution_success", "execution_error", "execution_interrupted"];
            window.runEnd = new Promise((done) => ends.forEach((end) => api.addEventListener(end, ({ detail }) => done([end, detail]), { once: true })));
            return app.queuePrompt(0, 1); }"""
        assert self.evaluate(code), "the prompt was refused"
        end, detail = self.evaluate(
            "() => Promise.race([window.runEnd, new Promise((done) => setTimeout(() => done(['timeout', null]), 120000))])"
        )
        assert end == "execution_success", detail

    def badges(self) -> dict[str, str]:
        """Node type -> what its last badge says on a node that is wide enough for it."""
        code = """() => Object.fromEntries(app.graph.nodes.filter((n) => n.type.startsWith("Halfsafe")).map((n) => {
            const width = n.size[0]; n.size[0] = 2000;
            const text = n.badges.map((b) => (typeof b === "function" ? b() : b).text).at(-1);
            n.size[0] = width; return [n.type, text]; }))"""
        return self.evaluate(code)

    def send(self, event: str, /, **detail: object) -> None:
        """Let the page receive an event, as from the server."""
        self.evaluate(
            "async ([event, detail]) => { (await import('/scripts/api.js')).api.dispatchCustomEvent(event, detail); }",
            [event, detail],
        )

    def show(self, outputs: dict[str, dict]) -> None:
        """Let the page receive outputs of nodes, by their ids."""
        for node, output in outputs.items():
            self.send("executed", node=node, display_node=node, prompt_id="shown", output=output)

    def show_report(self, report: dict, is_old: bool = False) -> None:
        """Let the page receive a report as the output of its report node. ``is_old``: nothing is said of its verdicts, as in a workflow
        that an earlier version saved."""
        if not is_old:
            report = {
                **report,
                "guard": judged(report["guard"]),
                "encoders": [*map(judged, report.get("encoders", []))],
            }
        node = self.evaluate("() => String(app.graph.nodes.find((n) => n.type === 'HalfsafeReport').id)")
        self.show({node: {"halfsafe_report": [json.dumps(report)]}})

    def record_toasts(self) -> Callable[..., list[dict]]:
        """Keep the toasts that the pack shows until the test's end, instead of showing them.

        Returns:
            A function ``shown(at_least=0)``: the toasts so far, once there are that many. What a server sends over its socket comes
            after its answer to a request, if the machine is busy: a test that has not waited for a later event gives the number.
        """
        code = """() => { const { toast } = app.extensionManager, ours = (message) => message.summary?.startsWith("Halfsafe: ") && window.toasts.push(message);
            window.toasts = []; window.toastAs ??= Object.fromEntries(["add", "success", "warning", "error"].filter((name) => toast[name]).map((name) => [name, toast[name]]));
            toast.add = (message) => ours(message) || window.toastAs.add(message);
            for (const [name, severity] of [["success", "success"], ["warning", "warn"], ["error", "error"]])  // how the newest page is told
                if (window.toastAs[name]) toast[name] = (summary, { description: detail } = {}) => ours({ severity, summary, detail }) || window.toastAs[name](summary, { description: detail }); }"""
        self.evaluate(code)

        def shown(at_least: int = 0) -> list[dict]:
            self.page.wait_for_function("(count) => window.toasts.length >= count", arg=at_least)
            return self.evaluate("() => window.toasts")

        return shown

    def send_guard(self, **message: object) -> None:
        """Let the page receive a guard's message."""
        whole = {
            "node_id": None,
            "prompt_id": "p",
            "kind": "event",
            "verdict": "recovered",
            "message": "",
            "advice": "",
            "event": None,
        }
        advice = message.get("advice", "")
        first, *_ = getattr(advice, "sentences", ()) or (advice,)
        line = LINES.get(getattr(advice, "template", advice), first)
        data = judged({"brief": message.get("message", ""), "line": line, **whole, **message})
        self.send("halfsafe.guard", **data, messages=messages_in(data))

    def zoom_to(self, node_type: str, width: int | None = None, height: int | None = None) -> None:
        """Size a node and bring it to the left top of the canvas at scale 1."""
        code = """([type, width, height]) => { const node = app.graph.nodes.find((n) => n.type === type);
            if (width) node.setSize([width, height]);
            app.canvas.ds.scale = 1; app.canvas.ds.offset[0] = 120 - node.pos[0]; app.canvas.ds.offset[1] = 120 - node.pos[1];
            app.canvas.setDirty(true, true); }"""
        self.evaluate(code, [node_type, width, height])
        self.settle()

    def settle(self) -> None:
        """Wait until the canvas, its nodes and the pack's elements keep their boxes for four frames: a busy machine draws late."""
        code = """async () => { const { ds } = app.canvas, boxes = () => JSON.stringify([[ds.scale, ...ds.offset], ...app.graph.nodes.map(({ pos, size }) => [...pos, ...size]),
                ...[...document.querySelectorAll("[class^=hs-]")].map((e) => { const { x, y, width, height } = e.getBoundingClientRect(); return [x, y, width, height, e.scrollWidth]; })]);
            for (let last = boxes(), same = 0, frames = 0; same < 4 && frames < 600; frames++) {
                await new Promise(requestAnimationFrame); const now = boxes(); same = now === last ? same + 1 : 0; last = now; } }"""
        self.evaluate(code)

    def screenshot(self, folder: Path | None, name: str) -> None:
        """Bring the page to rest and keep a picture of it, where there is a folder for it."""
        self.page.mouse.move(760, 900)
        self.evaluate(
            "() => { document.activeElement?.blur(); document.querySelectorAll('.hs-scroll').forEach((e) => e.scrollTo(0, 0)); }"
        )
        if folder is None:
            return
        self.page.wait_for_timeout(1000)
        folder.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=folder / f"{name}.png")

    def _note(self, problem: str) -> None:
        self.problems.append(problem)

    def _note_message(self, message: ConsoleMessage) -> None:
        where = f"{message.location.get('url', '')} {message.text}"
        if message.type in ("error", "warning") and "halfsafe" in where.lower() and REGISTRY not in where:
            self._note(f"console {message.type}: {where}")

    def _note_response(self, response: Response) -> None:
        if response.status >= 400 and PACK in response.url:
            self._note(f"{response.status}: {response.url}")


def judged(data: dict) -> dict:
    """Data of a guard with what its verdict's row says, as the server sends them."""
    row = VERDICTS.get(data["verdict"])
    return {**data, "about": row.shown() if row else {}}


def without_positions(workflow: dict) -> dict:
    """A workflow's nodes and links, without what a page may set as it draws; no widget values are an empty list."""
    drop = ("pos", "size", "order", "flags")
    nodes = [{"widgets_values": [], **{k: v for k, v in node.items() if k not in drop}} for node in workflow["nodes"]]
    return json.loads(json.dumps({"nodes": sorted(nodes, key=lambda n: n["id"]), "links": sorted(workflow["links"])}))
