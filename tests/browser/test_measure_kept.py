"""*Use this* on a workflow that holds its model in fewer bits: nothing that saves memory is undone without a question, and every button's way back leads to the same prompt."""

from __future__ import annotations

import json

import pytest
from browser.comfy_page import ComfyPage
from browser.test_measure import PAGE, SMALL, draw, of_class, prompt, undone

LIBRARY = f"""{PAGE} const {{ guardWorkflow, unguardWorkflow }} = await import("/extensions/Halfsafe-Pack/guard.mjs"), {{ putLoadersBack }} = await import("/extensions/Halfsafe-Pack/memory.mjs");
    const {{ unmeasureWorkflow }} = await import("/extensions/Halfsafe-Pack/measure.mjs"), {{ outputOf }} = await import("/extensions/Halfsafe-Pack/graph.mjs");
    const of = (type) => allNodes(app).find(({{ comfyClass }}) => comfyClass === type), give = (node, name, value) => {{ node.widgets.find((one) => one.name === name).value = value; }};
    const card = (told) => (typeof told === "string" ? {{ headline: told }} : {{ ...told, choices: told.choices?.map(({{ name }}) => name) }});"""
AS_FILE = """{ storage: "as_file", compute: "auto" }"""
SAFE = """{ storage: "as_file", compute: "fp16_safe", rules: "compute=fp16_safe stream=fp32" }"""
INT8 = """{ storage: "int8", compute: "bf16" }"""
LOADER = "HalfsafeLoadDiffusionModel"
ONE = "HalfsafeAutoPrecision"
SAVED = {
    "halved": ("await halveMemory(app, api);", "The halving would be undone."),
    "set by hand": (f"""await halveMemory(app, api); delete of("{LOADER}").properties.halfsafe_before; give(of("{LOADER}"), "storage", "int8");""", "It was set to storage int8."),
    "chosen by auto at its last run": (
        f"""await halveMemory(app, api); give(of("{LOADER}"), "storage", "auto"); app.nodeOutputs[of("{LOADER}").id] = {{ halfsafe_badge: [["int8 + bf16", "bf16"]] }};""",
        "The halving would be undone.",
    ),
    "cast by ComfyUI": ("""give(of("UNETLoader"), "weight_dtype", "fp8_e5m2");""", "It was set to storage fp8_e5m2."),
    "quantized by the node Halfsafe": (f"""await guardWorkflow(app); give(of("{ONE}"), "storage", "int8");""", "The halving would be undone."),
}  # fmt: skip
"""How a model is held in fewer bits -> the code that does it, and what would be lost."""
RESULT = {
    "sentence": "Best: bf16.", "tone": "good", "head": [], "rows": [], "text": "", "best": [
        {"goals": ["speed", "quality"], "name": "bf16", "use": {"storage": "as_file", "compute": "auto", "rules": ""}},
        {"goals": ["memory"], "name": "fp8", "use": {"storage": "fp8_e4m3fn", "compute": "auto", "rules": ""}},
    ],
}  # fmt: skip


def run(comfy: ComfyPage, code: str) -> object:
    return comfy.evaluate(f"async () => {{ {LIBRARY} {code} }}")


@pytest.mark.parametrize("saved", SAVED)
def test_use_this_asks_before_it_takes_more_memory(comfy: ComfyPage, saved: str) -> None:
    code, lost = SAVED[saved]
    draw(comfy, SMALL)
    comfy.load(comfy.saved())
    told = run(
        comfy,
        f"""{code} await measure(); app.nodeOutputs[of("HalfsafeMeasurePrecisions").id] = {{ halfsafe_result: [{json.dumps(json.dumps(RESULT))}] }};
        await click(); const before = await prompt(); window.asked = await use({AS_FILE}); return {{ told: card(window.asked), before, after: await prompt() }};""",
    )
    assert told["before"] == told["after"], "nothing is changed before it is answered"
    assert told["told"]["headline"].replace("\u00a0", " ") == "This takes 7.2 MiB instead of 5.2 MiB."
    assert told["told"]["line"] == lost and told["told"]["choices"] == ["Smallest: fp8_e4m3fn", "Use it all the same"]
    run(comfy, "await window.asked.choices[1].act();")
    larger = prompt(comfy)
    assert [inputs["storage"] for inputs in of_class(larger, LOADER)] == ["as_file"]
    assert {inputs["storage"] for inputs in of_class(larger, ONE)} <= {"as loaded"}
    assert undone(comfy) == told["before"], "one step"
    smaller = run(
        comfy, f"""window.asked = await use({AS_FILE}); await window.asked.choices[0].act(); return prompt();"""
    )
    holders = of_class(smaller, ONE) or of_class(smaller, LOADER)
    assert [inputs["storage"] for inputs in holders] == ["fp8_e4m3fn"]


@pytest.mark.once  # what is set
def test_use_this_asks_nothing_where_it_takes_no_more(comfy: ComfyPage) -> None:
    """Other 8 bits, another compute dtype of the same storage, and a model that is in 16 bits."""
    draw(comfy, SMALL)
    comfy.load(comfy.saved())
    for first, used, storage in (("await halveMemory(app, api);", INT8, "int8"), ("", AS_FILE, "as_file")):
        told = run(
            comfy,
            f"{first} await measure(); const told = card(await use({used})); return [told.headline, await prompt()];",
        )
        assert f"is set to storage {storage}" in told[0] and of_class(told[1], LOADER)[0]["storage"] == storage
        run(comfy, "await putLoadersBack(app);")
    told = run(
        comfy,
        f"""await guardWorkflow(app); give(of("{ONE}"), "storage", "int8"); await measure(); const told = card(await use({INT8})); return [told.headline, await prompt()];""",
    )
    assert told[0].startswith("Halfsafe is set to storage int8: run the workflow.") and not of_class(told[1], LOADER), (
        "who holds the storage keeps it"
    )


ORDERS = [
    ("guard halve measure use", "unguard back"),
    ("guard halve measure use", "back unguard"),
    ("halve measure guard use", "back unguard"),
    ("measure guard halve", "unmeasure back unguard"),
    ("halve guard measure", "unguard unmeasure back"),
]
BUTTONS = {
    "guard": "await guardWorkflow(app);", "unguard": "await unguardWorkflow(app);", "halve": "await halveMemory(app, api);", "back": "await putLoadersBack(app);",
    "measure": "await measure();", "unmeasure": "await unmeasureWorkflow(app);", "use": f"const told = await use({SAFE}); if (told.choices) await told.choices.at(-1).act();",
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_buttons_on_and_off_in_any_order_give_the_same_prompt(comfy: ComfyPage, order: tuple[str, str]) -> None:
    draw(comfy, SMALL)
    comfy.load(comfy.saved())
    before = prompt(comfy)
    for name in " ".join(order).split():
        run(comfy, BUTTONS[name])
    assert prompt(comfy) == before


def test_use_this_asks_without_figures_where_sizes_are_not_known(comfy: ComfyPage) -> None:
    draw(comfy, SMALL)
    comfy.load(comfy.saved())
    run(comfy, "await halveMemory(app, api); await measure();")
    comfy.page.route("**/halfsafe/halving", lambda route: route.fulfill(json={"loaders": [{}]}))
    before = prompt(comfy)
    try:
        told = run(comfy, f"return card(await use({AS_FILE}));")
    finally:
        comfy.page.unroute("**/halfsafe/halving")
    assert (told["headline"], told["line"]) == ("The halving would be undone.", "")
    assert "Use it all the same" in told["choices"] and prompt(comfy) == before
