"""*Halve the memory*: ComfyUI's loaders become the pack's in their places, on ComfyUI's own templates and on awkward graphs, and back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser.comfy_page import ComfyPage
from browser.graph_walk import HIDE
from browser.templates import each_kind, templates
from browser.templates import loaders_in as kinds_of_loaders
from browser.test_measure import SMALL, draw
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file

if TYPE_CHECKING:
    from playwright.sync_api import Route

NESTED = "flux_depth_lora_example"
FILES = {
    "UNETLoader": ("HalfsafeLoadDiffusionModel", {"unet_name": "model_name"}),
    "CheckpointLoaderSimple": ("HalfsafeLoadCheckpoint", {"ckpt_name": "ckpt_name"}),
    "ControlNetLoader": ("HalfsafeLoadControlNet", {"control_net_name": "control_net_name"}),
    "CLIPLoader": ("HalfsafeLoadCLIP", {"clip_name": "clip_name1", "type": "type"}),
    "DualCLIPLoader": ("HalfsafeLoadCLIP", {"clip_name1": "clip_name1", "clip_name2": "clip_name2", "type": "type"}),
    "QuadrupleCLIPLoader": ("HalfsafeLoadCLIP", {f"clip_name{number}": f"clip_name{number}" for number in (1, 2, 3, 4)}),
}  # fmt: skip
"""A loader of ComfyUI's -> ours, and our names of its inputs that stay."""
PAGE = """const memory = await import("/extensions/Halfsafe-Pack/memory.mjs"), { api } = await import("/scripts/api.js");
    const textOf = (told) => (typeof told === "string" ? told : [told.headline, told.line, ...(told.why ?? [])].filter(Boolean).join(" "));
    const halve = async (only = null) => textOf(await memory.halveMemory(app, api, only));
    const putBack = () => memory.putLoadersBack(app);
    const prompt = async () => (await app.graphToPrompt()).output;
    const undo = () => app.extensionManager.workflow.activeWorkflow.changeTracker.undo();
    const errors = async (prompt) => { const answer = await (await fetch("/prompt", { method: "POST", body: JSON.stringify({ prompt }) })).json();
        return { error: answer.error, nodes: answer.node_errors ?? {} }; };"""
THERE_AND_BACK = f"""async ([workflow, undone]) => {{ {PAGE}
    await app.loadGraphData(workflow, true, true, app.extensionManager.workflow.activeWorkflow);
    const before = await prompt(), said = await halve(), after = await prompt();
    const found = [await errors(before), await errors(after)];
    await (undone ? undo() : putBack());
    return {{ before, said, after, found, back: await prompt() }}; }}"""
AWKWARD = """async () => { app.graph.clear(); app.canvas.ds.reset(); await new Promise(requestAnimationFrame);
    let x = 0;
    const add = (type, values = {}, more = {}) => { const node = LiteGraph.createNode(type); node.pos = [x += 400, 100]; app.graph.add(node);
        for (const widget of node.widgets ?? []) widget.value = values[widget.name] ?? widget.value;
        return Object.assign(node, more); };
    const slot = (node, name) => node.inputs.findIndex((input) => input.name === name);
    const promote = (subgraph, node, name) => subgraph.addInput("file", "COMBO").connect(node.inputs[slot(node, name)], node);
    const plain = add("UNETLoader", { unet_name: "wan.safetensors" }, { title: "The one I named", color: "#223322" });
    for (const use of [add("ModelSamplingSD3"), add("ModelSamplingSD3")]) plain.connect(0, use, 0);
    const below = add("Note"); below.pos = [plain.pos[0], plain.pos[1] + plain.size[1] + 40];
    add("UNETLoader", { unet_name: "wan.safetensors" }, { title: "Bypassed", mode: 4 }).connect(0, add("ModelSamplingSD3"), 0);
    add("UNETLoader", { unet_name: "wan.safetensors", weight_dtype: "fp8_e4m3fn" }, { title: "Fp8" });
    const linked = add("UNETLoader", { unet_name: "wan.safetensors" }, { title: "Linked" });
    add("PrimitiveNode").connect(0, linked, slot(linked, "weight_dtype"));
    add("CLIPLoader", { clip_name: "clip_l.safetensors", type: "sd3", device: "cpu" }, { title: "On the CPU" });
    const inner = add("CLIPLoader", { clip_name: "clip_l.safetensors", type: "sd3" }), text = add("CLIPTextEncode");
    inner.connect(0, text, 0);
    const once = app.graph.convertToSubgraph(new Set([inner, text]));
    promote(once.subgraph, once.subgraph.nodes.find((node) => node.type === "CLIPLoader"), "clip_name");
    const twice = app.graph.convertToSubgraph(new Set([once.node]));
    promote(twice.subgraph, twice.subgraph.nodes[0], "file");
    twice.node.widgets.find((widget) => widget.name === "file").value = "clip_l.safetensors";
    app.canvas.emitBeforeChange(); app.canvas.emitAfterChange(); }"""
LOOKS = """() => Object.fromEntries([app.graph, ...app.graph.subgraphs.values()].flatMap((graph) => graph.nodes).map(({ id, title, color, pos }) => [id, [title, color ?? null, [...pos]]]))"""


def loaders_in(prompt: dict) -> dict[str, str]:
    """Node id -> type, of ComfyUI's loaders in a prompt."""
    return {node_id: node["class_type"] for node_id, node in prompt.items() if node["class_type"] in FILES}


def missing_files(found: dict, prompt: dict, names: bool = False) -> set[tuple] | None:
    """What ComfyUI's validation says of files that are not here, by node and input (of loaders, under our name); None for any other complaint."""
    if found["error"] and found["error"]["type"] != "prompt_outputs_failed_validation":
        return None
    absent = set()
    for node_id, node in found["nodes"].items():
        for error in node["errors"]:
            if error["type"] not in ("value_not_in_list", "custom_validation_failed"):
                return None
            name = error["extra_info"]["input_name"]
            renamed = FILES.get(prompt[node_id]["class_type"], ("", {}))[1]
            absent.add((node_id, renamed.get(name, name), error["type"]))
    return absent


def changes(before: dict, after: dict) -> set[str]:
    """The nodes of a prompt that are not as before."""
    assert before.keys() == after.keys()
    return {
        node_id
        for node_id in before
        if {k: before[node_id][k] for k in ("class_type", "inputs")}
        != {k: after[node_id][k] for k in ("class_type", "inputs")}
    }


def judge(name: str, run: dict) -> None:
    """Only loaders were changed, each into ours with its files; what was done was taken back."""
    before, after = run["before"], run["after"]
    changed = changes(before, after)
    assert changed and changed <= loaders_in(before).keys(), name
    for node_id in changed:
        ours, names = FILES[before[node_id]["class_type"]]
        now = after[node_id]
        assert (
            now["class_type"] == ours
            and now["inputs"]["storage"] == "int8"
            and now["inputs"].get("clip_storage", "int8") == "int8"
        ), (name, now)
        assert {new: now["inputs"][new] for new in names.values()} == {
            new: before[node_id]["inputs"][old] for old, new in names.items()
        }, name
    kept = loaders_in(before).keys() - changed
    assert len(kept) == run["said"].count("its weight_dtype is "), (name, run["said"])
    assert missing_files(run["found"][1], after) == missing_files(run["found"][0], before), name
    assert run["back"] == before, name


def test_on_comfyuis_own_templates_only_loaders_change_and_come_back(unseen: ComfyPage, info: dict) -> None:
    """Each kind of loader, and one that is nested; a third of the templates where nodes are elements of the page."""
    found = templates(info)
    chosen = list({NESTED: found[NESTED], **each_kind(found, kinds_of_loaders)}.items())[:: 3 if unseen.vue else 1]
    done, seen = 0, set()
    for name, workflow in chosen:
        run = unseen.evaluate(THERE_AND_BACK, [workflow, done % 2 == 0])
        loaders = loaders_in(run["before"])
        if not loaders or missing_files(run["found"][0], run["before"]) is None:
            continue  # all bypassed, or of a newer ComfyUI
        judge(name, run)
        seen |= {*loaders.values()}
        done += 1
    assert done > 0.8 * len(chosen) and len(seen) >= (3 if unseen.vue else 5), (done, len(chosen), seen)
    assert unseen.problems == []


CROWDED = (
    "gsl_starter_1_2",
    "image-qwen_image_edit_2511_lora_inflation",
    "sd3.5_large_depth",
    "templates-6-key-frames",
    "video_bernini_r_image_editing",
    "video_ltx2_t2v",
)
"""Templates with nodes beside and below loaders that have no room for wider and higher ones, or whose models need long titles."""
COVERED = f"""async (workflow) => {{ {PAGE}
    const open = (workflow) => app.loadGraphData(workflow, true, true, app.extensionManager.workflow.activeWorkflow);
    const graphs = () => [app.graph, ...app.graph.subgraphs.values()];
    const places = () => graphs().flatMap((graph) => graph.nodes.map(({{ id, pos }}) => [id, ...pos]));
    const between = (a, b, axis, above) => Math.min(a.pos[axis] + a.size[axis], b.pos[axis] + b.size[axis]) - Math.max(a.pos[axis], b.pos[axis]) + above;
    const covered = () => Object.fromEntries(graphs().flatMap(({{ id, nodes }}) => {{ const open = nodes.filter(({{ flags }}) => !flags?.collapsed);
        return open.flatMap((a, place) => open.slice(place + 1).map((b) => [`${{id}}: ${{a.id}} and ${{b.id}}`, [between(a, b, 0, 0), between(a, b, 1, LiteGraph.NODE_TITLE_HEIGHT)]])); }}).filter(([, sides]) => Math.min(...sides) > 0));
    await open(workflow);
    const before = covered(), from = places();
    await (await import("/extensions/Halfsafe-Pack/guard.mjs")).guardWorkflow(app);
    const guarded = places(), said = await halve();
    await open(app.graph.serialize());
    const more = Object.entries(covered()).filter(([pair, sides]) => !before[pair] || sides.some((side, axis) => side > before[pair][axis] + 1));
    await putBack();
    const back = places();
    await (await import("/extensions/Halfsafe-Pack/guard.mjs")).unguardWorkflow(app);
    return {{ said, more, stayed: JSON.stringify(guarded) === JSON.stringify(back), taken_out: JSON.stringify(from) === JSON.stringify(places()) }}; }}"""


@pytest.mark.once  # every size is the graph's own
def test_no_node_covers_another_after_guarding_halving_and_opening_anew(unseen: ComfyPage, info: dict) -> None:
    """ComfyUI makes a node at least as wide as its title when it opens a workflow."""
    every = templates(info)
    unseen.open()  # places are compared to the pixel, and one differed in a page that other tests had used
    unseen.evaluate(HIDE)
    for name in CROWDED:
        found = unseen.evaluate(COVERED, every[name])
        assert "replaced" in found["said"] and found["more"] == [], (name, found)
        assert found["stayed"] and found["taken_out"], (name, "what was moved is not back")


def in_page(comfy: ComfyPage, code: str) -> object:
    return comfy.evaluate(f"async () => {{ {PAGE} {code} }}")


@pytest.fixture
def awkward(comfy: ComfyPage) -> ComfyPage:
    """Loaders with two consumers, bypassed, in fp8, with a linked dtype, on the CPU, and two subgraphs deep with their file on each face."""
    comfy.evaluate(AWKWARD)
    return comfy


def by_title(prompt: dict, title: str) -> dict:
    return next(node for node in prompt.values() if node["_meta"]["title"] == title)


def test_awkward_loaders_are_exchanged_in_place_or_left_out_by_name(awkward: ComfyPage) -> None:
    before, looks = in_page(awkward, "return prompt();"), awkward.evaluate(LOOKS)
    said = in_page(awkward, "return halve();")
    after, now = in_page(awkward, "return prompt();"), awkward.evaluate(LOOKS)
    assert said.startswith("2 loaders were replaced: run the workflow. Update ComfyUI to 0.31.0 for 4 bits (w4a8): 4.")
    assert (
        "Left out: Fp8 (its weight_dtype is fp8_e4m3fn), Linked (its weight_dtype is linked), On the CPU (its device is cpu). "
        "Fewer bits for Fp8 of wan.safetensors, 5."
    ) in said
    changed = changes(before, after)
    assert {after[node_id]["class_type"] for node_id in changed} == {"HalfsafeLoadDiffusionModel", "HalfsafeLoadCLIP"}
    assert by_title(after, "The one I named")["inputs"]["model_name"] == "wan.safetensors"
    assert (
        next(after[node_id]["inputs"]["clip_name1"] for node_id in changed if node_id.count(":") == 2)
        == "clip_l.safetensors"
    )
    awkward.evaluate(
        "() => { for (const node of app.graph.nodes) for (const widget of node.widgets ?? []) if (widget.name === 'file') widget.value = 'other.safetensors'; }"
    )
    assert "other.safetensors" in [
        node["inputs"].get("clip_name1") for node in in_page(awkward, "return prompt();").values()
    ], "the face's file counts"
    note = next(node_id for node_id, (title, _, _) in now.items() if title == "Note")
    ours = {node_id.split(":")[-1] for node_id in changed}
    assert now[note][2][1] > looks[note][2][1], "what the higher node would cover is moved down"
    assert {k: v[1:] for k, v in now.items() if k != note} == {k: v[1:] for k, v in looks.items() if k != note}
    assert {k: v[0] for k, v in now.items() if k not in ours} == {k: v[0] for k, v in looks.items() if k not in ours}
    in_page(awkward, "await undo();")
    assert (in_page(awkward, "return prompt();"), awkward.evaluate(LOOKS)) == (before, looks), "one undo"
    in_page(awkward, "await halve(); await putBack();")
    assert (in_page(awkward, "return prompt();"), awkward.evaluate(LOOKS)) == (before, looks)


def test_a_loaders_context_menu_exchanges_it_alone_and_back(awkward: ComfyPage) -> None:
    before = in_page(awkward, "return prompt();")
    press = """const node = app.graph.nodes.find(({ title }) => title === "The one I named");
        await app.collectNodeMenuItems(node).find((item) => item?.content === "%s").callback(); return prompt();"""
    halved = in_page(awkward, press % "Halve the memory")
    assert [halved[node_id]["_meta"]["title"] for node_id in changes(before, halved)] == ["The one I named"]
    assert in_page(awkward, press % "Put ComfyUI's loader back") == before


@pytest.mark.parametrize("fails", ["LiteGraph.createNode", "app.graph.configure"])
def test_what_fails_midway_leaves_the_graph_as_it_was(awkward: ComfyPage, fails: str) -> None:
    before = in_page(awkward, "return prompt();")
    holder = fails.rpartition(".")[0]
    code = f"""const own = {fails}; let calls = 0; {fails} = function (...given) {{ calls += 1;
        if (calls === ({holder} === app.graph ? 1 : 3)) throw new Error("as asked"); return own.apply(this, given); }};
        try {{ return await halve(); }} finally {{ {fails} = own; }}"""
    said = in_page(awkward, code)
    assert said.startswith("Nothing was changed: ") and in_page(awkward, "return prompt();") == before
    awkward.problems.clear()


RUNNABLE = """async () => { app.graph.clear(); app.canvas.ds.reset(); await new Promise(requestAnimationFrame);
    const [loader, one, report] = ["UNETLoader", "HalfsafeAutoPrecision", "HalfsafeReport"].map((type, place) => { const node = LiteGraph.createNode(type);
        node.pos = [100 + 420 * place, 100]; app.graph.add(node); return node; });
    loader.widgets[0].value = "wan.safetensors";
    loader.connect(0, one, 0); one.connect(0, report, 0);
    app.canvas.emitBeforeChange(); app.canvas.emitAfterChange(); }"""
SEARCH = """(words) => document.querySelector("#vue-app").__vue_app__.config.globalProperties.$pinia._s.get("nodeDef").nodeSearchService
    .searchNode(words).map(({ name }) => name)"""
TOGGLE_TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"


@pytest.mark.once  # a run is the server's; test_sidebar presses the button in each page
def test_a_run_tells_the_bytes_in_a_card_and_a_message(
    comfy: ComfyPage, small_models: Path, pictures: Path, cell: str
) -> None:
    comfy.evaluate(RUNNABLE)
    toasts = comfy.record_toasts()
    comfy.run()
    assert toasts() == []
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.locator(".hs-sidebar button", has_text="Halve the memory").click()
    comfy.page.locator(".hs-sidebar", has_text="1 loader was replaced: run the workflow.").wait_for()
    comfy.run()
    card = comfy.page.locator(".hs-answer .hs-number", has_text=" \u2192 5.")
    card.wait_for()
    told = comfy.page.text_content(".hs-run .hs-why")
    numbers = sum(
        tensor.numel() for tensor in load_file(small_models / "diffusion_models" / "wan.safetensors").values()
    )
    assert (
        f"{2 * numbers / 2**20:.2f} MiB -> 5." in told
        and "Kept in bf16" in told
        and "text and caption projection: 2.12 MiB" in told
    )
    assert toasts() == [], "the sidebar says it"
    comfy.screenshot(pictures, f"halved-{cell}")
    comfy.page.locator(".hs-sidebar button", has_text="Put ComfyUI's loaders back").click()
    comfy.page.locator(".hs-sidebar", has_text="ComfyUI's loader was restored.").wait_for()


IN_FP8 = """() => { for (const node of app.graph.nodes) for (const widget of node.widgets ?? []) if (widget.name === "unet_name") widget.value = "wan_fp8.safetensors"; }"""


def quantize(small_models: Path) -> None:
    """Put the small Wan in fp8 beside it, as the files of ComfyUI's templates are."""
    folder = small_models / "diffusion_models"
    if not (folder / "wan_fp8.safetensors").exists():
        convert_file(folder / "wan.safetensors", folder / "wan_fp8.safetensors", "fp8_e4m3fn", rules_from())


def test_a_file_in_8_bits_is_told_what_is_left_with_its_bytes(
    comfy: ComfyPage, small_models: Path, pictures: Path, cell: str
) -> None:
    """The owner of a file in fp8: this ComfyUI runs no fewer bits, a later one does."""
    quantize(small_models)
    draw(comfy, SMALL + """set(video, "width", 832); set(video, "height", 480); set(video, "length", 81);""")
    comfy.evaluate(IN_FP8)
    before = in_page(comfy, "return prompt();")
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.locator(".hs-sidebar button", has_text="Halve the memory").click()
    comfy.page.locator("[role=status]", has_text="1 loader was replaced").wait_for()
    said = comfy.page.text_content("[role=status]").replace("\u00a0", " ")
    after = in_page(comfy, "return prompt();")
    assert {before[node]["class_type"] for node in changes(before, after)} == {"CLIPLoader"}, "the encoder is in 16 bit"
    assert "Left out: Load Diffusion Model (its weights are in 8 bits or fewer already)." in said
    assert re.search(
        r"Fewer bits for Load Diffusion Model of wan_fp8\.safetensors, 5\.\d MiB now: w6a8 [45]\.\d MiB \(from ComfyUI 0\.38\.0 on\), w4a8 4\.\d MiB \(from ComfyUI 0\.31\.0 on\)\.",
        said,
    ), said
    assert re.search(
        r"ComfyUI estimates [\d.]+ [MG]iB at this size: half of the pixels or of the frames takes [\d.]+ [MG]iB\.", said
    ), said
    comfy.screenshot(pictures, f"left-{cell}")
    assert comfy.page.locator("[role=status] .hs-button", has_text="bits").count() == 0
    comfy.page.route("**/halfsafe/halving", lambda route: later_comfyui(route))
    comfy.page.locator(".hs-sidebar button", has_text="Put ComfyUI's loaders back").click()
    comfy.page.locator("[role=status]", has_text="ComfyUI's loader was restored.").wait_for()
    comfy.page.locator(".hs-sidebar button", has_text="Halve the memory").click()
    comfy.page.locator("[role=status] .hs-button", has_text="w4a8").wait_for()
    assert "A layer's error is about 1.8 % in w6a8 and 6.2 % in w4a8, 0.89 % in int8." in comfy.page.text_content(
        "[role=status]"
    )
    comfy.screenshot(pictures, f"left-later-{cell}")
    comfy.page.locator("[role=status] .hs-button", has_text="w6a8").click()
    comfy.page.wait_for_function("() => app.graph.nodes.some(({ type }) => type === 'HalfsafeLoadDiffusionModel')")
    loader = next(
        node["inputs"]
        for node in in_page(comfy, "return prompt();").values()
        if node["class_type"] == "HalfsafeLoadDiffusionModel"
    )
    assert (loader["storage"], loader["model_name"]) == ("w6a8", "wan_fp8.safetensors")
    comfy.evaluate(TOGGLE_TAB)


def later_comfyui(route: Route) -> None:
    """Answer as a ComfyUI would that runs fewer bits."""
    answer = route.fetch()
    told = answer.json()
    for loader in told["loaders"]:
        for fewer in loader.get("left", []):
            fewer["needs"] = ""
    route.fulfill(response=answer, json=told)


TWO_ALIKE = """const other = put("UNETLoader", 0, 900), merge = put("ModelMergeSimple", 300, 900); wire(other, "MODEL", merge, "model2"); wire(model, "MODEL", merge, "model1"); wire(merge, "MODEL", sampler, "model");"""


def test_who_runs_out_of_memory_halves_it_on_the_errors_card_and_loaders_alike_are_named_once(
    comfy: ComfyPage, small_models: Path
) -> None:
    """Wan 2.2's templates: models in fp8 with the same title, of one file and of another."""
    quantize(small_models)
    shutil.copy(
        small_models / "diffusion_models" / "wan_fp8.safetensors",
        small_models / "diffusion_models" / "wan_low_fp8.safetensors",
    )
    draw(comfy, SMALL + TWO_ALIKE)
    comfy.evaluate(IN_FP8)
    comfy.evaluate("""() => { const [of, TITLE] = [(type) => app.graph.nodes.filter((n) => n.type === type), "wan_low_fp8.safetensors"], third = LiteGraph.createNode("UNETLoader"), merge = LiteGraph.createNode("ModelMergeSimple");
        app.graph.add(third); app.graph.add(merge); third.widgets[0].value = TITLE; const [sampler] = of("KSampler"), [first] = of("ModelMergeSimple");
        first.connect(0, merge, "model1"); third.connect(0, merge, "model2"); merge.connect(0, sampler, "model"); }""")
    comfy.evaluate(TOGGLE_TAB)
    comfy.send("execution_start", prompt_id="oom")
    sampler = comfy.evaluate("() => String(app.graph.nodes.find(({ type }) => type === 'KSampler').id)")
    comfy.send(
        "execution_error",
        prompt_id="oom",
        node_id=sampler,
        exception_type="torch.OutOfMemoryError",
        exception_message="Allocation on device 0 would exceed allowed memory.",
        traceback=[],
    )
    comfy.page.locator(".hs-actions .hs-first", has_text="Halve the memory").click()
    comfy.page.locator("[role=status]", has_text="1 loader was replaced").wait_for()
    said = comfy.page.text_content("[role=status]")
    assert said.count("Load Diffusion Model (its weights are in 8 bits or fewer already)") == 1
    assert [
        said.count(f"Fewer bits for Load Diffusion Model of {name}.safetensors, ")
        for name in ("wan_fp8", "wan_low_fp8")
    ] == [1, 1]
    assert comfy.page.locator(".hs-actions .hs-first").count() == 0, "it is done"
    comfy.evaluate(TOGGLE_TAB)


RAN_OUT = {
    "GPU memory ran out for weights.": ("torch.OutOfMemoryError", "Allocation on device", "load_models_gpu"),
    "GPU memory ran out for activations: fewer pixels, frames or images in a batch need less.": (
        "torch.OutOfMemoryError",
        "Allocation on device",
        "_apply_model",
    ),
    "GPU memory ran out.": ("torch.OutOfMemoryError", "Allocation on device", "somewhere"),
    "torch does not cast fp8 on a Mac. Halfsafe's loaders unpack fp8 weights by a table, and so does the node Halfsafe behind another loader.": (
        "TypeError",
        "Trying to convert Float8_e5m2 to the MPS backend but it does not have support for that dtype.",
        "cast_to_device",
    ),
    "Dynamic VRAM could not read a weight into pinned host memory. Start ComfyUI with --disable-pinned-memory, or with --disable-dynamic-vram: copies of weights are slower then.": (
        "RuntimeError",
        "HostBuffer.read_file_slice failed",
        "read_slice",
    ),
    "Host memory (RAM) ran out: 90 GiB were asked for at once. If dynamic VRAM is on, start ComfyUI with --disable-dynamic-vram: models are moved whole then, which is slower if they do not fit.": (
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: not enough memory: you tried to allocate 96636764160 bytes.",
        "to_cpu",
    ),
    "Host memory (RAM) ran out.": (
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory",
        "load_models_gpu",
    ),
}
"""What a card says ran out -> the class of an error, its text, and the last function of its traceback."""


@pytest.mark.once  # words; the test before draws the card in each page
def test_an_error_of_too_little_memory_says_what_ran_out(comfy: ComfyPage, small_models: Path) -> None:
    draw(comfy, SMALL)
    comfy.evaluate(TOGGLE_TAB)
    for said, (kind, text, function) in RAN_OUT.items():
        comfy.send("execution_start", prompt_id=function)
        frame = f'  File "/comfy/code.py", line 700, in {function}\n    run()\n'
        comfy.send(
            "execution_error",
            prompt_id=function,
            node_id="1",
            exception_type=kind,
            exception_message=text,
            traceback=[frame],
        )
        comfy.page.wait_for_function(
            "(said) => said.split('. ').every((part) => document.querySelector('.hs-run').textContent.includes(part))",
            arg=said,
        )
        assert "Halve the memory" in comfy.page.inner_text(".hs-actions .hs-first")
    comfy.send("execution_start", prompt_id="other")
    comfy.send(
        "execution_error",
        prompt_id="other",
        node_id="1",
        exception_type="ValueError",
        exception_message="wrong size",
        traceback=[],
    )
    comfy.page.locator(".hs-sidebar .hs-error", has_text="wrong size").wait_for(timeout=20_000)
    assert "ran out" not in comfy.page.text_content(".hs-run")
    comfy.evaluate(TOGGLE_TAB)


@pytest.mark.once  # a run is the server's
@pytest.mark.parametrize(
    ("loader", "widget", "folder"),
    [
        ("UNETLoader", "unet_name", "diffusion_models"),
        ("CLIPLoader", "clip_name", "text_encoders"),
        ("VAELoader", "vae_name", "vae"),
    ],
)
def test_a_web_page_in_place_of_a_file_is_named_where_comfyuis_loader_fails(
    comfy: ComfyPage, small_models: Path, loader: str, widget: str, folder: str
) -> None:
    """ComfyUI says "header too large"; the card of its error, and the answer of *Halve the memory*, say which file and what it is."""
    (small_models / folder / "page.safetensors").write_bytes(b"<!DOCTYPE html><html><body>Log in</body></html>" * 9)
    draw(comfy, SMALL)
    comfy.evaluate(
        "([loader, widget]) => { app.graph.nodes.find(({ type }) => type === loader).widgets.find(({ name }) => name === widget).value = 'page.safetensors'; }",
        [loader, widget],
    )
    comfy.evaluate(TOGGLE_TAB)
    with pytest.raises(AssertionError, match="header too large"):
        comfy.run()
    told = "page.safetensors: a web page (HTML), not a model."
    comfy.page.locator(".hs-run", has_text=told).wait_for(timeout=20_000)
    assert "Download it again." in comfy.page.text_content(".hs-run")
    assert (told in in_page(comfy, "const told = await halve(); return told.headline ?? told;")) == (
        loader != "VAELoader"
    )
    comfy.evaluate(TOGGLE_TAB)


@pytest.mark.once  # words
def test_missing_files_are_told_before_a_run(comfy: ComfyPage) -> None:
    draw(comfy, SMALL + """set(clip, "clip_name", "absent.safetensors");""")
    assert (
        in_page(comfy, "return halve();")
        == "2 loaders were replaced: run the workflow. Missing: absent.safetensors. What a missing file will take is not known yet: files in 8 bits already save nothing."
    )


@pytest.mark.once  # a run is the server's
def test_a_saving_of_nothing_is_none_in_a_run(comfy: ComfyPage, small_models: Path) -> None:
    """A loader of ours in 8 bits on a file that is in 8 bits."""
    quantize(small_models)
    comfy.evaluate(RUNNABLE)
    in_page(comfy, "await halve();")
    comfy.evaluate(
        """() => { for (const node of app.graph.nodes) for (const widget of node.widgets ?? []) if (widget.name === "model_name") widget.value = "wan_fp8.safetensors"; }"""
    )
    toasts = comfy.record_toasts()
    comfy.run()
    (told,) = [toast for toast in toasts() if "wan_fp8" in toast["summary"]]
    assert told["severity"] == "warn" and "no less than before" in told["summary"]


def test_the_search_finds_the_loader_first(comfy: ComfyPage) -> None:
    """ComfyUI ranks short names and what is used often before an exact alias: of ours it is the first, of all for words that no other node is like."""
    found = {words: comfy.evaluate(SEARCH, words) for words in ("out of memory", "low vram", "vram", "oom")}
    assert [found[words][0] for words in ("out of memory", "low vram")] == ["HalfsafeLoadDiffusionModel"] * 2
    assert [next(name for name in found[words] if name.startswith("Halfsafe")) for words in ("vram", "oom")] == [
        "HalfsafeLoadDiffusionModel"
    ] * 2
