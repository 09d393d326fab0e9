"""A workflow guarded, unguarded, measured and unmeasured by the page's own buttons, and what is wrong with the prompts on that way."""

from __future__ import annotations

from collections.abc import Iterator

GUARDED_BY = {
    "MODEL": {"HalfsafeAutoPrecision", "HalfsafeNaNGuard"},
    "VAE": {"HalfsafeAutoPrecision", "HalfsafeGuardVAE"},
    "CLIP": {"HalfsafeAutoPrecision", "HalfsafeGuardCLIP"},
}
ONE_NODE_OUTPUTS = ("model", "clip", "vae")
MEASURED = ("model", "positive", "latent_image")
HIDE = """() => { document.body.style.display = "none"; app.canvas.stopRendering(); app.canvas.draw = () => {};
    window.framesAs = window.requestAnimationFrame; window.requestAnimationFrame = (act) => setTimeout(act); }"""
"""Let a page draw nothing from now on: three times as fast, and all but the view is as before."""
SHOW = """() => { app.canvas.setGraph(app.graph); app.graph.clear(); app.canvas.ds.reset(); window.requestAnimationFrame = window.framesAs; delete app.canvas.draw; app.canvas.startRendering(); document.body.style.display = ""; }"""
"""Let it draw again, beginning with an empty graph: sizes and view of this one are those of a page without a width."""
WALK = """async (workflow) => {
    const { guardWorkflow, isGuard, unguardWorkflow } = await import("/extensions/Halfsafe-Pack/guard.mjs");
    const { isMeasure, measureWorkflow, unmeasureWorkflow } = await import("/extensions/Halfsafe-Pack/measure.mjs");
    const { allNodes } = await import("/extensions/Halfsafe-Pack/graph.mjs");
    if (workflow) await app.loadGraphData(workflow, true, true, app.extensionManager.workflow.activeWorkflow, { silentAssetErrors: true });
    const textOf = (told) => (typeof told === "string" ? told : [told.headline, told.line, ...(told.why ?? [])].filter(Boolean).join(" "));
    const prompt = async () => { const { output } = JSON.parse(JSON.stringify(await app.graphToPrompt()));
        for (const step of Object.values(output)) step.class_type ??= "of an absent pack";
        return output; };
    const frames = async () => { for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame); };
    const drawn = ({ id, graph }) => (graph === app.canvas.graph ? document.querySelector(`.lg-node[data-node-id="${id}"]`)?.offsetHeight ?? 0 : 0);
    const boxOf = (node, top = node.pos[1] - LiteGraph.NODE_TITLE_HEIGHT) => ({ left: node.pos[0], top,
        right: node.pos[0] + Math.max(node.size[0], node.computeSize?.()[0] ?? 0), // the width that the page gives it when the workflow is opened
        bottom: Math.max(node.pos[1] + (node.flags?.collapsed ? 0 : node.size[1]), top + drawn(node)) });
    const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    const around = (node) => [...node.graph.nodes, node.graph.inputNode, node.graph.outputNode].filter((other) => other && other !== node);
    const meets = (node) => around(node).filter((other) => meet(boxOf(node), boxOf(other))).map((other) => `${node.title} lies on ${other.title ?? other.id}`);
    const found = { before: await prompt(), choices: [] };
    found.said = textOf(await guardWorkflow(app));
    await frames();
    const guards = allNodes(app).filter(isGuard);
    found.guards = guards.map(({ type, title, graph }) => ({ type, title, graph: graph.isRootGraph ? "" : graph.id }));
    found.meets = guards.flatMap(meets);
    found.guarded = await prompt();
    if (guards.length) await unguardWorkflow(app);
    found.unguarded = await prompt();
    found.told = await measureWorkflow(app);
    if (found.told.choices) {
        found.choices = found.told.choices.map(({ name }) => name);
        found.told = await found.told.choices.at(-1).act();
    }
    found.told = textOf(found.told);
    await frames();
    const measures = allNodes(app).filter(isMeasure);
    found.measures = measures.map(({ title }) => title);
    found.meets.push(...measures.flatMap(meets));
    found.measured = await prompt();
    if (measures.length) await unmeasureWorkflow(app);
    found.unmeasured = await prompt();
    return found; }"""


def faults_of(found: dict, info: dict) -> Iterator[str]:
    """Yield what is wrong in what `WALK` found, by ComfyUI's node definitions."""
    before, guarded, measured = found["before"], found["guarded"], found["measured"]
    yield from found["meets"]
    for name in ("unguarded", "unmeasured"):
        if found[name] != before:
            yield f"{name}: the prompt is not as before"
    yield from changed_faults(before, guarded)
    yield from unguarded_faults(before, guarded, info, found["said"])
    yield from picture_faults(guarded, info)
    new = guarded.keys() - before.keys()
    if found["guards"] and not new:
        yield "guards were put where nothing runs"
    if found["guards"] and not found["said"].startswith(
        (f"{len(found['guards'])} nodes were added", "1 node was added")
    ):
        yield f"{len(found['guards'])} guards, and told was: {found['said']}"
    if any(measured.get(node) != step for node, step in before.items()):
        yield "measuring changed what was there"
    yield from measure_faults(before, measured, found["told"])


def is_link(value: object) -> bool:
    return isinstance(value, list)


def changed_faults(before: dict, guarded: dict) -> Iterator[str]:
    """Yield inputs that were changed otherwise than by a guard between them and what they were given."""
    new = guarded.keys() - before.keys()
    yield from (f"{node} is gone" for node in before.keys() - guarded.keys())
    yield from (
        f"{guarded[node]['class_type']} is new"
        for node in new
        if not guarded[node]["class_type"].startswith("Halfsafe")
    )
    yield from (f"{node} has no input" for node in new if not any(map(is_link, guarded[node]["inputs"].values())))
    yield from (
        f"{node} has no model"
        for node in new
        if guarded[node]["class_type"] == "HalfsafeAutoPrecision" and "model" not in guarded[node]["inputs"]
    )
    for node in before.keys() & guarded.keys():
        was, now = before[node]["inputs"], guarded[node]["inputs"]
        for name in was.keys() | now.keys():
            given = now.get(name)
            if was.get(name) != given and not (
                is_link(given) and given[0] in new and passed_on(guarded, given) == was.get(name)
            ):
                yield f"{node} {before[node]['class_type']}.{name} was {was.get(name)}, is {given}"


def passed_on(prompt: dict, link: list) -> object:
    """What a guard's output was made from."""
    step = prompt[link[0]]
    single = {"HalfsafeGuardVAE": "vae", "HalfsafeGuardCLIP": "clip"}.get(step["class_type"])
    return step["inputs"].get(single or ONE_NODE_OUTPUTS[link[1]])


def uses_of(prompt: dict, info: dict) -> Iterator[tuple[str, str, str, list]]:
    """Yield (type, node, input, link) where a model, VAE or text encoder is used up, what is in no way to an output left out."""
    for node in leading_to_outputs(prompt, info):
        spec = info.get(prompt[node]["class_type"])
        if (
            spec is None
            or spec["name"].startswith("Halfsafe")
            or spec["name"].endswith("Save")
            or set(spec["output"]) == {"SIGMAS"}
        ):
            continue
        inputs = {
            name: value[0]
            for part in spec["input"].values()
            if isinstance(part, dict)
            for name, value in part.items()
            if isinstance(value, list)
        }
        for name, value in prompt[node]["inputs"].items():
            kind = inputs.get(name)
            if (
                is_link(value)
                and isinstance(kind, str)
                and kind in GUARDED_BY
                and not {kind, "*"} & {str(output) for output in spec["output"]}
            ):
                yield kind, node, name, value


def leading_to_outputs(prompt: dict, info: dict) -> set[str]:
    open_nodes = [node for node, step in prompt.items() if info.get(step["class_type"], {}).get("output_node", True)]
    found = set(open_nodes)
    while open_nodes:
        for value in prompt[open_nodes.pop()]["inputs"].values():
            if is_link(value) and value[0] in prompt and value[0] not in found:
                found.add(value[0])
                open_nodes.append(value[0])
    return found


def unguarded_faults(before: dict, guarded: dict, info: dict, said: str) -> Iterator[str]:
    for kind, node, name, _ in uses_of(before, info):
        given = guarded[node]["inputs"].get(name)
        if given is None or (guarded[given[0]]["class_type"] not in GUARDED_BY[kind] and f"({name})" not in said):
            yield f"{node} {before[node]['class_type']}.{name} is not guarded, and not named"


def picture_faults(guarded: dict, info: dict) -> Iterator[str]:
    """Yield a one node that guards the VAE of sound where another guards that of pictures in the same graph."""
    makes: dict[str, set] = {}
    for kind, node, _, link in uses_of(guarded, info):
        if kind == "VAE":
            makes.setdefault(link[0], set()).update(info[guarded[node]["class_type"]]["output"])
    graph_of = {node: node.rpartition(":")[0] for node in makes}
    for one, made in makes.items():
        others = [
            other
            for other in makes
            if graph_of[other] == graph_of[one]
            and "IMAGE" in makes[other]
            and guarded[other]["class_type"] == "HalfsafeGuardVAE"
        ]
        if guarded[one]["class_type"] == "HalfsafeAutoPrecision" and "AUDIO" in made and others:
            yield f"{one} guards the VAE of sound before {others}"


def measure_faults(before: dict, measured: dict, told: str) -> Iterator[str]:
    new = [measured[node] for node in measured.keys() - before.keys()]
    measures = [step["inputs"] for step in new if step["class_type"] == "HalfsafeMeasurePrecisions"]
    if not measures and (
        new
        or not (
            told == ("This workflow has no sampler with a model.")
            or any(step["class_type"] in told for step in before.values())
        )
    ):
        yield f"nothing is measured, and told was: {told}"
    for given in measures:  # one in each copy of its subgraph
        yield from (f"the measured {name} is missing" for name in MEASURED if not is_link(given.get(name)))
        samplers = [step["inputs"] for step in before.values() if given["latent_image"] in step["inputs"].values()]
        holders = samplers + [
            before[inputs["guider"][0]]["inputs"] for inputs in samplers if is_link(inputs.get("guider"))
        ]
        if not any(given["model"] in inputs.values() and given["positive"] in inputs.values() for inputs in holders):
            yield "what is measured is no sampler's"
