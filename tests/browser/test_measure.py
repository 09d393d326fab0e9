"""*Measure my card* beside halved loaders, and *Use this*: what was measured best on the loaders of a workflow, in place, undone by one Ctrl+Z."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage
from browser.templates import each_kind, loaders_in, templates
from browser.test_guard_awkward import GUIDED, TOOLS, TWO_MODELS

PAGE = """const { halveMemory } = await import("/extensions/Halfsafe-Pack/memory.mjs"), { isMeasure, measureWorkflow, useMeasured } = await import("/extensions/Halfsafe-Pack/measure.mjs");
    const { allNodes } = await import("/extensions/Halfsafe-Pack/graph.mjs"), { api } = await import("/scripts/api.js");
    const textOf = (told) => (typeof told === "string" ? told : [told.headline, told.line, ...(told.why ?? [])].filter(Boolean).join(" "));
    const measure = async () => { const told = await measureWorkflow(app); return told.choices ? told.choices.at(-1).act() : told; };
    const use = (given) => useMeasured(app, allNodes(app).find(({ comfyClass }) => comfyClass === "HalfsafeMeasurePrecisions"), { rules: "", ...given });
    const prompt = async () => JSON.parse(JSON.stringify((await app.graphToPrompt()).output));
    const tracker = () => app.extensionManager.workflow.activeWorkflow.changeTracker;
    const frames = async () => { for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame); };
    const click = async () => { window.dispatchEvent(new MouseEvent("mouseup")); await frames(); };"""
SMALL = """set(model, "unet_name", "wan.safetensors"); set(model, "weight_dtype", "default"); set(clip, "device", "default"); set(clip, "clip_name", "clip_l.safetensors"); set(clip, "type", "sd3"); set(vae, "vae_name", "wan_vae.safetensors");
    const video = put("EmptyHunyuanLatentVideo", 400, 700); for (const [name, value] of [["width", 64], ["height", 64], ["length", 1]]) set(video, name, value);
    wire(video, "LATENT", sampler, "latent_image"); app.graph.remove(latent); set(sampler, "steps", 2); set(sampler, "cfg", 6);"""
EXCHANGED = {"UNETLoader": "HalfsafeLoadDiffusionModel", "CheckpointLoaderSimple": "HalfsafeLoadCheckpoint"}
BUTTON = ".hs-panel .hs-button:text-is('Use this')"
COPY = ".hs-panel .hs-button:text-is('Copy as a row')"
TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"
BADGE_OF_LOADER = """(begins) => app.graph.nodes.find(({ type }) => type === "HalfsafeLoadDiffusionModel").badges.map((b) => (typeof b === "function" ? b() : b).text).at(-1).startsWith(begins)"""
SENTENCE = "() => [...document.querySelectorAll('.hs-result .hs-sentence')].map((e) => e.textContent).find((text) => /^(Best: |No setting is better |The times were too noisy)/.test(text)) ?? ''"
"""What a measurement says: which of the three depends on how busy the machine is."""


def draw(comfy: ComfyPage, code: str) -> None:
    comfy.evaluate(
        f"async () => {{ app.nodeOutputs = {{}}; {TOOLS} {code} app.canvas.setGraph(app.graph); app.canvas.emitBeforeChange(); app.canvas.emitAfterChange(); }}"
    )


def draw_as_opened(comfy: ComfyPage) -> None:
    """Draw the small workflow, with room for its picture, then open it as a file: what the page adds as it loads or shows a picture would be a step of its own."""
    draw(comfy, SMALL + """app.graph.nodes.find(({ type }) => type === "SaveImage").setSize([300, 420]);""")
    comfy.load(comfy.saved())


def in_page(comfy: ComfyPage, code: str) -> object:
    return comfy.evaluate(f"async () => {{ {PAGE} {code} }}")


def prompt(comfy: ComfyPage) -> dict:
    return in_page(comfy, "return prompt();")


def of_class(steps: dict, name: str) -> list[dict]:
    return [step["inputs"] for step in steps.values() if step["class_type"] == name]


def without_seeds(steps: dict) -> dict:
    return {
        node: step | {"inputs": {name: value for name, value in step["inputs"].items() if name != "seed"}}
        for node, step in steps.items()
    }


def undone(comfy: ComfyPage) -> dict:
    """The prompt after a click on the canvas and one Ctrl+Z, as a person does it."""
    comfy.page.mouse.click(1300, 880)
    comfy.page.keyboard.press("Control+z")
    comfy.page.wait_for_timeout(300)
    comfy.settle()
    return prompt(comfy)


def measured_alone(comfy: ComfyPage, candidate: str) -> None:
    """Let one candidate run, so that no time has to be told from another on a busy machine."""
    comfy.evaluate(
        "(text) => { const node = app.graph.nodes.find((n) => n.type === 'HalfsafeMeasurePrecisions'); node.widgets.find((w) => w.name === 'candidates').value = text; }",
        candidate,
    )


def test_a_halved_workflow_is_measured_from_its_file_and_the_answer_is_used(
    comfy: ComfyPage, pictures: Path, cell: str
) -> None:
    """Halve, Measure, Run, Use this, Ctrl+Z, Use this, Run: with ComfyUI's own nodes and a real model."""
    draw(comfy, SMALL)
    stock = prompt(comfy)
    in_page(comfy, "await halveMemory(app, api); await measure();")
    halved = prompt(comfy)
    (asked,) = of_class(halved, "HalfsafeMeasurePrecisions")
    assert asked["cfg"] == 6 and of_class(halved, "HalfsafeLoadDiffusionModel")[0]["storage"] == "int8"
    measured_alone(comfy, "int8/bf16")
    comfy.run()
    comfy.page.wait_for_function(f"() => ({SENTENCE})()")
    before = prompt(comfy)
    text = comfy.evaluate(SENTENCE)
    is_best = text.startswith("Best: ")
    told = ("Best: int8, computed in bf16. ", "(fp32 ", "5.25 MiB (7.25 MiB), error 0.")
    assert all(part in text for part in told) if is_best else "Smallest: " in text, "the file takes 7.25 MiB"
    details = comfy.evaluate(
        "() => [...document.querySelectorAll('.hs-result .hs-text')].map((e) => e.textContent).join('')"
    )
    assert "weights of the file in bf16 (loaded in int8, measured from the file)" in details
    comfy.evaluate(TAB)
    comfy.evaluate(
        """() => { const node = app.graph.nodes.find((n) => n.type === "HalfsafeMeasurePrecisions"), { ds } = app.canvas; ds.scale = 0.9; ds.offset[0] = 480 - node.pos[0]; ds.offset[1] = 150 - node.pos[1]; }"""
    )
    comfy.settle()
    comfy.screenshot(pictures, f"use-this-{cell}")
    comfy.page.locator(COPY).click()
    comfy.page.locator(".hs-panel .hs-button:text-is('Copied')").wait_for()
    shared = comfy.evaluate("() => navigator.clipboard.readText()").splitlines()
    assert (
        shared[2].startswith("| ")
        and "| int8/bf16 |" in shared[2]
        and json.loads(shared[-1])[0]["setting"] == "int8/bf16"
    )
    comfy.page.locator(".hs-sidebar article .hs-button", has_text="Use this").first.click()
    comfy.page.wait_for_function("() => !app.graph.nodes.some(({ type }) => type === 'HalfsafeMeasurePrecisions')")
    comfy.page.locator(
        "[role=status]",
        has_text="Load Diffusion Model fp8/int8 (Halfsafe) is set to storage int8, compute bf16.",
    ).wait_for()
    assert comfy.page.inner_text(".hs-did .hs-line") == "Measure Precisions was removed. Ctrl+Z undoes this."

    comfy.screenshot(pictures, f"used-{cell}")
    assert undone(comfy) == before, "one step"
    comfy.page.wait_for_function(f"() => ({SENTENCE})()")
    comfy.evaluate(TAB)  # closed: it covers the node
    comfy.zoom_to("HalfsafeMeasurePrecisions", 620, 560)
    if is_best:
        comfy.page.locator(BUTTON).click()
    else:  # the node has no button without a best setting
        comfy.evaluate(TAB)
        comfy.page.locator(".hs-sidebar article .hs-button", has_text="Use this").first.click()
        comfy.evaluate(TAB)
    comfy.page.wait_for_function("() => !app.graph.nodes.some(({ type }) => type === 'HalfsafeMeasurePrecisions')")
    used = prompt(comfy)
    (loader,) = of_class(used, "HalfsafeLoadDiffusionModel")
    assert (loader["storage"], loader["compute"], loader["model_name"]) == ("int8", "bf16", "wan.safetensors")
    comfy.page.wait_for_function(BADGE_OF_LOADER, arg="of an earlier run")
    comfy.run()
    assert comfy.badges()["HalfsafeLoadDiffusionModel"] == "int8 + bf16 \u00b7 bf16"
    in_page(comfy, "await (await import('/extensions/Halfsafe-Pack/memory.mjs')).putLoadersBack(app);")
    assert without_seeds(prompt(comfy)) == without_seeds(stock), "a run draws a new seed"


def test_one_undo_takes_a_halving_back_after_a_click_on_the_canvas(comfy: ComfyPage) -> None:
    """The page adds properties to new nodes of its own, which are no step of their own."""
    draw_as_opened(comfy)
    before = prompt(comfy)
    in_page(comfy, "await halveMemory(app, api);")
    assert of_class(prompt(comfy), "HalfsafeLoadDiffusionModel")
    assert undone(comfy) == before
    comfy.page.mouse.click(1300, 880)
    comfy.page.keyboard.press("Control+y")
    comfy.page.wait_for_function("() => app.graph.nodes.some(({ type }) => type === 'HalfsafeLoadDiffusionModel')")


CHARTS = "return allNodes(app).filter(({ type }) => type === 'PreviewImage').map(({ title }) => title);"
MEASURE_DELETED = "const node = allNodes(app).find(({ comfyClass }) => comfyClass === 'HalfsafeMeasurePrecisions'); node.graph.remove(node);"


@pytest.mark.once  # what is in the graph
def test_a_chart_without_its_measure_is_gone_at_the_next_press_and_says_what_it_shows(comfy: ComfyPage) -> None:
    """Measure Precisions deleted by hand; a chart that shows another picture since is the user's."""
    draw(comfy, SMALL)
    before = prompt(comfy)
    in_page(comfy, f"await measure(); {MEASURE_DELETED} await measure();")
    assert in_page(comfy, CHARTS) == ["Chart of Measure Precisions"]
    unmeasure = "await (await import('/extensions/Halfsafe-Pack/measure.mjs')).unmeasureWorkflow(app);"
    in_page(comfy, unmeasure)
    assert prompt(comfy) == before and in_page(comfy, CHARTS) == []
    shown = "const chart = allNodes(app).find(({ type }) => type === 'PreviewImage'); allNodes(app).find(({ type }) => type === 'VAEDecode').connect(0, chart, 0);"
    in_page(comfy, f"await measure(); {shown} {unmeasure}")
    assert len(in_page(comfy, CHARTS)) == 1


AFTER_A_RUN = {
    "halve": "await halveMemory(app, api);",
    "guard": "await (await import('/extensions/Halfsafe-Pack/guard.mjs')).guardWorkflow(app);",
    "use this": """await use({ storage: "int8", compute: "bf16" });""",
}


@pytest.mark.parametrize("act", ["halve", "use this", pytest.param("guard", marks=pytest.mark.once)])
def test_one_undo_after_a_run_takes_back_what_was_done_not_the_seed(comfy: ComfyPage, act: str) -> None:
    """ComfyUI's page makes the new seed a step of its own: what is done after it is another."""
    draw_as_opened(comfy)
    if act == "use this":
        in_page(comfy, "await measure();")
        measured_alone(comfy, "bf16/bf16")
    (seed,) = [inputs["seed"] for inputs in of_class(prompt(comfy), "KSampler")]
    comfy.run()
    before = prompt(comfy)
    assert of_class(before, "KSampler")[0]["seed"] != seed, "control_after_generate is randomize"
    in_page(comfy, AFTER_A_RUN[act])
    assert prompt(comfy) != before
    assert undone(comfy) == before


def wrong_in(run: dict) -> Iterator[str]:
    """Yield what is wrong after *Use this* on a template: only the loaders of the measured file changed, Measure went, and one undo takes that back."""
    before, measured, used = run["before"], run["measured"], run["used"]
    if run["back"] != measured:
        yield "one undo does not take it back"
    if run["told"].startswith("Nothing was changed: "):
        if used != measured:
            yield "it was changed all the same"
        return
    if used.keys() != before.keys():
        yield f"nodes came or went: {used.keys() ^ before.keys()}"
        return
    changed = [node for node in before if before[node] != used[node]]
    if not changed or run["steps"] != 1:
        yield f"{len(changed)} loaders in {run['steps']} steps: {run['told']}"
    for node in changed:
        was, now = before[node], used[node]
        files = [
            value
            for value in was["inputs"].values()
            if isinstance(value, str) and value.endswith((".safetensors", ".sft"))
        ]
        if (
            EXCHANGED.get(was["class_type"]) != now["class_type"]
            or (now["inputs"]["storage"], now["inputs"]["compute"]) != ("int8", "bf16")
            or not {*files} <= {*map(str, now["inputs"].values())}
        ):
            yield f"{was} became {now}"


USE = f"""async (workflow) => {{ {PAGE}
    await app.loadGraphData(workflow, true, true, app.extensionManager.workflow.activeWorkflow, {{ silentAssetErrors: true }});
    const run = {{ before: await prompt(), said: await measure(), measured: await prompt() }};
    if (!allNodes(app).some(isMeasure)) return null;
    await click();
    const steps = tracker().undoQueue.length;
    run.told = textOf(await use({{ storage: "int8", compute: "bf16" }}));
    await click();
    run.used = await prompt();
    run.steps = tracker().undoQueue.length - steps;
    if (run.steps) await tracker().undo();
    run.back = await prompt();
    return run; }}"""


def test_on_comfyuis_own_templates_only_the_loaders_of_the_measured_file_change(unseen: ComfyPage, info: dict) -> None:
    """Each kind of loader; a third of the templates where nodes are elements of the page."""
    chosen = list(each_kind(templates(info), loaders_in).items())
    runs = {name: unseen.evaluate(USE, workflow) for name, workflow in chosen[:: 3 if unseen.vue else 1]}
    assert unseen.problems == []
    done = {name: run for name, run in runs.items() if run}
    assert {name: wrong for name, run in done.items() if (wrong := list(wrong_in(run)))} == {}
    assert len(done) > 0.7 * len(runs) and sum("is set to storage" in run["told"] for run in done.values()) > 0.5 * len(
        done
    ), {name: run["told"] for name, run in done.items()}


USED_ON = {
    "ours, with a rule's link": ("""const ours = put("HalfsafeLoadDiffusionModel", 0, 900), rules = put("HalfsafeLayerRules", 0, 1300); wire(rules, "HALFSAFE_RULES", ours, "rules");
        wire(ours, "MODEL", sampler, "model"); app.graph.remove(model);""", "Its rules stay: they were not measured."),
    "in a subgraph of a subgraph": ("inside(inside(model, sampler), decode);", ""),
    "behind Compute Dtype": ("""const compute = put("HalfsafeComputeDtype", 300, 900); wire(model, "MODEL", compute, "model"); wire(compute, "MODEL", sampler, "model");""", "Compute Dtype (Halfsafe) is set to compute fp16_safe."),
    "behind the one node": ("""const one = put("HalfsafeAutoPrecision", 300, 900); wire(model, "MODEL", one, "model"); wire(one, "MODEL", sampler, "model"); set(one, "goal", "speed"); set(one, "storage", "as loaded");""",
        "Halfsafe has a rule for it: compute=fp16_safe stream=fp32."),
    "two models, of which one is measured": (TWO_MODELS, ""),
    "a guider": (GUIDED, ""),
}  # fmt: skip
"""Graph -> what is said beside the loader."""


@pytest.mark.once  # what is set; test_on_comfyuis_own_templates sets it in each page
@pytest.mark.parametrize("graph", USED_ON)
def test_what_was_measured_best_reaches_all_that_decides_of_it(comfy: ComfyPage, graph: str) -> None:
    code, said = USED_ON[graph]
    draw(comfy, code.replace("low.gguf", "low.safetensors"))
    in_page(comfy, "await measure();")
    before = prompt(comfy)
    told = in_page(
        comfy,
        """return textOf(await use({ storage: "int8", compute: "fp16_safe", rules: "compute=fp16_safe stream=fp32" }));""",
    )
    used = prompt(comfy)
    assert (
        "is set to storage int8, compute fp16_safe." in told
        and said in told
        and "Measure Precisions was removed." in told
    )
    loaders = of_class(used, "HalfsafeLoadDiffusionModel")
    assert [(loader["storage"], loader["compute"]) for loader in loaders] == [("int8", "fp16_safe")]
    assert all(inputs["compute"] == "fp16_safe" for inputs in of_class(used, "HalfsafeComputeDtype"))
    for inputs in of_class(used, "HalfsafeAutoPrecision"):
        assert (
            inputs["goal"] == "balanced"
            and used[inputs["rules"][0]]["inputs"]["rules"] == "* compute=fp16_safe stream=fp32  # measured"
        )
    if graph.startswith("two"):
        assert [inputs["unet_name"] for inputs in of_class(used, "UNETLoader")] == ["folder/high.safetensors"]
    assert undone(comfy) == before


@pytest.mark.once  # words
def test_what_cannot_be_set_is_told_and_nothing_is_changed(comfy: ComfyPage) -> None:
    cases = {
        """pack("UnetLoaderGGUF", [], ["MODEL"]); const other = put("UnetLoaderGGUF", 0, 900); wire(other, "MODEL", sampler, "model");""": "UnetLoaderGGUF cannot be replaced.",
        """const other = put("UNETLoader", 0, 900); put("PrimitiveNode", 0, 1200).connect(0, other, other.findInputSlot("weight_dtype")); wire(other, "MODEL", sampler, "model");""": "its weight_dtype is linked",
        """const ours = put("HalfsafeLoadDiffusionModel", 0, 900); put("PrimitiveNode", 0, 1200).connect(0, ours, ours.findInputSlot("storage")); wire(ours, "MODEL", sampler, "model");""": "its storage is linked",
    }
    for code, said in cases.items():
        draw(comfy, code + "app.graph.remove(model);")
        in_page(comfy, "await measure();")
        before = prompt(comfy)
        told = in_page(comfy, """return textOf(await use({ storage: "int8", compute: "bf16" }));""")
        assert told.startswith("Nothing was changed: ") and said in told, told
        assert prompt(comfy) == before


@pytest.mark.once  # what is set
def test_after_the_answer_is_used_a_rule_of_before_does_not_stay(comfy: ComfyPage) -> None:
    draw(comfy, USED_ON["behind the one node"][0])
    told = []
    for compute, rules in (
        ("fp32", "compute=fp32 stream=fp32"),
        ("fp16_safe", "compute=fp16_safe stream=fp32"),
        ("auto", ""),
    ):
        told.append(
            in_page(
                comfy,
                f"await measure(); await use({json.dumps({'storage': 'as_file', 'compute': compute, 'rules': rules})}); return (await prompt());",
            )
        )
    lines = [steps[of_class(steps, "HalfsafeAutoPrecision")[0]["rules"][0]]["inputs"]["rules"] for steps in told]
    assert lines == ["* compute=fp32 stream=fp32  # measured", "* compute=fp16_safe stream=fp32  # measured", ""]
