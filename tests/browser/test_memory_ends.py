"""What *Halve the memory* ends in where it cannot halve, or where it gains time: something to press; and files that are missing, by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser.comfy_page import ComfyPage
from browser.test_measure import SMALL, draw, of_class, prompt, undone
from browser.test_memory import TOGGLE_TAB, quantize

if TYPE_CHECKING:
    from playwright.sync_api import Route

LIBRARY = """const memory = await import("/extensions/Halfsafe-Pack/memory.mjs"), missing = await import("/extensions/Halfsafe-Pack/missing.mjs"), { api } = await import("/scripts/api.js");
    const { allNodes } = await import("/extensions/Halfsafe-Pack/graph.mjs"), root = () => app.graph.rootGraph ?? app.graph;
    const missingCard = async () => { const lists = new Map(); await missing.askForMissing(api, lists, allNodes(app)); return missing.missingCard(missing.missingFiles(lists, allNodes(app))); };
    const halve = async () => { const told = await memory.halveMemory(app, api); window.choices = told.choices ?? []; return { ...told, choices: window.choices.map(({ name }) => name) }; };
    const press = async (name) => { const told = await window.choices.find((one) => one.name.startsWith(name)).act(); return told.headline ?? told; };"""
VIDEO = """const fp8 = app.graph.nodes.find(({ type }) => type === "UNETLoader"); fp8.widgets[0].value = "wan_fp8.safetensors"; set(video, "width", 832); set(video, "height", 480); set(video, "length", 81);"""
ON_FACE = """const holder = app.graph.convertToSubgraph(new Set([video])), inner = holder.subgraph.nodes[0];
    for (const name of ["width", "height", "length"]) { const slot = inner.inputs.findIndex((input) => input.name === name); holder.subgraph.addInput(name === "length" ? "frames" : name, "INT").connect(inner.inputs[slot], inner); }
    for (const widget of holder.node.widgets ?? []) { const size = { width: 832, height: 480, frames: 81 }[widget.name]; if (size) widget.value = size; }"""
"""The size is set on the face of a subgraph, as in ComfyUI's templates; there the frames have another name."""
BY_A_NODE = (
    """const frames = put("PrimitiveInt", 0, 1500); set(frames, "value", 81); wire(frames, "INT", video, "length");"""
)
SIZES = {"on its node": "", "on a subgraph's face": ON_FACE}


def run(comfy: ComfyPage, code: str) -> object:
    return comfy.evaluate(f"async () => {{ {LIBRARY} {code} }}")


def size_of(steps: dict) -> list[int]:
    (given,) = of_class(steps, "EmptyHunyuanLatentVideo")
    return [given[name] for name in ("width", "height", "length")]


@pytest.mark.parametrize("place", SIZES)
def test_the_owner_of_a_file_in_8_bits_is_told_in_two_lines_what_can_be_pressed(
    comfy: ComfyPage, small_models: Path, place: str
) -> None:
    """By ComfyUI's own estimate; each size in one step of undo."""
    quantize(small_models)
    draw(comfy, SMALL + VIDEO + SIZES[place] + """set(clip, "device", "cpu");""")
    comfy.load(comfy.saved())
    before = prompt(comfy)
    assert size_of(before) == [832, 480, 81]
    told = run(comfy, "return halve();")
    assert told["headline"] == "Already in 8 bits" and re.fullmatch(
        r"Update ComfyUI to 0\.31\.0 for 4 bits \(w4a8\): 4\.\d\sMiB \(-1\d %\)\.", told["line"]
    ), told
    assert [re.sub(r"[\d.]+\s[MG]iB", "_", name) for name in told["choices"]] == ["41 frames: -_", "592 x 336: -_"]
    words = " ".join([told["headline"], told["line"], *told["choices"]]).replace("\u00a0", " ").split()
    assert len(words) <= 25, words
    for name, size in (("41 frames", [832, 480, 41]), ("592 x 336", [592, 336, 81])):
        assert name in run(comfy, f"return press({json.dumps(name)});")
        assert size_of(prompt(comfy)) == size
        assert undone(comfy) == before


@pytest.mark.once  # what is offered
def test_a_size_that_another_node_gives_is_not_pressed(comfy: ComfyPage, small_models: Path) -> None:
    quantize(small_models)
    draw(comfy, SMALL + VIDEO + BY_A_NODE)
    told = run(comfy, "return halve();")
    assert "41 frames" not in " ".join(told["choices"]), told["choices"]


def on_rtx_30(route: Route) -> None:
    """Answer as on a device where int8 gains."""
    answer = route.fetch()
    told = answer.json() | {"storage": "int8", "told": "int8 ran at 1.84 times the speed of 16 bit (A10G 1.84)."}
    route.fulfill(response=answer, json=told)


@pytest.mark.once  # words, and one press
def test_too_slow_ends_in_the_times_of_others_and_in_a_measurement(comfy: ComfyPage) -> None:
    draw(comfy, SMALL)
    assert run(comfy, "return (await halve()).choices;") == [], "this CPU gains nothing"
    draw(comfy, SMALL)
    comfy.page.route("**/halfsafe/halving", on_rtx_30)
    told = run(comfy, "return halve();")
    assert (told["line"], told["choices"]) == ("int8 is faster on cards like this one.", ["Measure my card"])
    assert told["why"][0] == "int8 ran at 1.84 times the speed of 16 bit (A10G 1.84)."
    run(comfy, """return press("Measure my card");""")
    assert len(of_class(prompt(comfy), "HalfsafeMeasurePrecisions")) == 1


ABSENT = """set(clip, "clip_name", "absent.safetensors");"""
MEANT = """app.graph.nodes.find(({ type }) => type === "CLIPLoader").properties.models = [{ name: "absent.safetensors", directory: "text_encoders", url: "https://example.org/absent.safetensors" }];"""
FACE = """const holder = app.graph.convertToSubgraph(new Set([clip])), inner = holder.subgraph.nodes[0]; holder.subgraph.addInput("encoder", "COMBO").connect(inner.inputs.find(({ name }) => name === "clip_name"), inner);
    holder.node.widgets.find(({ name }) => name === "encoder").value = "absent.safetensors"; inner.widgets.find(({ name }) => name === "clip_name").value = "clip_l.safetensors";"""
MISSING = {"a loader's": ABSENT, "a template's": ABSENT + MEANT, "on a subgraph's face": FACE}


@pytest.mark.parametrize("whose", MISSING)
def test_a_missing_file_is_named_with_its_loader_before_a_run(comfy: ComfyPage, whose: str) -> None:
    draw(comfy, SMALL + MISSING[whose])
    told = run(comfy, "return missingCard();")
    assert told["headline"] == "absent.safetensors is missing"
    if whose != "on a subgraph's face":
        assert told["line"] == "Load CLIP looks for it in models/text_encoders."
    assert told["why"] == (
        ["This workflow means the one at https://example.org/absent.safetensors"] if "template" in whose else []
    )
    fixed = """for (const node of allNodes(app)) for (const widget of node.widgets ?? []) if (widget.value === "absent.safetensors") widget.value = "clip_l.safetensors"; return missingCard();"""
    assert run(comfy, fixed) is None


@pytest.mark.once  # words; what is bypassed or muted does not run
def test_of_nodes_that_do_not_run_no_file_is_missing(comfy: ComfyPage) -> None:
    draw(comfy, SMALL + ABSENT)
    for mode in (2, 4):
        bypass = f"""app.graph.nodes.find(({{ type }}) => type === "CLIPLoader").mode = {mode};"""
        assert run(comfy, f"{bypass} return missingCard();") is None


LISTED = "() => app.graph.nodes.flatMap(({ widgets }) => widgets ?? []).find(({ name }) => name === 'vae_name').options.values"


@pytest.mark.once  # what the server lists
def test_a_file_that_came_after_the_page_was_opened_is_not_missing(comfy: ComfyPage, small_models: Path) -> None:
    """The page keeps its lists until it is asked to refresh them; what the server answered holds for five seconds."""
    draw(comfy, SMALL + """set(vae, "vae_name", "late.safetensors");""")
    assert "late.safetensors" not in comfy.evaluate(LISTED), "the page's own list"
    late = small_models / "vae" / "late.safetensors"
    late.write_bytes(b"")
    try:
        assert run(comfy, "return missingCard();") is None
    finally:
        late.unlink()


def test_a_file_that_is_gone_since_the_page_was_opened_is_named_once_the_run_is_refused(comfy: ComfyPage, small_models: Path) -> None:  # fmt: skip
    """The page's own list has it yet: what ComfyUI answers to the run names it."""
    fading = small_models / "vae" / "fading.safetensors"
    fading.write_bytes(b"")
    comfy.evaluate("async () => { await app.refreshComboInNodes(); }")
    draw(comfy, SMALL + """set(vae, "vae_name", "fading.safetensors");""")
    assert "fading.safetensors" in comfy.evaluate(LISTED), "the page's own list"
    fading.unlink()
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.wait_for_selector(".hs-actions button")
    comfy.evaluate("async () => { await app.queuePrompt(0, 1); }")
    comfy.page.locator(".hs-answer .hs-headline", has_text="fading.safetensors is missing").wait_for()
    assert "Nothing has begun yet." not in comfy.page.inner_text(".hs-sidebar")
    comfy.evaluate(TOGGLE_TAB)


def test_a_refused_run_names_the_file_in_the_sidebar(comfy: ComfyPage) -> None:
    """ComfyUI's own message says how many errors it found."""
    draw(comfy, SMALL + ABSENT + """set(vae, "vae_name", "gone.safetensors");""")
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.locator(".hs-sidebar", has_text="2 files are missing").wait_for()
    comfy.evaluate("async () => { await app.queuePrompt(0, 1); }")
    comfy.settle()
    assert "Nothing has begun yet." not in comfy.page.inner_text(".hs-sidebar"), "the page knows why"
    assert comfy.page.locator(".hs-first").count() == 0, "no button runs what has no file"
    said = comfy.page.locator(".hs-sidebar").evaluate("(element) => element.textContent")
    for line in (
        "Load CLIP: absent.safetensors, in models/text_encoders.",
        "Load VAE: gone.safetensors, in models/vae.",
    ):
        assert line in said, said
    comfy.evaluate(TOGGLE_TAB)
