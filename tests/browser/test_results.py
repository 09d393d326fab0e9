"""What people see of a result: on the node that made it, as a message, in the sidebar; and only in the workflow that ran."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage
from browser.test_sidebar import PLAIN
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.base.message import Message, joined, messages_in
from halfsafe.precision.report.result import CHOSEN, Result
from halfsafe.precision.study.analysis_text import HEAD
from support import shapes

TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"
UNDO = "async () => { await app.extensionManager.command.execute('Comfy.Undo'); }"
TYPES = "() => app.graph.nodes.map((n) => n.type)"
SENTENCES = "() => [...document.querySelectorAll('.hs-panel .hs-sentence')].map((e) => e.textContent)"
PUT_RESULTS_IN = """() => { const of = (type) => app.graph.nodes.find((n) => n.type === type), put = (type) => { const node = LiteGraph.createNode(type); app.graph.add(node); return node; };
    const compare = put("HalfsafeCompareImages"), rules = put("HalfsafeLayerRules"), decoded = of("VAEDecode");
    decoded.connect(0, compare, "reference"); decoded.connect(0, compare, "candidate"); rules.connect(0, of("HalfsafeLoadDiffusionModel"), "rules");
    rules.widgets.find((w) => w.name === "rules").value = "blocks.77.* storage=bf16";
    compare.pos = [0, 3000];
    const save = put("HalfsafeSaveModel"), measure = put("HalfsafeMeasurePrecisions"), check = put("HalfsafeCheckFinite"), preview = put("PreviewImage"), sampler = of("KSampler");
    put("HalfsafeDeviceInfo"); of("HalfsafeLoadDiffusionModel").connect(0, save, "model"); of("HalfsafeLoadDiffusionModel").connect(0, measure, "model");
    sampler.getInputNode(1).connect(0, measure, "positive"); sampler.getInputNode(3).connect(0, measure, "latent_image"); measure.connect(2, preview, "images");
    measure.widgets.find((w) => w.name === "candidates").value = "as_file/auto\\nas_file/bf16\\nas_file/fp32";
    sampler.connect(0, check, "value"); check.connect(0, of("VAEDecode"), "samples"); }"""
SEEN = """() => { const { ds, canvas, graph } = app.canvas, page = canvas.getBoundingClientRect(), boxes = (name) => [...document.querySelectorAll(name)].map((e) => e.getBoundingClientRect());
    const covers = boxes(".hs-sidebar, .minimap-main-container"), at = ([x, y]) => [page.left + (x + ds.offset[0]) * ds.scale, page.top + (y + ds.offset[1]) * ds.scale];
    const drawn = (id) => boxes(`.lg-node[data-node-id="${id}"]`)[0]?.bottom ?? 0;
    return graph.nodes.filter(({ id, pos, size, flags }) => { const [left, top] = at([pos[0], pos[1] - LiteGraph.NODE_TITLE_HEIGHT]), [right, bottom] = at([pos[0] + size[0], pos[1] + (flags?.collapsed ? 0 : size[1])]);
        return left >= page.left && top >= page.top && right <= page.right && Math.max(bottom, drawn(id)) <= page.bottom && covers.every((c) => right <= c.left || c.right <= left || bottom <= c.top || c.bottom <= top); })
        .map(({ type }) => type).sort(); }"""
LINKS = "() => app.graph.serialize().links.map((link) => link.slice(1).join(' '))"
SHOWN = "() => app.canvas.graph.nodes.map((n) => n.type).sort()"
VIEW = "() => { const { graph, ds } = app.canvas; return [graph.id, ds.scale, ...ds.offset]; }"
SUBGRAPH = """() => { const { subgraph } = app.graph.convertToSubgraph(new Set(app.graph.nodes.filter(({ type }) => type !== "SaveImage"))); subgraph.name = "Drawing"; }"""
PLACE = """() => { const one = app.graph.nodes.find((n) => n.type === "HalfsafeAutoPrecision"), title = LiteGraph.NODE_TITLE_HEIGHT;
    const box = ({ pos, size, flags }, top) => ({ left: pos[0], top: pos[1] - top, right: pos[0] + size[0], bottom: pos[1] + (flags?.collapsed ? 0 : size[1]) }), mine = box(one, title);
    const boxes = [...app.graph.nodes.filter((n) => n !== one).map((n) => [n.type, box(n, title)]), ...app.graph.groups.map((g) => [g.title, box(g, 0)])];
    const meets = boxes.filter(([, b]) => b.left < mine.right && mine.left < b.right && b.top < mine.bottom && mine.top < b.bottom).map(([name]) => name);
    const [loader, sampler] = ["HalfsafeLoadDiffusionModel", "KSampler"].map((type) => boxes.find(([name]) => name === type)[1]);
    return { meets, between: loader.left <= mine.left && mine.left <= sampler.left, beside: loader.right < mine.left && mine.right < sampler.left && mine.top < sampler.bottom,
        below: mine.top > Math.max(...boxes.filter(([, b]) => b.left < mine.right && mine.left < b.right).map(([, b]) => b.bottom)) }; }"""
ROOM = """(group) => { const of = (type) => app.graph.nodes.filter((n) => n.type === type), [sampler] = of("KSampler"); sampler.pos = [2600, 300];
    for (const type of ["HalfsafeLoadCLIP", "HalfsafeLoadVAE", "CLIPTextEncode", "EmptyHunyuanLatentVideo", "HalfsafeReport", "VAEDecode", "SaveImage"]) for (const node of of(type)) node.pos = [node.pos[0], node.pos[1] + 1500];
    if (group) { const box = new LiteGraph.LGraphGroup("Mine"); box.pos = [760, -100]; box.size = [900, 700]; app.graph.add(box); } }"""
BEFORE = (
    """() => { const [sampler] = app.graph.nodes.filter((n) => n.type === "KSampler"); sampler.pos = [-400, 0]; }"""
)
ON_TOP = """() => { for (const node of app.graph.nodes) if (!["HalfsafeLoadDiffusionModel", "KSampler"].includes(node.type)) node.pos = [node.pos[0], node.pos[1] + 700]; }"""
ROOM_BESIDE_BADGES = """() => { const context = document.createElement("canvas").getContext("2d"), ours = app.graph.nodes.filter((n) => n.type.startsWith("Halfsafe"));
    return ours.map((n) => n.size[0] - n.badges.at(-1)().getWidth(context)); }"""
DROP = """(text) => { const files = new DataTransfer(); files.items.add(new File([text], "dropped.json", { type: "application/json" }));
    const options = { dataTransfer: files, bubbles: true, cancelable: true, clientX: 700, clientY: 400 };
    document.querySelector("#graph-canvas").dispatchEvent(new DragEvent("drop", options)); }"""
GUARD = "async () => { const { guardWorkflow } = await import('/extensions/Halfsafe-Pack/guard.mjs'); const { headline, line } = await guardWorkflow(app); return `${headline} ${line}`.trim(); }"


@pytest.fixture
def small(opened_page: ComfyPage) -> ComfyPage:
    """The page with the shared workflow and small models."""
    opened_page.load_small()
    return opened_page


def test_dropped_workflow_runs_to_a_picture_and_a_report(small: ComfyPage, pictures: Path, cell: str) -> None:
    text = json.dumps(small.saved())
    small.evaluate("() => app.graph.clear()")
    small.load_by(DROP, text)
    small.page.get_by_test_id("queue-button").click()
    small.page.wait_for_selector(".hs-table tbody tr", state="attached")
    code = "() => { const node = app.graph.nodes.find((n) => n.type === 'SaveImage'); return app.nodeOutputs[node.id]?.images?.[0]; }"
    small.page.wait_for_function(code)
    small.screenshot(pictures, f"end-to-end-{cell}")
    width = "async (file) => { const image = new Image(); image.src = `/view?${new URLSearchParams(file)}`; await image.decode(); return image.naturalWidth; }"
    assert small.evaluate(width, small.evaluate(code)) == 64


@pytest.mark.once  # a run is the server's; the next test draws results in each renderer of each page
def test_results_are_on_their_nodes_and_a_saved_file_is_told(small: ComfyPage, pictures: Path, cell: str) -> None:
    small.evaluate(PUT_RESULTS_IN)
    small.load(small.saved())
    shown = small.record_toasts()
    small.run()
    small.page.wait_for_function("() => document.querySelectorAll('.hs-panel .hs-sentence').length === 6")
    found = small.evaluate(SENTENCES)
    assert any(text.startswith("Saved diffusion_models/halfsafe") and "It holds bf16 " in text for text in found), found
    (measured,) = (
        text
        for text in found
        if text.startswith(("Best: ", "The times were too noisy to rank", "No setting is better than"))
    )  # on a busy machine no time can be ranked
    assert "Finite: no NaN and no Inf." in found
    assert any("CPU computes in" in text for text in found)
    told = sorted(toast["summary"].split()[1] for toast in shown())
    assert told == sorted([measured.split()[0], "Saved", "No", "wan.safetensors:"])
    assert all(toast.get("life", 0) <= 6000 for toast in shown() if toast["severity"] == "success"), (
        "it covers a corner of what was drawn"
    )
    assert [toast["detail"] for toast in shown() if "No layer of this model matches" in toast["summary"]] == [
        "blocks.77.* storage=bf16"
    ]
    small.evaluate(TAB)
    assert measured in small.page.text_content(".hs-run") and "This workflow has no guard" not in small.page.inner_text(
        ".hs-sidebar"
    ), "it is there to measure"
    assert (
        small.evaluate(
            "() => app.graph.nodes.flatMap((n) => n.widgets ?? []).filter((w) => w.name === '$$node-text-preview')"
        )
        == []
    ), "progress ends with the node"
    rows = small.evaluate(
        "() => [...document.querySelectorAll('.hs-figures tbody tr')].map((row) => row.cells[0].textContent)"
    )
    assert len(rows) == 3 and any(" = " in row for row in rows), rows
    assert (
        small.evaluate("() => document.querySelector('.hs-figures tbody tr').dataset.marked")
        == str(measured.startswith("Best")).lower()
    ), "the best comes first"
    small.zoom_to("HalfsafeMeasurePrecisions", 620, 560)
    small.screenshot(pictures, f"measured-{cell}")
    small.zoom_to("HalfsafeDeviceInfo", 620, 560)
    small.screenshot(pictures, f"device-{cell}")


@pytest.mark.drawn
@pytest.mark.parametrize("node", ["HalfsafeAnalyzeLayers", "HalfsafeMeasurePrecisions"])
def test_a_result_is_drawn_as_a_sentence_and_a_table(opened_page: ComfyPage, node: str) -> None:
    opened_page.add(node)
    values = {"chosen": 3, "free": 4, "candidate": "int8", "snr": "31.0 dB", "error": "2.8 %"}
    rows = [
        ["blocks.0.individual_token_refiner.0", "31.0", "30.9", "31.0", "pinned"],
        ["blocks.0.ffn.2", "12.0", "±12 %", "12.0", "chosen"],
    ]
    result = Result(Message(CHOSEN, **values), head=HEAD, rows=rows, marked=1, text="All of it.")
    sent = {
        "node": opened_page.evaluate("() => String(app.graph.nodes[0].id)"),
        "prompt_id": "p",
        "output": result.ui(),
    }
    opened_page.send("executed", **{**sent, "display_node": sent["node"]})
    opened_page.page.wait_for_selector(".hs-figures")
    assert opened_page.evaluate(SENTENCES) == ["3 of 4 layers can use int8: error about 2.8 % (31.0 dB)."]
    marked = opened_page.page.locator('.hs-figures tbody tr[data-marked="true"]')
    assert (
        marked.all_text_contents() == ["blocks.0.ffn.212.0±12\u00a0%12.0chosen"]
        and opened_page.page.locator(".hs-figures tbody tr").count() == 2
    )
    opened_page.zoom_to(node, 296)  # as narrow as in a template
    assert (
        opened_page.evaluate(
            "() => { const { scrollWidth, clientWidth } = document.querySelector('.hs-result'); return scrollWidth - clientWidth; }"
        )
        <= 0
    )


@pytest.mark.drawn
def test_a_node_is_as_high_as_before_when_its_words_are_gone(opened_page: ComfyPage) -> None:
    opened_page.add("HalfsafeMeasurePrecisions")
    heights = []
    for node in (None, "1", None):
        opened_page.evaluate(
            "async (id) => { (await import('/scripts/api.js')).api.dispatchCustomEvent('executing', id); }", node
        )
        if node:
            opened_page.send("progress_text", nodeId=node, text="Halfsafe: measuring")
        opened_page.settle()
        heights.append(opened_page.evaluate("() => Math.round(app.graph.nodes[0].size[1])"))
    assert heights[0] == heights[2] and (heights[1] > heights[0] or opened_page.vue)


@pytest.mark.once  # words of the server; the toast is drawn by test_guard
def test_why_a_value_is_refused_is_told(small: ComfyPage) -> None:
    shown = small.record_toasts()
    small.evaluate("""async () => { const rules = LiteGraph.createNode("HalfsafeLayerRules"); app.graph.add(rules); rules.connect(0, app.graph.nodes.find((n) => n.type === "HalfsafeLoadDiffusionModel"), "rules");
        rules.widgets.find((w) => w.name === "rules").value = "a storage=fp4\\nb compte=fp16"; await app.queuePrompt(0, 1); }""")
    (toast,) = shown(at_least=1)
    assert toast["summary"].startswith("Halfsafe: Rules, line 1") and toast["detail"].startswith("Use one of: "), toast
    small.evaluate(TAB)
    small.page.locator(".hs-sidebar", has_text="line 2").wait_for()
    small.evaluate(TAB)


@pytest.mark.once  # a run is the server's
def test_a_cached_save_is_not_told_again(small: ComfyPage) -> None:
    small.evaluate("""() => { const save = LiteGraph.createNode("HalfsafeSaveModel"); app.graph.add(save);
        app.graph.nodes.find((n) => n.type === "HalfsafeLoadDiffusionModel").connect(0, save, "model");
        app.graph.nodes.find((n) => n.type === "KSampler").widgets[1].value = "fixed"; }""")
    small.run()
    shown = small.record_toasts()
    small.run()
    assert shown() == []
    small.evaluate(TAB)
    text = small.page.inner_text(".hs-sidebar")
    assert "Saved " in text and "of an earlier run" in text and "Nothing was computed: " not in text, "one of both"


def test_another_workflow_shows_nothing_of_a_run(small: ComfyPage) -> None:
    small.add("HalfsafeNaNGuard", "HalfsafeReport")
    small.evaluate("() => { const [guard, report] = app.graph.nodes; guard.connect(0, report, 'model'); }")
    guard = small.evaluate("() => String(app.graph.nodes[0].id)")
    event = {
        "step": 0,
        "sigma": 1.0,
        "layer": "a",
        "op": "",
        "kind": "overflow",
        "from": "fp16",
        "to": "fp32",
        "recovered": True,
    }
    small.send_guard(node_id=guard, prompt_id="elsewhere", workflow="another", message="Overflow.", event=event)
    assert small.page.locator(".hs-guard .hs-event").count() == 0
    small.send_guard(
        node_id=guard,
        prompt_id="here",
        workflow=small.evaluate("() => String(app.graph.id)"),
        message="Overflow.",
        event=event,
    )
    assert small.page.locator(".hs-guard .hs-event").count() == 1


def test_an_error_is_told_by_its_first_sentence(small: ComfyPage, pictures: Path, cell: str) -> None:
    shown = small.record_toasts()
    node = small.evaluate("() => String(app.graph.nodes.find((n) => n.type === 'HalfsafeLoadDiffusionModel').id)")
    error = {
        "prompt_id": "bad",
        "node_id": node,
        "node_type": "HalfsafeLoadDiffusionModel",
        "traceback": [],
        "executed": [],
        "exception_type": "halfsafe.CheckpointError",
    }
    advice = joined(["Get it again.", "Version 2.0 of the site has it."])
    text = str(CheckpointError("/models/unet/x.safetensors", "the file is cut short", advice=advice))
    small.send("execution_start", prompt_id="bad")
    small.send("halfsafe.messages", text=text, messages=messages_in(text))
    small.send("execution_error", **{**error, "exception_message": f"{text}\n"})
    (toast,) = shown()
    assert (toast["summary"], toast["detail"]) == ("Halfsafe: x.safetensors: the file is cut short.", "Get it again.")
    small.evaluate(TAB)
    small.page.wait_for_selector(".hs-sidebar .hs-error")
    small.screenshot(pictures, f"sidebar-error-{cell}")
    missing = "ERROR: VAE is invalid: None\n\nIf the VAE is from a checkpoint loader node your checkpoint does not contain a valid VAE."
    assert "x.safetensors: the file is cut short." in small.page.text_content(".hs-run")
    sampler = small.evaluate("() => String(app.graph.nodes.find((n) => n.type === 'KSampler').id)")
    small.send("execution_start", prompt_id="other")
    small.send(
        "execution_error",
        **{
            **error,
            "prompt_id": "other",
            "node_id": sampler,
            "exception_type": "RuntimeError",
            "exception_message": missing,
        },
    )
    assert len(shown()) == 1
    card = small.page.text_content(".hs-run")
    assert small.page.inner_text(".hs-answer .hs-headline") == "ERROR: VAE is invalid: None"
    assert "KSampler" in card and "does not contain a valid VAE." in card, "the line that helps is the last"
    assert "This workflow has no guard" not in small.page.inner_text(".hs-sidebar"), "none would have helped"


def test_a_run_tells_how_long_loading_took(opened_page: ComfyPage) -> None:
    code = """async () => { const { Timing } = await import("/extensions/Halfsafe-Pack/timing.mjs"), timing = new Timing(), told = [timing.text];
        timing.begin("CLIPTextEncode", 0); timing.begin("UNETLoader", 1000); timing.begin("KSampler", 13000);
        for (const step of [1, 2, 3]) { timing.step(step, 33600 + 400 * step); told.push(timing.text); }
        timing.begin("VAEDecode", 40000);
        return [...told, timing.text]; }"""
    before, first, _, last, ended = opened_page.evaluate(code)
    assert before == "" and first == "12 s in loader nodes; 21 s to the end of the first step"
    assert last == ended == f"{first}, 0.4 s for each later step: the difference is loading"


def test_show_me_opens_five_nodes_and_draws_a_black_and_a_right_picture(
    small: ComfyPage, pictures: Path, cell: str
) -> None:
    workflows = "() => app.extensionManager.workflow.openWorkflows.map((one) => one.path)"
    before, nodes = len(small.evaluate(workflows)), sorted(small.evaluate(TYPES))
    first = small.evaluate("() => app.extensionManager.workflow.activeWorkflow.path")
    small.page.set_viewport_size({"width": 1920, "height": 1080} if small.vue else {"width": 1366, "height": 768})
    small.evaluate(TAB)
    small.page.locator(".hs-sidebar .hs-button", has_text="Show me").click()
    small.page.wait_for_function(
        "() => app.graph.nodes.length === 5 && app.graph.nodes.some((n) => n.title === 'As it is')"
    )
    assert len(small.evaluate(workflows)) == before + 1
    small.settle()
    assert small.evaluate(SEEN) == small.evaluate(SHOWN)
    told = small.record_toasts()
    small.run()
    shown = "() => ['As it is', 'Through Halfsafe'].map((title) => app.nodeOutputs[app.graph.nodes.find((n) => n.title === title).id]?.images?.[0])"
    small.page.wait_for_function(f"() => ({shown})().every(Boolean)")
    black, drawn = (small.server.view(image) for image in small.evaluate(shown))
    assert not shapes.pixels_of(black).any()
    assert told() == [], "the sidebar says it"
    pair = small.page.locator(".hs-answer .hs-pictures figcaption")
    pair.nth(1).wait_for()
    assert pair.all_inner_texts() == ["As it is", "Through Halfsafe"], "what the button promised"
    assert small.page.inner_text(".hs-answer .hs-headline") == "Not black with the guard"
    why = small.page.inner_text(".hs-answer .hs-line")
    assert re.fullmatch(r"Computed in \w+, not in the fp16 that the model was set to\.", why), (
        "why nothing was repaired"
    )
    assert shapes.read_picture(drawn) == shapes.Shape("red", "heart")
    assert small.evaluate("() => app.canvas.ds.scale * 300 / innerWidth") > 0.19, "the pictures are large on any page"
    small.screenshot(pictures, f"show-me-{cell}")
    assert min(small.evaluate(ROOM_BESIDE_BADGES)) > 70, "each badge keeps to its node, with the pack's name before it"
    small.evaluate(TAB)
    kept = "(path) => app.extensionManager.workflow.getWorkflowByPath(path).activeState.nodes.map((n) => n.type)"
    assert sorted(small.evaluate(kept, first)) == nodes


def test_the_sidebar_greets_and_guards_and_measures_the_open_graph(small: ComfyPage, pictures: Path, cell: str) -> None:
    before, links, view = sorted(small.evaluate(TYPES)), small.evaluate(LINKS), small.evaluate(VIEW)
    small.evaluate(TAB)
    small.page.wait_for_function(
        "() => document.querySelector('.hs-sidebar .hs-device')?.textContent.includes('CPU computes in')"
    )
    small.screenshot(pictures, f"sidebar-greeting-{cell}")
    for name, added in (
        ("Guard this workflow", ["HalfsafeAutoPrecision"]),
        ("Measure my card", ["HalfsafeMeasurePrecisions", "PreviewImage"]),
    ):
        small.page.locator(".hs-sidebar .hs-actions .hs-button", has_text=name).click()
        assert sorted(small.evaluate(TYPES)) == sorted([*before, *added])
        small.settle()  # what the graph's change draws
        assert re.search(
            "added: (run the workflow|press the blue arrow)", small.page.inner_text(".hs-sidebar [role=status]")
        )
        assert small.evaluate(SEEN) == small.evaluate(SHOWN) and small.evaluate(VIEW)[1] >= 0.5, name
        assert small.evaluate("() => [...app.canvas.selectedItems].map((n) => n.type)") == added
        if name == "Guard this workflow":
            linked = small.evaluate("""() => { const one = app.graph.nodes.find((n) => n.type === "HalfsafeAutoPrecision");
                return [one.inputs.filter((i) => i.link !== null).map((i) => i.name), one.outputs.map((o) => o.links?.length ?? 0)]; }""")
            assert linked == [["model", "clip", "vae"], [1, 2, 1, 0]]
            small.page.locator(".hs-sidebar .hs-button", has_text="Take the guard out").click()
            assert sorted(small.evaluate(LINKS)) == sorted(links) and small.found(VIEW, view) == view
        else:
            assert small.evaluate("() => app.graph.nodes.at(-1).size[0]") >= 500, "a chart is read"
            small.evaluate(UNDO)
        small.page.wait_for_function("(count) => app.graph.nodes.length === count", arg=len(before))
    small.evaluate(TAB)


def test_a_node_in_a_subgraph_is_in_sight_and_the_view_before_comes_back(small: ComfyPage) -> None:
    small.evaluate(SUBGRAPH)
    before = small.evaluate(VIEW)
    assert small.evaluate(GUARD).endswith(": run the workflow. The page now shows the subgraph Drawing.")
    small.settle()
    assert small.evaluate(SEEN) == small.evaluate(SHOWN) and small.evaluate(VIEW)[1] >= 0.5
    small.evaluate(GUARD.replace("guardW", "unguardW"))
    assert small.evaluate(VIEW) == before


IN_A_COLUMN = """() => { const of = (type) => app.graph.nodes.find((n) => n.type === type), dtype = LiteGraph.createNode("ModelComputeDtype"), sampler = of("KSampler");
    app.graph.add(dtype); dtype.pos = [sampler.pos[0] - 240, -200]; of("UNETLoader").connect(0, dtype, 0); dtype.connect(0, sampler, 0); const latent = of("EmptyHunyuanLatentVideo"); latent.pos = [420, 520]; }"""
WIRES = """() => { const { nodes } = app.graph, of = (type) => nodes.find((n) => n.type === type), one = of("HalfsafeAutoPrecision"), [dtype, sampler] = ["ModelComputeDtype", "KSampler"].map(of), title = LiteGraph.NODE_TITLE_HEIGHT;
    const box = ({ pos, size }) => [pos[0], pos[1] - title, pos[0] + size[0], pos[1] + size[1]], apart = ([l, t, r, b], [left, top, right, bottom]) => [Math.max(l - right, left - r), Math.max(t - bottom, top - b)];
    return [box(one)[3] > box(dtype)[1], Math.min(...[dtype, sampler].map((n) => Math.max(...apart(box(one), box(n))))), nodes.filter((n) => n !== one && Math.max(...apart(box(one), box(n))) < 0).map((n) => n.type)]; }"""


def test_a_guard_of_a_sampler_below_another_node_stands_beside_one_of_both(opened_page: ComfyPage) -> None:
    """As in ComfyUI's templates with ModelSamplingAuraFlow: a guard above that node has all of its wires across the graph."""
    opened_page.evaluate(PLAIN)
    opened_page.evaluate(IN_A_COLUMN)
    opened_page.evaluate(GUARD)
    opened_page.settle()
    is_not_above, gap, meets = opened_page.evaluate(WIRES)
    assert is_not_above and 0 <= gap <= 20 and meets == [], (is_not_above, gap, meets)


@pytest.mark.parametrize(("layout", "argument", "expected"), [
    ("() => {}", None, {"between": True, "below": True}),
    (ROOM, False, {"between": True, "beside": True}),
    (ROOM, True, {"between": True, "beside": True}),
    (BEFORE, None, {"below": True}),
    (ON_TOP, None, {"below": False}),
], ids=["narrow", "wide", "beside a group", "sampler first", "both on top"])  # fmt: skip
def test_the_node_is_put_where_there_is_room(small: ComfyPage, layout: str, argument: object, expected: dict) -> None:
    small.evaluate(layout, argument)
    small.evaluate("() => { const { ds } = app.canvas; ds.scale = 0.6; ds.offset[0] = ds.offset[1] = 200; }")
    small.evaluate(GUARD)
    assert layout != "() => {}" or small.evaluate(VIEW)[1:] == [0.6, 200, 200], "all is in sight as it was"
    if small.vue:
        small.page.wait_for_function("() => document.querySelectorAll('.lg-node .hs-panel').length >= 1")
    small.settle()
    place = small.evaluate(PLACE)
    assert place["meets"] == [] and {name: place[name] for name in expected} == expected, place
    small.evaluate(UNDO)
    small.page.wait_for_function("() => app.graph.nodes.every((n) => n.type !== 'HalfsafeAutoPrecision')")
