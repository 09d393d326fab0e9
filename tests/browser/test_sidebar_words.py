"""The sidebar is seen before it is read: what it shows of each state has few words, in both languages, and what fits comes first."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from browser.comfy_page import ComfyPage
from browser.test_guard import EVENT, TOGGLE_TAB
from browser.test_sidebar import OPEN_WHY, PLAIN
from halfsafe.precision.base.errors import RuleError
from halfsafe.precision.base.message import Message, joined, messages_in
from halfsafe.precision.guard.verdicts import NAN_GUARD, VERDICTS
from halfsafe.precision.make.weight_errors import AGAIN
from halfsafe.precision.report.result import (
    BEST,
    COMPUTED_IN,
    ERROR,
    FIGURES,
    HOLDS,
    KEPT_IN,
    LESS,
    NEAREST,
    NOT_LESS,
    SAVED,
    SAVED_LARGER,
    SMALLEST,
    UNRANKED,
    Result,
)
from PIL import Image

MOST, MOST_IN_A_RESULT = 70, 25
WORDS = """(selector) => { const part = document.querySelector(selector);
    let text = part.innerText;
    for (const select of part.querySelectorAll("select")) text = text.replace(select.innerText, select.selectedOptions[0].textContent);
    const parts = text.split(/[ \\n\\t]+/), wide = /\\p{Script=Han}/u, cut = new Intl.Segmenter("zh", { granularity: "word" });
    const all = parts.flatMap((part) => (wide.test(part) ? [...cut.segment(part)].filter(({ isWordLike }) => isWordLike).map(({ segment }) => segment) : [part]));
    return all.filter((word) => /[\\p{L}\\p{N}]/u.test(word)); }"""
"""What is drawn, in words: what stands between spaces, a number and its unit being one; a part with Chinese characters in the words that the browser finds
in it. Of a list the chosen option, of what is folded its name."""
FIRST = "() => document.querySelector('.hs-actions .hs-first')?.dataset.act ?? ''"
BOLD = "() => [...document.querySelectorAll('.hs-sidebar *')].filter((e) => e.innerText && Number(getComputedStyle(e).fontWeight) > 500).map((e) => e.innerText)"
GONE = {**EVENT, "recovered": False, "ended": True, "kind": "nan"}
LOST = {"node_id": "9", "exception_type": "halfsafe.NonFinite", "exception_message": "NaN."}
OUT = {"node_id": "1", "exception_type": "torch.OutOfMemoryError", "exception_message": "Allocation on device 0 would exceed allowed memory.\nDevice limit : 23.99 GiB"}  # fmt: skip
USE = {"storage": "int8", "compute": "auto", "rules": ""}
GOALS = {"speed": ("fp8_e4m3fn/fp8", 0.412, 7.3e9, 0.052), "memory": ("int8/bf16", 0.533, 6.9e9, 0.009), "quality": ("bf16", 0.871, 13.3e9, 0.004)}  # fmt: skip


def best_of(*goals: str) -> list[dict]:
    return [
        dict(zip(("goals", "name", "seconds", "bytes", "error", "use"), ([goal], *GOALS[goal], USE), strict=True))
        for goal in goals
    ]


def measured(sentences: tuple[str, ...], *goals: str, **values: object) -> Result:
    shown = {"name": Message(COMPUTED_IN, "int8", "bf16"), "small": "int8", "closest": "bf16", "close": Message(ERROR, "0.9 %")}  # fmt: skip
    time = Message("{0} s a step ({1} {2})", "0.533", "bf16", "0.871")
    numbers = {"time": time, "memory": "6.43 GiB (12.4 GiB)"}
    told = joined(Message(sentence, **shown, **numbers, **values) for sentence in sentences)
    return Result(told, toast=True, use=USE, best=best_of(*goals))


def halved(before: int, after: int, tone: str = "good") -> Result:
    sizes = {"file": "wan2.1_t2v_1.3B_fp16.safetensors", "before": "2706.51 MiB", "after": "1640.20 MiB"}
    kept = {"formats": "bf16 + fp32", "kept": "73.84 MiB", "reasons": "embedding: 72.49 MiB; norms and biases: 237.00 KiB"}  # fmt: skip
    told = joined(Message(text, **sizes, **kept) for text in ((LESS, KEPT_IN) if tone == "good" else (NOT_LESS,)))
    return Result(told, tone, toast=True, sizes=(before, after), stored={"int8": after * 2 // 3, "bf16": after // 3})  # fmt: skip


ROUNDED = {"count": 240, "before": "int8", "after": "fp8_e4m3fn", "error": "2.7%", "names": "blocks.0.ffn.0, blocks.0.ffn.2 and 238 more"}  # fmt: skip
RESULTS = {
    "halved": [halved(2838 << 20, 1720 << 20), halved(236 << 20, 155 << 20)],
    "no smaller": [halved(3 << 20, 3 << 20, "warn")],
    "measured": [measured((BEST, FIGURES), "speed", "memory", "quality")],
    "noisy": [measured((UNRANKED, SMALLEST, NEAREST), "memory", "quality")],
    "saved": [Result(joined([Message(SAVED_LARGER, file="halfsafe_00001_.safetensors", size="5.89 MiB", before="2.95 MiB"), Message(HOLDS, formats="fp32 5.12 MiB, int8 768.00 KiB")]), toast=True)],
    "saved again": [Result(joined([Message(SAVED, file="halfsafe_00001_.safetensors", size="5.89 MiB"), *(Message(text, **ROUNDED) for text in AGAIN)]), toast=True)],
}  # fmt: skip
GUARDS = {
    "clean": [],
    "recovered": [("recovered", EVENT)],
    "no precision": [("not_precision", GONE)],
    "bad input": [("bad_input", {**GONE, "kind": "input", "layer": "latent"})],
    "bad weights": [("bad_weights", GONE)],
    "device": [("device_fault", GONE)],
    "reported": [("stopped", {**GONE, "ended": False})],
}
ADVISED = Message("{culprit}: {cure}", culprit="nan_lora.safetensors holds NaN or Inf", cure=joined(["leave it out or download it again.", "(tensor 'lora_up.weight')"]))  # fmt: skip


def put_guard_in(comfy: ComfyPage) -> str:
    return comfy.evaluate(
        "() => { const node = LiteGraph.createNode('HalfsafeAutoPrecision'); node.pos = [400, 700]; app.graph.add(node); return String(node.id); }"
    )


def start(comfy: ComfyPage, prompt: str) -> None:
    comfy.send("promptQueueing", requestId=1, batchCount=1)
    comfy.send("promptQueued", requestId=1, batchCount=1)
    comfy.send("execution_start", prompt_id=prompt)
    comfy.evaluate("async () => { (await import('/scripts/api.js')).api.dispatchCustomEvent('executing', '1'); }")


def queue(comfy: ComfyPage, prompt: str) -> None:
    """Let the page note a prompt as it does when Run is pressed, so that it knows the settings that the prompt was queued with."""
    comfy.send("promptQueueing", requestId=1, batchCount=1)
    comfy.evaluate(
        """(id) => { const { _p: pinia, workflow } = app.extensionManager;
        pinia._s.get("execution").storeJob({ id, nodes: [], promptOutput: {}, workflow: workflow.activeWorkflow }); }""",
        prompt,
    )
    comfy.send("promptQueued", requestId=1, batchCount=1)


def show(comfy: ComfyPage, prompt: str, results: list[Result]) -> None:
    """Let nodes of the workflow have these results, as after a run."""
    start(comfy, prompt)
    for node, result in enumerate(results, 1):
        output = {name: list(value) for name, value in result.ui().items()}
        comfy.send("executed", node=str(node), display_node=str(node), prompt_id=prompt, output=output)
    comfy.send("execution_success", prompt_id=prompt)


def tell(comfy: ComfyPage, prompt: str, guard: str, told: list[tuple[str, dict]]) -> None:
    """Let a guard say this, as in a run."""
    start(comfy, prompt)
    if not told:
        comfy.send_guard(prompt_id=prompt, node_id=guard, kind="calls", verdict="clean", calls=8)
    for verdict, event in told:
        advice = ADVISED if verdict == "bad_weights" else NAN_GUARD.worded(VERDICTS[verdict].advice)
        brief = "Step 3, sigma 0.7031: blocks.0.ffn.2 overflowed in fp16 and was repeated in fp16 with fp32 results."
        comfy.send_guard(prompt_id=prompt, node_id=guard, verdict=verdict, message=brief, advice=advice, event=event)
    ended = any(event.get("ended") for _, event in told)
    comfy.send("execution_error" if ended else "execution_success", prompt_id=prompt, **(LOST if ended else {}))


@pytest.fixture
def bar(opened_page: ComfyPage) -> ComfyPage:
    """The sidebar beside a plain workflow in a tab of its own, which has not run."""
    opened_page.evaluate("async () => { await app.extensionManager.command.execute('Comfy.NewBlankWorkflow'); }")
    opened_page.evaluate(PLAIN)
    opened_page.evaluate(TOGGLE_TAB)
    opened_page.page.wait_for_selector(".hs-actions button")
    opened_page.page.wait_for_function("() => document.querySelector('.hs-device').textContent.includes('CPU')")
    return opened_page


def few(comfy: ComfyPage, state: str) -> None:
    """What a result says has at most 25 words, with it the whole sidebar at most 70, and none of it is bold."""
    result, whole = (comfy.evaluate(WORDS, selector) for selector in (".hs-run", ".hs-sidebar"))
    assert 0 < len(result) <= MOST_IN_A_RESULT, (state, len(result), result)
    assert len(whole) <= MOST, (state, len(whole), whole)
    assert comfy.evaluate(BOLD) == [], state


@pytest.mark.once  # words
@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_state_of_the_sidebar_has_few_words(bar: ComfyPage, language: str) -> None:
    if language != "en":
        bar.speak(language)
        bar.evaluate(PLAIN)
        bar.found("() => document.querySelector('.hs-device')?.textContent.includes('\u8ba1\u7b97')", True)
    first = bar.evaluate(WORDS, ".hs-sidebar")
    assert 20 < len(first) <= MOST, (len(first), first)
    assert bar.evaluate(WORDS, ".hs-run") == [] and bar.evaluate(BOLD) == []
    guard = put_guard_in(bar)
    states: dict[str, Callable[[], None]] = {
        **{name: lambda name=name, results=results: show(bar, name, results) for name, results in RESULTS.items()},
        **{name: lambda name=name, told=told: tell(bar, name, guard, told) for name, told in GUARDS.items()},
    }
    for name, bring in states.items():
        bring()
        few(bar, name)
    start(bar, "out")
    bar.send("execution_error", prompt_id="out", traceback=["  , in load_models_gpu\n"], **OUT)
    few(bar, "out of memory")
    refused = str(RuleError(1, "'blocks.1 storage=bf17' is not a rule"))
    bar.send("halfsafe.refused", message=refused, messages=messages_in(refused))
    few(bar, "refused")


@pytest.mark.once
def test_what_a_saved_file_lost_is_on_the_card(bar: ComfyPage) -> None:
    """Not in *Why* alone: that it is larger than the model's file, and that weights were quantized again."""
    for state, told in (("saved", ["5.89", "larger", "2.95"]), ("saved again", ["5.89", "again", "2.7%"])):
        show(bar, state, RESULTS[state])
        words = " ".join(bar.evaluate(WORDS, ".hs-run"))
        assert all(word in words for word in told), words


def test_the_action_that_fits_comes_first(bar: ComfyPage) -> None:
    assert bar.evaluate(FIRST) == "measure"
    start(bar, "out")
    bar.send("execution_error", prompt_id="out", traceback=[], **OUT)
    assert bar.evaluate(FIRST) == "halve"
    tell(bar, "lost", put_guard_in(bar), GUARDS["no precision"])
    assert bar.evaluate(FIRST) == "", "a guard is in: no other action is the cure"
    bar.evaluate("() => { app.graph.remove(app.graph.nodes.find(({ type }) => type === 'HalfsafeAutoPrecision')); }")
    assert bar.found(FIRST, "guard") == "guard"
    assert len(bar.evaluate("() => [...document.querySelectorAll('.hs-actions .hs-button')].map((e) => e.dataset.act)")) == 4  # fmt: skip
    bar.evaluate("() => { app.graph.clear(); app.canvas.setDirty(true); }")
    start(bar, "none")
    assert bar.found(FIRST, "showMe") == "showMe", "there is no model"


PICTURE = "**/view?*"


def pictures(bar: ComfyPage, **colours: str) -> None:
    """Answer for pictures of these names with pictures of one colour."""

    def answer(route) -> None:
        name = next(name for name in colours if f"{name}.png" in route.request.url)
        file = io.BytesIO()
        Image.new("RGB", (64, 64), colours[name]).save(file, "PNG")
        route.fulfill(body=file.getvalue(), content_type="image/png")

    bar.page.route(PICTURE, answer)


def drawn(bar: ComfyPage, prompt: str, name: str) -> None:
    node = bar.evaluate("() => String(app.graph.nodes.find(({ type }) => type === 'PreviewImage').id)")
    output = {"images": [{"filename": f"{name}.png", "subfolder": "", "type": "temp"}]}
    bar.send("executed", node=node, display_node=node, prompt_id=prompt, output=output)


def test_a_black_picture_asks_for_a_guard_and_a_cured_one_stands_beside_it(bar: ComfyPage) -> None:
    pictures(bar, black="#000000", dark="#000001", cured="#c04030")
    try:
        for name, headlines in (("dark", 0), ("black", 1)):
            start(bar, name)
            drawn(bar, name, name)
            bar.send("execution_success", prompt_id=name)
            bar.page.wait_for_load_state("networkidle")
            says = "() => Number(document.querySelector('.hs-run').innerText.includes('The picture is black'))"
            assert bar.found(says, headlines) == headlines, name
        assert bar.found(FIRST, "guard") == "guard"
        guard = put_guard_in(bar)
        start(bar, "cured")
        bar.send_guard(prompt_id="cured", node_id=guard, message="Step 3.", advice="", event=EVENT)
        drawn(bar, "cured", "cured")
        bar.send("execution_success", prompt_id="cured")
        bar.page.wait_for_selector(".hs-pictures img >> nth=1")
        shown = "() => [...document.querySelectorAll('.hs-pictures img')].map((e) => /filename=(\\w+)/.exec(e.src)[1])"
        assert bar.evaluate(shown) == ["black", "cured"]
        few(bar, "pictures")
        start(bar, "again")
        bar.send_guard(prompt_id="again", node_id=guard, message="Step 3.", advice="", event=EVENT)
        drawn(bar, "again", "dark")
        bar.send("execution_success", prompt_id="again")
        assert bar.page.locator(".hs-pictures img").count() == 0, "the one before was not black"
    finally:
        bar.page.unroute(PICTURE)


PAIR = "() => [...document.querySelectorAll('.hs-pictures img')].map((e) => /filename=(\\w+)/.exec(e.src)[1])"


def test_a_run_that_is_no_longer_black_says_so_without_a_nan_and_a_good_one_before_is_no_black_one(
    bar: ComfyPage,
) -> None:
    """A device with bf16 plans without fp16: its guard is clean, and the picture is cured all the same."""
    pictures(bar, lost="#000000", found="#c04030", next="#30c040")
    try:
        queue(bar, "lost")
        start(bar, "lost")
        drawn(bar, "lost", "lost")
        bar.send("execution_success", prompt_id="lost")
        bar.page.wait_for_selector(".hs-run :text('The picture is black')")
        guard = put_guard_in(bar)
        assert (
            bar.found("() => document.querySelector('.hs-run').innerText.includes('Nothing was checked')", False)
            is False
        )
        start(bar, "found")
        bar.send_guard(prompt_id="found", node_id=guard, kind="calls", verdict="clean", calls=2)
        drawn(bar, "found", "found")
        bar.send("execution_success", prompt_id="found")
        bar.page.wait_for_selector(".hs-pictures img >> nth=1")
        assert bar.evaluate(PAIR) == ["lost", "found"]
        assert "The picture is no longer black" in bar.page.inner_text(".hs-run")
        start(bar, "next")
        bar.send_guard(prompt_id="next", node_id=guard, message="Step 3.", advice="", event=EVENT)
        drawn(bar, "next", "next")
        bar.send("execution_success", prompt_id="next")
        bar.page.wait_for_selector(".hs-run :text('Black image prevented')")
        assert bar.evaluate(PAIR) == [], "the picture before was a good one"
    finally:
        bar.page.unroute(PICTURE)


def test_a_halving_is_one_number_with_a_bar_and_measure_three_rows(bar: ComfyPage) -> None:
    show(bar, "halved", RESULTS["halved"])
    assert bar.page.inner_text(".hs-answer .hs-headline") == "3.0 \u2192 1.8\u00a0GiB"
    widths = bar.evaluate("() => { const bar = document.querySelector('.hs-stored .hs-bar'), { width } = bar.getBoundingClientRect(); return [...bar.children].map((e) => e.getBoundingClientRect().width / width); }")  # fmt: skip
    assert sum(widths) == pytest.approx(1875 / 3074, abs=0.02) and widths[0] == pytest.approx(2 * widths[1], rel=0.05)
    assert "norms and biases" not in bar.page.inner_text(".hs-run")
    bar.evaluate(OPEN_WHY)
    assert bar.page.inner_text(".hs-run").count("norms and biases") == 2
    show(bar, "measured", RESULTS["measured"])
    rows = "() => [...document.querySelectorAll('.hs-choice')].map((row) => [row.querySelector('.hs-choice-name').innerText, ...[...row.querySelectorAll('.hs-fig')].map((e) => e.innerText.trim())])"
    assert bar.evaluate(rows) == [
        ["Fastest fp8_e4m3fn/fp8", "0.41\u00a0s", "6.8\u00a0GiB", "5.2\u00a0%"],
        ["Smallest int8/bf16", "0.53\u00a0s", "6.4\u00a0GiB", "0.9\u00a0%"],
        ["Closest bf16", "0.87\u00a0s", "12\u00a0GiB", "0.4\u00a0%"],
    ]
    longest = "() => [0, 1, 2].map((column) => [...document.querySelectorAll('.hs-choice')].findIndex((row) => row.querySelectorAll('.hs-track > span')[column].style.width === '100%'))"
    assert bar.evaluate(longest) == [2, 2, 0], "each column has its own scale"
    assert bar.page.locator(".hs-choice .hs-button", has_text="Use this").count() == 3
    bar.evaluate("() => { for (const why of document.querySelectorAll('.hs-why')) why.open = false; }")


def test_halving_moves_the_view_to_the_loaders(bar: ComfyPage) -> None:
    bar.evaluate("() => { const { ds } = app.canvas; ds.scale = 1; ds.offset[0] = -1400; ds.offset[1] = 0; }")
    bar.page.locator(".hs-sidebar .hs-button", has_text="Halve the memory").click()
    bar.page.wait_for_function("() => app.canvas.selectedItems.size === 2")
    bar.settle()
    seen = "() => { const { ds, canvas } = app.canvas, left = document.querySelector('.hs-sidebar').getBoundingClientRect().right - canvas.getBoundingClientRect().left; return [...app.canvas.selectedItems].every(({ pos }) => (pos[0] + ds.offset[0]) * ds.scale >= Math.max(0, left)); }"
    assert bar.evaluate(seen), "the sidebar covers none of them"
