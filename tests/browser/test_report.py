"""A real run in the page: the report on its node, badges, rules, themes and widths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.report.view import rules_text
from setup.comfyui_server import Server

WORKFLOW = Path(__file__).absolute().parents[2] / "workflows" / "Halfsafe 3 - Half the memory.json"
ROWS = ".hs-table tbody tr:not(.hs-reason)"
CELLS = """() => [...document.querySelectorAll(".hs-table tbody tr:not(.hs-reason)")].map((row) => ({
    name: row.querySelector("bdi").textContent, times: Number(row.querySelector(".hs-times")?.textContent.slice(1) ?? 1),
    storage: row.querySelector('[data-column="storage"]').textContent, mode: row.querySelector('[data-column="mode"]').textContent.replace("\u2191", "") }))"""


@pytest.fixture(scope="module")
def small_workflow(opened_page) -> dict:
    """The shared workflow with the small models, as the page saves it."""
    comfy = opened_page
    comfy.begin()
    comfy.load(json.loads(WORKFLOW.read_text(encoding="utf-8")))
    comfy.make_small()
    return comfy.saved()


@pytest.fixture(scope="module")
def outputs(opened_page, small_workflow: dict, server: Server) -> dict[str, dict]:
    """What the server sent for each node of a run of that workflow, read from its history rather than from the page."""
    opened_page.load(small_workflow)
    opened_page.run()
    history = json.loads(server.get("/history?max_items=1"))
    return next(iter(history.values()))["outputs"]


@pytest.fixture
def ran(opened_page, small_workflow: dict, outputs: dict[str, dict]) -> ComfyPage:
    """The page after that run."""
    opened_page.load(small_workflow)
    opened_page.show(outputs)
    return opened_page


@pytest.fixture(scope="module")
def report(outputs: dict[str, dict]) -> dict:
    """The report of that run."""
    return json.loads(next(output["halfsafe_report"][0] for output in outputs.values() if "halfsafe_report" in output))


@pytest.mark.drawn
def test_the_table_has_a_row_for_every_layer(ran: ComfyPage, report: dict, pictures: Path, cell: str) -> None:
    ran.zoom_to("HalfsafeReport", 560, 640)
    ran.screenshot(pictures, f"report-dark-{cell}")
    rows = ran.evaluate(CELLS)
    assert sum(row["times"] for row in rows) == len(report["layers"]) > 30
    shown = {(row["storage"], row["mode"]) for row in rows}
    assert shown == {(layer["storage"], layer["mode"]) for layer in report["layers"]}
    assert any(storage == "fp8_e4m3fn" for storage, _ in shown)
    assert "patch_embedding" in {row["name"] for row in rows}
    assert report["model"]["class"] in ran.page.inner_text(".hs-title") and "computed" in ran.page.inner_text(
        ".hs-head"
    )
    ran.evaluate(
        "() => { const node = app.graph.nodes.find((n) => n.type === 'HalfsafeReport'); node.disconnectInput(node.inputs.findIndex((i) => i.name === 'after')); }"
    )
    ran.show_report(report)
    assert "planned" in ran.page.inner_text(".hs-head"), "nothing tells that the model ran before this report"


@pytest.mark.drawn
def test_badges_say_what_the_loaders_made(ran: ComfyPage, report: dict) -> None:
    badges = ran.badges()
    storages, mode = badges["HalfsafeLoadDiffusionModel"].split(" \u00b7 ")
    assert storages.startswith("fp8_e4m3fn") and {*storages.split(" + ")} <= {
        layer["storage"] for layer in report["layers"]
    }
    assert mode == report["layers"][-1]["mode"]
    assert badges["HalfsafeLoadVAE"] in ("fp32", "bf16")
    assert badges["HalfsafeLoadCLIP"] in ("fp16", "fp32")
    if ran.vue:
        text = badges["HalfsafeLoadDiffusionModel"]
        ran.page.wait_for_function(
            "(text) => [...document.querySelectorAll('.lg-node')].some((n) => n.innerText.includes(text))", arg=text
        )


def test_badges_can_be_turned_off(ran: ComfyPage) -> None:
    text = ran.badges()["HalfsafeLoadDiffusionModel"]
    ran.set("halfsafe.badges", False)
    assert not any(ran.badges().values())
    if ran.vue:
        ran.page.wait_for_function(
            "(text) => ![...document.querySelectorAll('.lg-node')].some((n) => n.innerText.includes(text))", arg=text
        )
    ran.set("halfsafe.badges", True)
    assert ran.badges()["HalfsafeLoadDiffusionModel"]


def test_columns_sort_and_text_filters(ran: ComfyPage) -> None:
    ran.zoom_to("HalfsafeReport", 560, 640)
    ran.page.click('.hs-table th[data-column="name"] button')
    names = [row["name"] for row in ran.evaluate(CELLS)]
    assert names == sorted(names, key=str.lower) and names[0].startswith("blocks.")
    ran.page.click('.hs-table th[data-column="name"] button')
    assert [row["name"] for row in ran.evaluate(CELLS)] == names[::-1]
    assert ran.page.get_attribute('.hs-table th[data-column="name"]', "aria-sort") == "descending"
    ran.page.click('.hs-table th[data-column="name"] button')
    ran.page.fill(".hs-filter", "ffn fp8")
    rows = ran.evaluate(CELLS)
    assert rows and all("ffn" in row["name"] and row["storage"].startswith("fp8") for row in rows)
    ran.page.fill(".hs-filter", "no such layer")
    assert "No layer matches" in ran.page.inner_text(".hs-table")


def test_rows_open_by_keyboard_and_say_why(ran: ComfyPage, report: dict) -> None:
    ran.zoom_to("HalfsafeReport", 560, 640)
    button = ran.page.locator("button.hs-name", has_text="ffn.0").first
    button.focus()
    ran.page.keyboard.press("Enter")
    reason = next(layer["reason"] for layer in report["layers"] if layer["name"] == "blocks.0.ffn.0")
    assert ran.page.inner_text(".hs-reason").strip() == (reason or "The model's own dtype.")
    assert {"blocks.0.ffn.0", "blocks.1.ffn.0"} <= {row["name"] for row in ran.evaluate(CELLS)}
    ran.page.keyboard.press("Enter")
    assert ran.page.locator(".hs-reason").count() == 0


@pytest.mark.drawn
@pytest.mark.parametrize("width", [330, 900])
def test_long_names_are_whole(ran: ComfyPage, report: dict, width: int, pictures: Path, cell: str) -> None:
    rows = [
        {**row, "name": f"transformer_blocks.12.audio_to_video_attention.{row['name']}"}
        for row in report["view"]["rows"]
    ]
    ran.show_report({**report, "view": {**report["view"], "rows": rows}})
    ran.zoom_to("HalfsafeReport", width, 640)
    ran.screenshot(pictures, f"names-{width}-{cell}")
    names = ran.evaluate("""() => [...document.querySelectorAll(".hs-table bdi")].map((name) => {
        const next = [...name.closest("tr").cells].slice(1).find((cell) => cell.offsetWidth), box = name.getBoundingClientRect();
        const below = next.getBoundingClientRect().top >= box.bottom - 1;
        return { name: name.textContent, whole: name.scrollWidth <= name.clientWidth, apart: below || box.right <= next.getBoundingClientRect().left }; })""")
    assert [name["name"] for name in names] == [row["name"] for row in rows]
    assert [name for name in names if not (name["whole"] and name["apart"])] == []


@pytest.mark.drawn
def test_nothing_overflows_at_320_pixels(ran: ComfyPage, pictures: Path, cell: str) -> None:
    ran.zoom_to("HalfsafeReport", 320, 640)
    ran.screenshot(pictures, f"report-320-{cell}")
    wide = """() => { const panel = document.querySelector(".hs-scroll"), right = panel.getBoundingClientRect().right;
        return [panel, ...panel.querySelectorAll("*")].filter((e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX === "visible" && e.clientWidth
            || e.getBoundingClientRect().right > right + 1).map((e) => [e.outerHTML.slice(0, 80), e.getBoundingClientRect().right, right]); }"""
    assert ran.found(wide, []) == []
    assert ran.evaluate(
        "() => { const p = document.querySelector('.hs-scroll'); return p.scrollWidth <= p.clientWidth; }"
    )
    assert ran.evaluate("() => document.querySelector('.hs-panel').getBoundingClientRect().width") <= 320


@pytest.mark.drawn
def test_a_node_open_in_the_side_panel_keeps_its_reports_width(ran: ComfyPage) -> None:
    """ComfyUI gives a widget that it shows there too the side panel's width, on the node as well."""
    ran.set("Comfy.RightSidePanel.IsOpen", True)
    title = ran.evaluate(
        "() => { const node = app.graph.nodes.find((n) => n.type === 'HalfsafeReport'); app.canvas.selectNode(node); return node.title; }"
    )
    ran.page.locator('[data-testid="properties-panel"]', has_text=title).wait_for()
    ran.zoom_to("HalfsafeReport", 560, 640)
    assert ran.found("() => document.querySelector('.hs-panel').getBoundingClientRect().width > 500", True)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_in_each_theme(ran: ComfyPage, theme: str, pictures: Path, cell: str) -> None:
    ran.set("Comfy.ColorPalette", theme)
    ran.zoom_to("HalfsafeReport", 560, 640)
    ran.screenshot(pictures, f"report-{theme}-{cell}")
    worst = ran.evaluate(CONTRAST)
    assert worst["ratio"] >= 4.5, worst


def test_guards_of_encoders_and_control_nets_are_on_the_report(
    ran: ComfyPage, report: dict, pictures: Path, cell: str
) -> None:
    vae = {
        "node": "8",
        "kind": "VAE",
        "verdict": "recovered",
        "messages": ["VAE decode: repeated in bf16: finite."],
        "advice": "Keep it so.",
        "calls": 3,
    }
    control = {
        "file": "depth.safetensors",
        "class": "ControlNet",
        "calls": 4,
        "layers": report["layers"][:2],
        "notes": ["Stored in fp8."],
    }
    ran.show_report({**report, "encoders": [vae, {**vae, "node": "9", "verdict": "clean"}], "control_nets": [control]})
    panel = ran.page.locator(".hs-panel")
    assert "VAE (node 8) recovered VAE decode: repeated in bf16: finite. Keep it so." in " ".join(
        panel.inner_text().split()
    )
    assert "VAE (node 9) clean" in " ".join(panel.inner_text().split())
    panel.locator("summary", has_text="ControlNets (1)").click()
    assert "depth.safetensors: ControlNet, 4 calls, 2 layers. Stored in fp8." in panel.inner_text()
    ran.screenshot(pictures, f"encoders-{cell}")
    assert ran.evaluate(CONTRAST)["ratio"] >= 4.5
    ran.show_report({**report, "encoders": [{**vae, "verdict": "clean"}]})
    assert "VAE (node" not in panel.inner_text() and "Guards of VAEs and text encoders (1)" in panel.inner_text()


def test_copied_rules_are_rules(ran: ComfyPage, report: dict) -> None:
    changed = {
        **report,
        "layers": [dict(layer) for layer in report["layers"]],
        "guard": {**report["guard"], "verdict": "recovered"},
    }
    for layer in changed["layers"]:
        if layer["name"] in ("blocks.0.self_attn.q", "blocks.1.self_attn.q", "blocks.1.ffn.0"):
            layer["mode"] = "fp16_wide"
    changed["guard"]["escalations"] = {"blocks.0.ffn.2": "fp32", "residual stream": "fp32"}
    changed["guard"]["rules"] = "* stream=fp32\nblocks.0.ffn.2 compute=fp32 stream=fp32"
    changed["rules"] = rules_text(changed, fixed=["patch_embedding"])
    ran.show_report(changed)
    ran.zoom_to("HalfsafeReport", 560, 640)
    ran.page.click(".hs-button:text-is('Copy as rules')")
    ran.page.wait_for_function("() => document.querySelector('.hs-copied').textContent")
    rules = {
        rule.pattern: dict(rule.settings)
        for rule in rules_from(ran.evaluate("() => navigator.clipboard.readText()")).own
    }
    assert rules == {
        "blocks.*.self_attn.q": {"compute": "fp16_safe"},
        "blocks.1.ffn.0": {"compute": "fp16_safe"},
        "*": {"stream": "fp32"},
        "blocks.0.ffn.2": {"compute": "fp32", "stream": "fp32"},
    }
    ran.show_report(report)
    assert ran.page.locator(".hs-button:text-is('Copy as rules')").is_disabled(), "all layers run alike"


def test_swatches_have_the_colours_of_the_report(ran: ComfyPage, report: dict) -> None:
    mode = report["view"]["computed"][0]["name"]
    wanted = [int(report["modes"][mode]["colour"][place : place + 2], 16) for place in (1, 3, 5)]
    found = ran.evaluate("""() => [...document.querySelectorAll('.hs-panel td[data-column="mode"] .hs-swatch')]
        .map((swatch) => [swatch.parentElement.textContent, getComputedStyle(swatch).backgroundColor])""")
    assert (mode, "rgb({}, {}, {})".format(*wanted)) in {(name, colour) for name, colour in found}
    assert (
        ran.evaluate("() => getComputedStyle(document.querySelector('.hs-panel .hs-bar > span')).backgroundColor")
        != "rgba(0, 0, 0, 0)"
    )


def test_the_report_survives_a_cached_run_and_another_workflow(
    ran: ComfyPage, small_workflow: dict, report: dict
) -> None:
    rows = ran.evaluate(CELLS)
    ran.page.reload()
    ran.wait_ready()
    ran.load(small_workflow)
    assert ran.page.locator(ROWS).count() == 0
    ran.run()
    assert ran.evaluate(CELLS) == rows
    assert ran.badges()["HalfsafeLoadDiffusionModel"], "a cached loader's badge is sent again"


def test_the_report_comes_back_with_its_workflow(ran: ComfyPage) -> None:
    rows = ran.evaluate(CELLS)
    ran.evaluate("async () => { await app.extensionManager.command.execute('Comfy.NewBlankWorkflow'); }")
    ran.page.wait_for_function("() => app.graph.nodes.every((n) => n.type !== 'HalfsafeReport')")
    assert ran.page.locator(ROWS).count() == 0
    ran.evaluate("async () => { await app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow'); }")
    ran.page.wait_for_function("() => app.graph.nodes.some((n) => n.type === 'HalfsafeReport')")
    ran.page.wait_for_selector(ROWS, state="attached")
    assert ran.evaluate(CELLS) == rows
    assert ran.badges()["HalfsafeLoadDiffusionModel"]


def test_the_same_workflow_opened_anew_shows_its_own_run(ran: ComfyPage, small_workflow: dict) -> None:
    ran.evaluate("async (w) => { await app.loadGraphData(w); await app.loadGraphData(w); }", small_workflow)
    ran.run()
    ran.page.wait_for_selector(ROWS, state="attached")


@pytest.mark.drawn
def test_deleted_report_leaves_nothing_behind(ran: ComfyPage) -> None:
    ran.evaluate("() => app.graph.remove(app.graph.nodes.find((n) => n.type === 'HalfsafeReport'))")
    ran.page.wait_for_function("() => !document.querySelector('.hs-panel')?.isConnected")
    ran.send_guard(message="after the end")
    assert ran.page.locator(".hs-panel").count() == 0


CONTRAST = """() => {
    const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); const s = c.startsWith("color(") ? 255 : 1;
        return { r: m[0] * s, g: m[1] * s, b: m[2] * s, a: m[3] ?? 1 }; };
    const over = (top, below) => ({ r: top.r * top.a + below.r * (1 - top.a), g: top.g * top.a + below.g * (1 - top.a), b: top.b * top.a + below.b * (1 - top.a), a: 1 });
    const light = ({ r, g, b }) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => { const layers = []; for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); layers.push(c); if (c.a === 1) break; }
        return layers.reverse().reduce((below, top) => over(top, below)); };
    let worst = { ratio: 99 };
    for (const e of document.querySelectorAll(".hs-panel *")) {
        if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || e.closest(":disabled") || e.closest("[hidden]")) continue;
        const below = ground(e), text = over(parse(getComputedStyle(e).color), below);
        const [a, b] = [light(below), light(text)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < worst.ratio) worst = { ratio, text: e.textContent.slice(0, 40), of: e.className, color: getComputedStyle(e).color };
    }
    return worst; }"""
