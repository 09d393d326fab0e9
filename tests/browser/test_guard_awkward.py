"""Guard this workflow and Measure my card on graphs drawn to be awkward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage, without_positions
from browser.graph_walk import WALK, faults_of

Walk = Callable[..., dict]
ONE, VAE, CLIP = "HalfsafeAutoPrecision", "HalfsafeGuardVAE", "HalfsafeGuardCLIP"
TOOLS = """
    const put = (type, x, y, graph = app.graph) => { const node = LiteGraph.createNode(type); node.pos = [x, y]; graph.add(node); return node; };
    const slot = (node, type) => node.outputs.findIndex((output) => output.type === type || output.type === "*");
    const wire = (from, type, to, name) => from.connect(slot(from, type), to, to.inputs.findIndex((input) => input.name === name));
    const set = (node, name, value) => { node.widgets.find((widget) => widget.name === name).value = value; };
    const inside = (...nodes) => app.graph.convertToSubgraph(new Set(nodes)).node;
    const decoded = (x, y, loader) => { const decode = put("VAEDecode", x, y), save = put("SaveImage", x + 300, y);
        wire(loader, "VAE", decode, "vae"); wire(sampler, "LATENT", decode, "samples"); wire(decode, "IMAGE", save, "images"); return decode; };
    const pack = (name, inputs, outputs, virtual = false) => { class Node extends LiteGraph.LGraphNode { constructor() { super(name); this.isVirtualNode = virtual;
        for (const input of inputs) this.addInput(input, input.split(" ").at(-1)); for (const output of outputs) this.addOutput(output, output);
        if (virtual) this.addWidget("text", "Constant", "", () => {}); this.serialize_widgets = true; this.comfyClass = name; } } LiteGraph.registerNodeType(name, Node); return Node; };
    for (const name of ["SetNode", "GetNode", "Anything Everywhere", "UltimateSDUpscale", "KSampler (Efficient)"]) if (LiteGraph.registered_node_types[name]) LiteGraph.unregisterNodeType(name);
    app.graph.clear();
    const model = put("UNETLoader", 0, 0), clip = put("CLIPLoader", 0, 200), vae = put("VAELoader", 0, 400);
    const [prompt, negative] = [put("CLIPTextEncode", 400, 100), put("CLIPTextEncode", 400, 400)], latent = put("EmptyLatentImage", 400, 700);
    const sampler = put("KSampler", 900, 0);
    for (const text of [prompt, negative]) wire(clip, "CLIP", text, "clip");
    wire(model, "MODEL", sampler, "model"); wire(prompt, "CONDITIONING", sampler, "positive"); wire(negative, "CONDITIONING", sampler, "negative");
    wire(latent, "LATENT", sampler, "latent_image");
    const decode = decoded(1300, 0, vae);
"""
SET_AND_GET = """
    pack("SetNode", ["*"], ["*"], true); const Get = pack("GetNode", [], ["*"], true);
    Get.prototype.getInputLink = function () { const setter = this.graph.nodes.find((n) => n.type === "SetNode" && n.widgets[0].value === this.widgets[0].value);
        return this.graph.getLink(setter.inputs[0].link); };
    const through = (from, type, to, name) => { const setter = put("SetNode", 250, 900), getter = put("GetNode", 700, 900);
        setter.widgets[0].value = getter.widgets[0].value = type; setter.inputs[0].type = getter.outputs[0].type = type;
        wire(from, type, setter, "*"); getter.connect(0, to, to.inputs.findIndex((input) => input.name === name)); };
    through(model, "MODEL", sampler, "model"); through(vae, "VAE", decode, "vae");
"""
GUIDED = """
    const guider = put("CFGGuider", 700, 900), custom = put("SamplerCustomAdvanced", 1100, 900), save = put("SaveLatent", 1500, 900);
    wire(model, "MODEL", guider, "model"); wire(prompt, "CONDITIONING", guider, "positive"); wire(negative, "CONDITIONING", guider, "negative");
    wire(guider, "GUIDER", custom, "guider"); wire(latent, "LATENT", custom, "latent_image"); wire(custom, "LATENT", save, "samples");
    for (const node of [sampler, decode]) app.graph.remove(node);
"""
GRAPHS = {
    "nothing awkward": ("", [ONE]),
    "a sampler in a subgraph of a subgraph": ("inside(inside(sampler), decode);", [ONE]),
    "a text encoder for a prompt and a nested subgraph": ("inside(inside(negative), sampler);", [ONE]),
    "a VAE in two graphs": ("inside(decoded(1300, 400, vae));", [ONE]),
    "a VAE used and handed out by one subgraph": ("inside(vae, decode); ", [ONE, VAE]),
    "a second VAE inside": ("const second = put('VAELoader', 0, 900); inside(second, decoded(1300, 400, second));", [ONE, VAE]),
    "a subgraph used twice": (
        """const outer = inside(sampler), twin = LiteGraph.createNode(outer.type), second = put("UNETLoader", 0, 900), other = put("VAEDecode", 1600, 900), save = put("SaveImage", 1900, 900);
        twin.pos = [900, 900]; app.graph.add(twin); wire(second, "MODEL", twin, "model"); wire(prompt, "CONDITIONING", twin, "positive"); wire(negative, "CONDITIONING", twin, "negative");
        wire(latent, "LATENT", twin, "latent_image"); wire(twin, "LATENT", other, "samples"); wire(vae, "VAE", other, "vae"); wire(other, "IMAGE", save, "images");""",
        [ONE, ONE],
    ),
    "a subgraph used twice with a LoRA inside": (
        """const lora = put("LoraLoaderModelOnly", 600, 0); wire(model, "MODEL", lora, "model"); wire(lora, "MODEL", sampler, "model");
        const outer = inside(lora, sampler), twin = LiteGraph.createNode(outer.type), other = put("VAEDecode", 1600, 900), save = put("SaveImage", 1900, 900);
        twin.pos = [900, 900]; app.graph.add(twin); wire(model, "MODEL", twin, "model"); wire(prompt, "CONDITIONING", twin, "positive"); wire(negative, "CONDITIONING", twin, "negative");
        wire(latent, "LATENT", twin, "latent_image"); wire(twin, "LATENT", other, "samples"); wire(vae, "VAE", other, "vae"); wire(other, "IMAGE", save, "images");""",
        [ONE, VAE, CLIP],
    ),
    "a model used and changed inside of a subgraph": (
        """const lora = put("LoraLoaderModelOnly", 600, 900), again = put("KSampler", 1300, 900); wire(model, "MODEL", lora, "model"); wire(lora, "MODEL", again, "model");
        wire(prompt, "CONDITIONING", again, "positive"); wire(negative, "CONDITIONING", again, "negative"); wire(sampler, "LATENT", again, "latent_image"); wire(again, "LATENT", decode, "samples");
        inside(lora, sampler, again);""",
        [ONE, ONE, VAE, CLIP],
    ),
    "what is bypassed or muted": (
        """const lora = put("LoraLoaderModelOnly", 600, 0), second = put("VAELoader", 0, 900); lora.mode = 4; wire(model, "MODEL", lora, "model"); wire(lora, "MODEL", sampler, "model");
        decoded(1300, 400, second).mode = 2; decoded(1300, 800, put("VAELoader", 0, 1200)).mode = 4;""",
        [ONE],
    ),
    "nothing that runs": ("for (const node of app.graph.nodes) node.mode = 2;", []),
    "no output": ("for (const node of app.graph.nodes.filter(({ type }) => type === 'SaveImage')) app.graph.remove(node);", []),
    "a model made of a decoded picture": (
        """const patch = put("QwenImageDiffsynthControlnet", 1600, 0), second = put("KSampler", 2000, 0), last = put("VAEDecode", 2400, 0), save = put("SaveImage", 2800, 0);
        wire(model, "MODEL", patch, "model"); wire(put("ModelPatchLoader", 0, 900), "MODEL_PATCH", patch, "model_patch"); wire(vae, "VAE", patch, "vae"); wire(decode, "IMAGE", patch, "image");
        wire(patch, "MODEL", second, "model"); wire(prompt, "CONDITIONING", second, "positive"); wire(negative, "CONDITIONING", second, "negative"); wire(latent, "LATENT", second, "latent_image");
        wire(second, "LATENT", last, "samples"); wire(vae, "VAE", last, "vae"); wire(last, "IMAGE", save, "images"); app.graph.remove(sampler); wire(latent, "LATENT", decode, "samples");""",
        [ONE, VAE],
    ),
    "sound before the picture": (
        """const second = put("VAELoader", 0, 900), sound = put("VAEDecodeAudio", 1300, 400), save = put("SaveAudio", 1600, 400);
        wire(second, "VAE", sound, "vae"); wire(sampler, "LATENT", sound, "samples"); wire(sound, "AUDIO", save, "audio"); app.graph.nodes.reverse();""",
        [ONE, VAE],
    ),
    "reroutes": (
        """const reroute = put("Reroute", 600, 900); vae.connect(0, reroute, 0); reroute.connect(0, decode, 1);
        app.graph.createReroute([500, 20], app.graph.getLink(sampler.inputs[0].link));""",
        [ONE],
    ),
    "Set and Get": (SET_AND_GET, [ONE]),
    "a schedule of the model alone": (
        """const schedule = put("BasicScheduler", 500, 900), custom = put("SamplerCustom", 900, 900), shift = put("ModelSamplingSD3", 500, 1200), save = put("SaveLatent", 1300, 900);
        wire(model, "MODEL", schedule, "model"); wire(model, "MODEL", shift, "model"); wire(shift, "MODEL", custom, "model"); wire(shift, "MODEL", sampler, "model"); wire(schedule, "SIGMAS", custom, "sigmas");
        wire(prompt, "CONDITIONING", custom, "positive"); wire(negative, "CONDITIONING", custom, "negative"); wire(latent, "LATENT", custom, "latent_image"); wire(custom, "LATENT", save, "samples");""",
        [ONE],
    ),
    "guarded by hand": (
        """const guards = [["MODEL", model, "HalfsafeNaNGuard", [[sampler, "model"]]], ["VAE", vae, "HalfsafeGuardVAE", [[decode, "vae"]]], ["CLIP", clip, "HalfsafeGuardCLIP", [[prompt, "clip"], [negative, "clip"]]]];
        for (const [type, from, guard, uses] of guards) { const node = put(guard, 300, 900); wire(from, type, node, type.toLowerCase()); for (const [to, name] of uses) wire(node, type, to, name); }""",
        [],
    ),
    "a model that is saved": ("wire(model, 'MODEL', put('ModelSave', 900, 900), 'model');", [ONE]),
    "a guider": (GUIDED, [ONE]),
    "no text encoder": ("for (const node of [clip, prompt, negative]) app.graph.remove(node);", [ONE]),
}  # fmt: skip
"""Name -> how it is drawn, and what guards it."""
TWO_MODELS = """const second = put("UNETLoader", 0, 900), again = put("KSampler", 1300, 900); set(model, "unet_name", "folder/high.safetensors"); set(second, "unet_name", "low.gguf");
    wire(second, "MODEL", again, "model"); wire(prompt, "CONDITIONING", again, "positive"); wire(negative, "CONDITIONING", again, "negative");
    wire(sampler, "LATENT", again, "latent_image"); wire(again, "LATENT", decode, "samples");"""
SOUND = GRAPHS["sound before the picture"][0]
REROUTES = "() => [[...app.graph.reroutes.values()].map(({ pos }) => [...pos]), app.graph.floatingLinks.size]"
CLICK = "async (name) => { const button = [...document.querySelectorAll('.hs-sidebar .hs-button')].find((one) => one.textContent.startsWith(name)); button.click(); }"
TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"
BUTTONS = "() => [...document.querySelectorAll('.hs-actions b')].map((title) => title.textContent)"


def draw(comfy: ComfyPage, code: str) -> None:
    comfy.evaluate(f"async () => {{ app.nodeOutputs = {{}}; {TOOLS} {code} app.canvas.setGraph(app.graph); }}")


@pytest.fixture
def comfy(unseen: ComfyPage) -> ComfyPage:
    """A page that draws nothing: what becomes of links, whatever nodes are drawn with."""
    return unseen


@pytest.fixture
def walk(comfy: ComfyPage, info: dict) -> Walk:
    """Draw a graph, guard and measure it, and hold it to what is held of every graph whose nodes are ComfyUI's."""

    def walk(code: str, held: bool = True) -> dict:
        draw(comfy, code)
        found = comfy.evaluate(WALK, None)
        assert not held or list(faults_of(found, info)) == []
        return found

    return walk


@pytest.mark.parametrize("name", GRAPHS)
def test_an_awkward_graph_is_guarded(walk: Walk, name: str) -> None:
    code, guards = GRAPHS[name]
    found = walk(code)
    assert sorted(guard["type"] for guard in found["guards"]) == sorted(guards), found["said"]


def test_what_is_not_guarded_is_told(walk: Walk) -> None:
    said = {
        name: walk(GRAPHS[name][0])["said"]
        for name in ("nothing that runs", "no output", "guarded by hand", "a second VAE inside")
    }
    nothing = "This workflow runs no model, VAE or text encoder."
    assert said["nothing that runs"] == said["no output"] == nothing
    assert said["guarded by hand"] == "Every model here is guarded already."
    assert said["a second VAE inside"].startswith(
        "2 nodes were added, some of them inside of subgraphs: run the workflow."
    )


def test_nodes_of_absent_packs_lose_no_link(comfy: ComfyPage) -> None:
    draw(comfy, SET_AND_GET)
    saved = comfy.saved()
    draw(comfy, "")  # unregisters them
    found = comfy.evaluate(WALK, saved)
    assert found["unguarded"] == found["unmeasured"] == found["before"]
    assert found["guarded"].keys() - found["before"].keys(), found["said"]


def test_a_group_node_is_guarded_as_the_subgraph_that_the_page_makes_of_it(comfy: ComfyPage, info: dict) -> None:
    draw(comfy, "")
    found = comfy.evaluate(WALK, with_group_node(comfy.saved()))
    assert list(faults_of(found, info)) == []
    assert [guard["type"] for guard in found["guards"]] == [ONE] and any(":" in node for node in found["before"])


def with_group_node(workflow: dict) -> dict:
    """A workflow whose sampler and decoder are in a group node, as ComfyUI saved those before there were subgraphs."""
    sampler, decode = (
        next(node for node in workflow["nodes"] if node["type"] == name) for name in ("KSampler", "VAEDecode")
    )
    kept = [node for node in workflow["nodes"] if node not in (sampler, decode)]
    outside = []
    for link, origin, slot, target, to, kind in workflow["links"]:
        if (origin, target) == (sampler["id"], decode["id"]):
            continue
        ends = (sampler["id"], 0) if origin == decode["id"] else (origin, slot)
        outside.append([link, *ends, *((sampler["id"], 4) if target == decode["id"] else (target, to)), kind])
    slots = [*sampler["inputs"][:4], decode["inputs"][1]]
    group = {**sampler, "type": "workflow>Mine", "inputs": slots, "outputs": decode["outputs"]}
    parts = [
        {
            **node,
            "index": index,
            "inputs": [{**one, "link": None} for one in node["inputs"]],
            "outputs": [{**one, "links": []} for one in node["outputs"]],
        }
        for index, node in enumerate((sampler, decode))
    ]
    definition = {"nodes": parts, "links": [[0, 0, 1, 0, decode["id"], "LATENT"]], "external": []}
    return {**workflow, "nodes": [*kept, group], "links": outside, "extra": {"groupNodes": {"Mine": definition}}}


def test_what_is_sent_everywhere_is_guarded_before_it_is_sent(walk: Walk) -> None:
    found = walk(
        """pack("Anything Everywhere", ["anything *"], []).nodeData = { output_node: false }; const all = put("Anything Everywhere", 400, 900); vae.connect(0, all, 0); decode.disconnectInput(1);"""
    )
    (all_nodes,) = [step for step in found["guarded"].values() if step["class_type"] == "Anything Everywhere"]
    assert found["guarded"][all_nodes["inputs"]["anything *"][0]]["class_type"] == ONE


def test_a_sampler_that_hands_its_model_on_is_guarded_once(walk: Walk) -> None:
    found = walk(
        """pack("KSampler (Efficient)", ["a MODEL", "b CONDITIONING", "c LATENT", "d VAE"], ["MODEL", "LATENT", "VAE", "IMAGE"]); const first = put("KSampler (Efficient)", 600, 900);
        wire(model, "MODEL", first, "a MODEL"); wire(prompt, "CONDITIONING", first, "b CONDITIONING"); wire(latent, "LATENT", first, "c LATENT"); wire(vae, "VAE", first, "d VAE");
        wire(first, "MODEL", sampler, "model"); wire(first, "LATENT", sampler, "latent_image"); wire(first, "VAE", decode, "vae");""",
        held=False,
    )
    assert [guard["type"] for guard in found["guards"]] == [ONE]
    (first,) = [step["inputs"] for step in found["guarded"].values() if step["class_type"] == "KSampler (Efficient)"]
    assert {found["guarded"][first[name][0]]["class_type"] for name in ("a MODEL", "d VAE")} == {ONE}


def test_two_models_are_named_by_their_files_and_one_is_measured(walk: Walk) -> None:
    found = walk(TWO_MODELS)
    assert [guard["title"] for guard in found["guards"]] == ["Halfsafe (high)", "Halfsafe (low)"]
    assert found["choices"] == ["high", "low"] and found["measures"] == [
        "Measure Precisions (low)",
        "Chart of Measure Precisions",
    ]
    with_lora = """set(second, "unet_name", "high.safetensors"); const lora = put("LoraLoaderModelOnly", 600, 900); set(lora, "lora_name", "few_steps.safetensors"); wire(second, "MODEL", lora, "model"); wire(lora, "MODEL", again, "model");"""
    assert [guard["title"] for guard in walk(TWO_MODELS + with_lora)["guards"]] == [
        "Halfsafe (high)",
        "Halfsafe (high + few_steps)",
    ]


def test_measuring_follows_the_guider_and_says_what_it_cannot_read(walk: Walk) -> None:
    measured = walk(GUIDED)
    assert measured["measures"] and measured["told"] == "2 nodes were added: press the blue arrow above them."
    assert [
        step["inputs"]["cfg"]
        for step in measured["measured"].values()
        if step["class_type"] == "HalfsafeMeasurePrecisions"
    ] == [8], "the sampler's own"
    linked = walk(
        GUIDED
        + "const number = put('PrimitiveFloat', 0, 1200); number.connectSlots(number.outputs[0], guider, guider.inputs[guider.findInputSlot('cfg')]);"
    )
    (asked,) = [
        step["inputs"] for step in linked["measured"].values() if step["class_type"] == "HalfsafeMeasurePrecisions"
    ]
    assert linked["measured"][asked["cfg"][0]]["class_type"] == "PrimitiveFloat" and "cfg" not in linked["told"]
    without = walk(GUIDED + "set(guider, 'cfg', 1);")["measured"]
    assert [
        "negative" in step["inputs"] for step in without.values() if step["class_type"] == "HalfsafeMeasurePrecisions"
    ] == [False], "it is not used"
    apart = walk(GUIDED + "inside(guider);")
    assert (
        apart["told"]
        == "Measure cannot read SamplerCustomAdvanced: its model, prompt or latent is not linked in the same graph."
    )
    other = """pack("UltimateSDUpscale", ["image IMAGE", "model MODEL"], ["IMAGE"]); const upscale = put("UltimateSDUpscale", 1600, 400); wire(model, "MODEL", upscale, "model MODEL");
        wire(upscale, "IMAGE", put("SaveImage", 2000, 400), "images"); app.graph.remove(sampler);"""
    assert walk(other)["told"] == "Measure does not support UltimateSDUpscale, the sampler of this workflow."


def test_what_fails_midway_changes_nothing_and_what_does_not_is_one_step_of_undo(comfy: ComfyPage) -> None:
    draw(comfy, SOUND)
    before = without_positions(comfy.saved())
    failing = """async () => { const { guardWorkflow } = await import("/extensions/Halfsafe-Pack/guard.mjs"), create = LiteGraph.createNode;
        LiteGraph.createNode = (type) => { if (type === "HalfsafeGuardVAE") throw new Error("no such node"); return create.call(LiteGraph, type); };
        try { return await guardWorkflow(app); } finally { LiteGraph.createNode = create; } }"""
    assert comfy.evaluate(failing) == "Nothing was changed: no such node"
    assert without_positions(comfy.saved()) == before
    comfy.evaluate(
        "async () => { await (await import('/extensions/Halfsafe-Pack/guard.mjs')).guardWorkflow(app); await app.extensionManager.command.execute('Comfy.Undo'); }"
    )
    assert without_positions(comfy.saved()) == before


def test_a_reroute_is_kept_and_none_is_left_without_a_link(comfy: ComfyPage) -> None:
    draw(
        comfy,
        GRAPHS["reroutes"][0]
        + "for (const text of [prompt, negative]) app.graph.createReroute([390, text.pos[1]], app.graph.getLink(text.inputs[0].link));",
    )
    comfy.evaluate(WALK, None)
    kept, floating = comfy.evaluate(REROUTES)
    assert [500, 20] in kept and floating == 0, kept


def test_the_sidebar_asks_which_model_and_takes_measure_out(opened_page: ComfyPage, pictures: Path, cell: str) -> None:
    comfy = opened_page
    draw(comfy, TWO_MODELS)
    comfy.evaluate(TAB)
    comfy.page.wait_for_selector(".hs-actions")
    comfy.evaluate(CLICK, "Measure my card")
    comfy.page.wait_for_selector("[role=status] .hs-button >> nth=1")
    comfy.screenshot(pictures, f"measure-which-{cell}")
    assert comfy.page.inner_text("[role=status]").startswith("2 models are sampled here. Which one should be measured?")
    comfy.evaluate(CLICK, "low")
    comfy.page.wait_for_function(f"() => ({BUTTONS})().includes('Take Measure out')")
    assert "Measure my card" not in comfy.evaluate(BUTTONS)
    comfy.evaluate(CLICK, "Take Measure out")
    comfy.page.wait_for_function(f"() => ({BUTTONS})().includes('Measure my card')")
    assert not any("Measure" in kind for kind in comfy.evaluate("() => app.graph.nodes.map((n) => n.type)"))
    comfy.evaluate(TAB)
