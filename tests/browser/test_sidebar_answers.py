"""The answer to what was just pressed is the large one, and a run of other settings is said to be an earlier one."""

from __future__ import annotations

import json

import pytest
from browser.comfy_page import ComfyPage
from browser.test_guard import EVENT
from browser.test_sidebar import DID, OPEN_WHY
from browser.test_sidebar_words import (
    GONE,
    MOST,
    MOST_IN_A_RESULT,
    OUT,
    PICTURE,
    RESULTS,
    WORDS,
    bar,  # noqa: F401  a fixture
    halved,
    pictures,
    put_guard_in,
    queue,
    show,
    start,
    tell,
)
from halfsafe.precision.base.message import Message, joined, messages_in
from halfsafe.precision.devices.measurements import BRIEF, RANGE
from halfsafe.precision.guard.verdicts import EVERY_RUN, NAN_GUARD, ONE_NODE, VERDICTS, Place
from halfsafe.precision.report.result import COMPUTES_IN, FAST, IN_INT8, Result

LARGE = "() => [...document.querySelectorAll('.hs-answer .hs-headline')].map((e) => e.innerText)"
RUN = "() => document.querySelector('.hs-run').innerText.replaceAll('\\n\\n', '\\n')"
FIGURES = "(column) => [...document.querySelectorAll('.hs-choice')].map((row) => row.querySelectorAll('.hs-fig')[column].querySelectorAll('.hs-track').length)"
PARTS = "() => ['.hs-bar > span', '.hs-key'].map((part) => [...document.querySelectorAll(`.hs-stored ${part}`)].map((e) => [e.title, e.innerText.trim()]))"
LIST = """() => { const list = document.querySelector(".hs-list"), [{ left, right }, inner] = [list, list.querySelector("span")].map((e) => e.getBoundingClientRect());
    return [list.innerText.split("\\n").at(-1).trim(), left <= inner.left && inner.right <= right && right <= document.querySelector(".hs-sidebar").getBoundingClientRect().right]; }"""
SET = "([type, name, value]) => { app.graph.nodes.find((n) => n.type === type).widgets.find((w) => w.name === name).value = value; }"
OF = "([type, name]) => app.graph.nodes.find((n) => n.type === type).widgets.find((w) => w.name === name).value"


def press(comfy: ComfyPage, name: str) -> None:
    before = comfy.evaluate(DID)
    comfy.page.locator(".hs-sidebar .hs-button", has_text=name).first.click()
    comfy.page.wait_for_function(f"(before) => ({DID})() !== before", arg=before)
    comfy.settle()


def few(comfy: ComfyPage, state: str) -> None:
    """Whatever was pressed after a run, what is seen stays short."""
    told, whole = (comfy.evaluate(WORDS, selector) for selector in (".hs-did", ".hs-sidebar"))
    assert len(told) <= MOST_IN_A_RESULT and len(whole) <= MOST, (state, len(told), len(whole), whole)


ACTS = ("Guard this workflow", "Take the guard out", "Halve the memory", "Put ComfyUI's loaders back", "Measure my card", "Take Measure out")  # fmt: skip


def test_what_was_pressed_is_answered_large_above_the_run(bar: ComfyPage) -> None:  # noqa: F811
    queue(bar, "plain")
    start(bar, "plain")
    bar.send("execution_success", prompt_id="plain")
    assert bar.evaluate(LARGE) == ["This workflow has no guard"]
    for act in ACTS:
        press(bar, act)
        (large,) = bar.evaluate(LARGE)
        assert bar.evaluate(DID).startswith(large) and "no guard" not in bar.evaluate(RUN), act
        order = "() => [...document.querySelectorAll('.hs-did, .hs-run, .hs-actions')].map((e) => e.className)"
        assert bar.evaluate(order) == ["hs-did", "hs-run", "hs-actions"]
        few(bar, act)
    press(bar, "Show me")
    assert bar.evaluate(LARGE) == ["Press Run: left black, right in a format that does not overflow."]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_run_of_other_settings_is_an_earlier_one(bar: ComfyPage, language: str) -> None:  # noqa: F811
    words = {"en": "of an earlier run", "zh": "先前"}[language]
    press(bar, "Halve the memory")
    if language != "en":
        bar.speak(language)
        bar.found("() => document.querySelector('.hs-device')?.textContent.includes('\u8ba1\u7b97')", True)
    queue(bar, f"halved {language}")
    show(bar, f"halved {language}", [halved(243 << 20, 160 << 20)])
    assert bar.evaluate(LARGE) == ["243 \u2192 160\u00a0MiB"]
    bar.page.locator(".hs-actions [data-act=halve]").click()
    bar.page.wait_for_function("() => app.graph.nodes.some((n) => n.type === 'UNETLoader')")
    bar.settle()
    (large,) = bar.evaluate(LARGE)
    assert bar.evaluate(DID) == large, "what was pressed"
    earlier, headline = bar.evaluate(RUN).split("\n")[:2]
    assert words in earlier and headline == "243 \u2192 160\u00a0MiB", "marked, and small"
    assert bar.page.locator(".hs-run .hs-bar").count() == 0
    few(bar, language)
    bar.evaluate("async () => { await app.extensionManager.command.execute('Comfy.Undo'); }")
    assert bar.found(LARGE, ["243 \u2192 160\u00a0MiB"]) == ["243 \u2192 160\u00a0MiB"], "its settings are there again"


def test_a_repair_that_was_taken_out_is_of_an_earlier_run(bar: ComfyPage) -> None:  # noqa: F811
    press(bar, "Guard this workflow")
    guard = bar.evaluate("() => String(app.graph.nodes.find((n) => n.type === 'HalfsafeAutoPrecision').id)")
    queue(bar, "repaired")
    tell(bar, "repaired", guard, [("recovered", EVENT)])
    assert bar.evaluate(LARGE) == ["Black image prevented"]
    press(bar, "Take the guard out")
    assert bar.evaluate(LARGE) == ["The Halfsafe node was removed."]
    assert bar.evaluate(RUN).startswith("of an earlier run\nBlack image prevented")


def reported(bar: ComfyPage, prompt: str, guard: str, place: Place) -> None:  # noqa: F811
    start(bar, prompt)
    told = {"verdict": "stopped", "message": "Step 3.", "advice": place.worded(VERDICTS["stopped"].advice)}
    bar.send_guard(prompt_id=prompt, node_id=guard, **told, event={**GONE, "ended": False})
    bar.send("execution_success", prompt_id=prompt)


@pytest.mark.parametrize(("node", "switch", "place"), [("HalfsafeAutoPrecision", "guard", ONE_NODE), ("HalfsafeNaNGuard", "on_nan", NAN_GUARD), ("HalfsafeGuardVAE", "on_nan", NAN_GUARD)])  # fmt: skip
def test_a_guard_that_only_tells_is_set_to_repair_by_a_button(bar: ComfyPage, node: str, switch: str, place: Place) -> None:  # noqa: F811  # fmt: skip
    guard = bar.evaluate(
        "(type) => { const node = LiteGraph.createNode(type); node.pos = [400, 900]; app.graph.add(node); return String(node.id); }",
        node,
    )
    name = f"Set {switch} to retry_higher"
    reported(bar, f"{node} set", guard, place)
    assert bar.page.locator(".hs-run .hs-button", has_text=name).count() == 0, "it repairs already"
    bar.evaluate(SET, [node, switch, "report"])
    reported(bar, node, guard, place)
    assert bar.evaluate(LARGE) == ["NaN or Inf found"]
    press(bar, name)
    assert bar.evaluate(OF, [node, switch]) == "retry_higher"
    assert bar.evaluate(LARGE) == ["Set to retry_higher: run the workflow."]
    few(bar, node)
    bar.evaluate("async () => { await app.extensionManager.command.execute('Comfy.Undo'); }")
    assert bar.found("() => app.graph.nodes.flatMap((n) => n.widgets ?? []).filter((w) => w.value === 'report').length", 1) == 1  # fmt: skip


def test_the_setting_that_only_tells_is_set_to_repair_by_a_button_and_its_list_is_not_cut(bar: ComfyPage) -> None:  # noqa: F811  # fmt: skip
    bar.page.set_viewport_size({"width": 420, "height": 950})
    bar.set("Halfsafe.WatchEveryRun", "report")
    assert bar.found(LIST, ["report", True]) == ["report", True]
    reported(bar, "watched", "halfsafe_3_0", EVERY_RUN)
    press(bar, "Set Guard every run to retry_higher")
    assert bar.evaluate("() => app.extensionManager.setting.get('Halfsafe.WatchEveryRun')") == "retry_higher"
    assert bar.found(LIST, ["retry_higher", True]) == ["retry_higher", True]
    few(bar, "set")
    options = bar.page.locator(".hs-watch option").all_inner_texts()
    assert options[2].startswith("retry_higher: "), "the open list says what each does"


def test_times_that_cannot_be_ranked_have_no_bars(bar: ComfyPage) -> None:  # noqa: F811
    show(bar, "ranked", RESULTS["measured"])
    assert [bar.evaluate(FIGURES, column) for column in range(3)] == [[1, 1, 1]] * 3
    show(bar, "noisy", RESULTS["noisy"])
    assert [bar.evaluate(FIGURES, column) for column in range(3)] == [[0, 0], [1, 1], [1, 1]]
    assert "0.53\u00a0s" in bar.page.inner_text(".hs-choices"), "as a number it stands"


SLIVERS = {"int8": 100 << 20, "bf16": 50 << 20, "fp32": 1 << 20, "fp16": 1 << 18}


@pytest.mark.parametrize(
    ("left_out", "names"), [((), ["int8", "bf16", "other"]), (("fp16",), ["int8", "bf16", "fp32"])]
)
def test_each_part_of_the_memory_bar_has_a_name(bar: ComfyPage, left_out: tuple[str, ...], names: list[str]) -> None:  # noqa: F811  # fmt: skip
    result = halved(243 << 20, 151 << 20)
    stored = {name: size for name, size in SLIVERS.items() if name not in left_out}
    output = result.ui()
    key = next(name for name in output if name != "text")
    output = {**output, key: (json.dumps({**json.loads(output[key][0]), "stored": stored}),)}
    start(bar, f"parts {names}")
    bar.send("executed", node="1", display_node="1", prompt_id=f"parts {names}", output={name: list(value) for name, value in output.items()})  # fmt: skip
    bar.send("execution_success", prompt_id=f"parts {names}")
    drawn, named = bar.evaluate(PARTS)
    assert [text for _, text in named] == names
    assert [title for title, _ in drawn] == [title for title, _ in named]
    assert all(any(name in title for title, _ in named) for name in stored), "each storage is found"
    bar.evaluate(OPEN_WHY)
    bar.evaluate("() => { for (const why of document.querySelectorAll('.hs-why')) why.open = false; }")


def test_what_a_cured_run_says_of_its_guard_has_few_words(bar: ComfyPage) -> None:  # noqa: F811
    """A run without a guard now, whose guard had checked calls: the run is told by what it was."""
    guard = put_guard_in(bar)
    queue(bar, "checked")
    tell(bar, "checked", guard, [])
    assert bar.evaluate(LARGE) == ["No NaN in 8 calls of the model"]
    bar.evaluate("() => { app.graph.remove(app.graph.nodes.find(({ type }) => type === 'HalfsafeAutoPrecision')); }")
    assert bar.found(RUN, "of an earlier run\nNo NaN in 8 calls of the model").endswith("calls of the model")


FASTER = joined([Message(RANGE, "fp8", "1.2", "16 bit", "A"), Message(RANGE, "int8", Message("{0} to {1}", "1.10", "2.00"), "16 bit", "A10G 1.84, RTX 3060 2.00, RTX 3090 1.10")])  # fmt: skip
FASTEST = "int8: 1.10 to 2.00 times 16 bit's speed (A10G 1.84, RTX 3060 2.00, RTX 3090 1.10)"
SPEED = Message(BRIEF, storage="int8", times="1.10 to 2.00", cards="A10G 1.84, RTX 3060 2.00, RTX 3090 1.10")
OFFER = Result(joined([Message(IN_INT8, before="14.00 MiB", after="5.20 MiB"), FASTER]), use={"storage": "int8"}, sizes=(14 << 20, int(5.2 * 2**20)), speed=SPEED)  # fmt: skip


@pytest.mark.once  # words
@pytest.mark.language("zh")
def test_a_range_of_speeds_has_no_english_word(bar: ComfyPage) -> None:  # noqa: F811
    show(bar, "offer", [OFFER])
    assert "1.10 \u81f3 2.00" in bar.page.inner_text(".hs-answer .hs-line")


def test_an_offer_is_no_result(bar: ComfyPage) -> None:  # noqa: F811
    show(bar, "offer", [OFFER])
    assert bar.evaluate(LARGE) == ["int8 would take 5.2\u00a0MiB"]
    assert bar.page.inner_text(".hs-answer .hs-line") == FASTEST
    assert len(bar.evaluate(WORDS, ".hs-run")) <= MOST_IN_A_RESULT


def test_after_a_halving_the_way_out_of_too_little_memory_is_said(bar: ComfyPage) -> None:  # noqa: F811
    press(bar, "Halve the memory")
    start(bar, "out")
    bar.send("execution_error", prompt_id="out", traceback=["  , in load_models_gpu\n"], **OUT)
    assert bar.page.inner_text(".hs-answer .hs-line").startswith("Halved already: fewer pixels")
    few(bar, "out")


def test_a_halving_tells_what_is_known_of_its_speed_where_int8_gains(bar: ComfyPage) -> None:  # noqa: F811
    sentence = joined([Message(COMPUTES_IN, device="RTX 30xx (Ampere)", compute="fp16"), Message(FAST, fast="int8"), FASTER])  # fmt: skip
    found = {"refused": [], "later": {}, "storages": {}, "int8_gains": True, "sentence": sentence, "speed": SPEED, "messages": messages_in([sentence, SPEED])}  # fmt: skip
    bar.page.route("**/halfsafe/device", lambda route: route.fulfill(json=found))
    try:
        bar.send("reconnected")
        bar.page.wait_for_function("() => document.querySelector('.hs-device').textContent.includes('Ampere')")
        show(bar, "faster", [halved(243 << 20, 160 << 20)])
        assert bar.page.inner_text(".hs-answer .hs-line") == FASTEST
        assert len(bar.evaluate(WORDS, ".hs-run")) <= MOST_IN_A_RESULT
    finally:
        bar.page.unroute("**/halfsafe/device")
        bar.send("reconnected")
        bar.page.wait_for_function("() => document.querySelector('.hs-device').textContent.includes('CPU')")


def test_what_was_found_anew_is_the_answer_beside_what_is_kept(bar: ComfyPage) -> None:  # noqa: F811
    press(bar, "Halve the memory")
    queue(bar, "halved first")
    show(bar, "halved first", [halved(243 << 20, 160 << 20)])
    guard = put_guard_in(bar)
    queue(bar, "guarded then")
    start(bar, "guarded then")
    bar.send("execution_cached", prompt_id="guarded then", nodes=["1"])
    output = {name: list(value) for name, value in halved(243 << 20, 160 << 20).ui().items()}
    bar.send("executed", node="1", display_node="1", prompt_id="guarded then", output=output)
    bar.send("execution_success", prompt_id="guarded then")
    assert bar.evaluate(LARGE) == ["243 \u2192 160\u00a0MiB"], "there is nothing else, and it is no earlier run's"
    assert bar.evaluate(RUN).startswith("243")
    bar.send_guard(prompt_id="guarded then", node_id=guard, kind="calls", verdict="clean", calls=8)
    assert bar.evaluate(LARGE) == ["No NaN in 8 calls of the model"]
    assert "160" not in bar.evaluate(RUN), "it is behind Why"
    bar.evaluate(OPEN_WHY)
    assert "160" in bar.evaluate(RUN)
    bar.evaluate("() => { for (const why of document.querySelectorAll('.hs-why')) why.open = false; }")


OTHER = """() => { const node = LiteGraph.createNode("PreviewImage"); node.pos = [1450, 400]; app.graph.add(node); return String(node.id); }"""


@pytest.mark.parametrize("kind", ["of no model", "animated", "of a model"])
def test_only_a_still_picture_that_a_model_made_is_told_as_black(bar: ComfyPage, kind: str) -> None:  # noqa: F811
    """A mask may be black, and the first frame of a film."""
    node = bar.evaluate("() => String(app.graph.nodes.find(({ type }) => type === 'PreviewImage').id)")
    if kind == "of no model":
        node = bar.evaluate(OTHER)
    pictures(bar, black="#000000")
    try:
        start(bar, kind)
        output = {"images": [{"filename": "black.png", "subfolder": "", "type": "temp"}], "animated": [kind == "animated"]}  # fmt: skip
        bar.send("executed", node=node, display_node=node, prompt_id=kind, output=output)
        bar.send("execution_success", prompt_id=kind)
        if kind == "of a model":
            bar.page.locator(".hs-run", has_text="The picture is black").wait_for()
        bar.page.wait_for_load_state("networkidle")
        bar.settle()
        assert ("The picture is black" in bar.evaluate(RUN)) == (kind == "of a model")
    finally:
        bar.page.unroute(PICTURE)


def test_a_list_may_be_a_function(bar: ComfyPage) -> None:  # noqa: F811
    code = """async () => { const { listOf } = await import("/extensions/Halfsafe-Pack/graph.mjs");
        return [["a"], () => ["a"], undefined, { a: "b" }].map((values) => listOf({ options: { values } })); }"""
    assert bar.evaluate(code) == [["a"], ["a"], [], []]
