"""What the server words is told in Chinese: errors as a toast and a card, what guards of VAEs and text encoders say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage
from halfsafe.precision.base.errors import CheckpointError, HalfsafeError
from halfsafe.precision.base.message import Message, joined, messages_in
from halfsafe.precision.guard.localize import Origin
from halfsafe.precision.guard.log import CallPosition, sentence
from halfsafe.precision.guard.verdicts import ENCODERS, FAILS_IN_FP32, VERDICTS, NonFinite
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.report.result import BEST, COMPUTED_IN, ERROR, FIGURES, Result
from halfsafe.precision.study.tradeoffs_text import REFERENCE
from support.page_words import english_in

WORDS = json.loads((Path(__file__).absolute().parents[2] / "locales" / "zh" / "main.json").read_text(encoding="utf-8"))[
    "halfsafe"
]
TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"
KEEP = (
    """async (messages) => { const { keep } = await import("/extensions/Halfsafe-Pack/words.mjs"); keep(messages); }"""
)
SAID = """async (texts) => { const { said } = await import("/extensions/Halfsafe-Pack/words.mjs"); return texts.map(said); }"""
SHOWN = """async (result) => { const { ResultPanel } = await import("/extensions/Halfsafe-Pack/result.mjs"); const panel = new ResultPanel(1); panel.show(result);
    return [...panel.element.querySelectorAll(".hs-sentence, td")].map((part) => part.textContent); }"""
DRAWN = """() => app.graph.nodes[0].widgets.find((widget) => widget.name === "$$node-text-preview")?.value"""
TOLD = """async (texts) => { const { errorOf } = await import("/extensions/Halfsafe-Pack/run.mjs");
    return texts.map((text) => { const { message, advice } = errorOf({ node_id: 1, exception_type: "halfsafe.HalfsafeError", exception_message: `${text}\n` }, null); return [...message, ...advice].filter(Boolean).join(" "); }); }"""
pytestmark = [
    pytest.mark.language("zh"),
    pytest.mark.once,
]  # words and what becomes of them; test_results draws errors in each page
ORIGIN = Origin("decoder.mid", "conv2d", "overflow", "", 70000.0)


def error_of(make: Callable[[], object]) -> str:
    with pytest.raises(HalfsafeError) as caught:
        make()
    return str(caught.value)


def test_an_error_is_known_where_a_file_and_a_tensor_stand_before_it(comfy: ComfyPage) -> None:
    problem, advice = "a weight of shape {0}, expected {1} dimensions", "Check the path."
    error = str(CheckpointError("/new models/my model.safetensors", Message(problem, "(3, 4)", 3), "a.b", advice))
    comfy.send("halfsafe.messages", text=error, messages=messages_in(error))
    (told,) = comfy.evaluate(TOLD, [error])
    tensor = WORDS["tensor '{0}': {1}."].format("a.b", WORDS[problem].format("(3, 4)", 3))
    assert told == f"my model.safetensors\uff1a{tensor} {WORDS[advice]}"


def test_an_error_is_a_toast_and_a_card_in_chinese(comfy: ComfyPage, pictures: Path, cell: str) -> None:
    rules = error_of(lambda: rules_from("blocks.0\nblocks.1 storage=bf17\nrole:nose storage=bf16").own)
    shown = comfy.record_toasts()
    comfy.add("HalfsafeLayerRules")
    error = {
        "node_id": "1",
        "prompt_id": "bad",
        "node_type": "HalfsafeLayerRules",
        "traceback": [],
        "executed": [],
        "exception_type": "halfsafe.RuleError",
    }
    comfy.send("execution_start", prompt_id="bad")
    comfy.send("halfsafe.messages", text=rules, messages=messages_in(rules))
    comfy.send("execution_error", **{**error, "exception_message": f"{rules}\n"})
    (toast,) = shown()
    assert toast["summary"].startswith("Halfsafe: \u89c4\u5219\uff0c\u7b2c 1 \u884c"), toast
    comfy.evaluate(TAB)
    comfy.page.wait_for_selector(".hs-sidebar .hs-error")
    card = comfy.page.text_content(".hs-run")
    comfy.screenshot(pictures, f"sidebar-error-zh-{cell}")
    assert card.count("\u89c4\u5219\uff0c\u7b2c") == 3 and english_in(card + toast["detail"]) == [], card


def test_the_error_of_a_guard_is_told_as_its_event(comfy: ComfyPage) -> None:
    position = CallPosition(1, 3, 0.7, [0])
    event = position.event(ORIGIN, "fp16", "fp16", False)
    error = NonFinite(sentence(event, ORIGIN), "stopped")
    comfy.send("execution_start", prompt_id="nan")
    told = {
        "call": 1,
        "step": 3,
        "sigma": 0.7,
        "layer": ORIGIN.layer,
        "op": "",
        "kind": "overflow",
        "batch_rows": [0],
        "from": "fp16",
        "to": "fp16",
        "recovered": False,
        "ended": True,
    }
    shown = comfy.record_toasts()
    comfy.send_guard(
        prompt_id="nan", verdict="stopped", message=sentence(event, ORIGIN), advice=error.advice, event=told
    )
    detail = {
        "node_id": "1",
        "prompt_id": "nan",
        "exception_type": "halfsafe.NonFinite",
        "exception_message": str(error),
    }
    comfy.send("execution_error", **detail)
    (toast,) = shown()
    assert (
        WORDS["The result became NaN or Inf"] in toast["detail"]
        and english_in(toast["detail"]) == []
        and "decoder.mid" in toast["detail"]
    ), toast
    comfy.evaluate(TAB)
    comfy.page.wait_for_selector(".hs-sidebar .hs-error")
    card = comfy.page.text_content(".hs-run")
    assert (
        WORDS[VERDICTS["stopped"].advice].replace("{switch}", WORDS["the guard"]) in card and english_in(card) == []
    ), card
    assert "\u3002 " not in card, "a full-width stop has its space in itself"


def test_a_value_that_is_words_is_told_in_chinese(comfy: ComfyPage) -> None:
    in_english, in_chinese = (
        {
            "name": Message(say(COMPUTED_IN), "int8", "bf16"),
            "time": Message(say("{0} s a step ({1} {2})"), "1.00", "bf16", "2.00"),
            "memory": "50.00 MiB (100.00 MiB)",
            "close": Message(say(ERROR), "1.3 %"),
        }
        for say in (str, WORDS.get)
    )
    best = joined([Message(BEST, **in_english), Message(FIGURES, **in_english)])
    result = Result(best, head=["setting"], rows=[[f"fp32 {REFERENCE}"]])
    comfy.evaluate(KEEP, messages_in(result.sentence))
    assert comfy.evaluate(SHOWN, asdict(result)) == [
        (WORDS[BEST] + WORDS[FIGURES]).format(**in_chinese),
        f"fp32 {WORDS[REFERENCE]}",
    ]
    progress = Message("step {0} of {1} to {2}: {3}", 3, 8, 60, Message("measuring {0} layers", 40))
    comfy.add("HalfsafeAnalyzeLayers")
    comfy.send("halfsafe.messages", text=progress, messages=messages_in(progress))
    comfy.send("progress_text", nodeId="1", text=f"Halfsafe: {progress}")
    assert comfy.found(DRAWN, f"Halfsafe: {comfy.evaluate(SAID, [progress])[0]}") != f"Halfsafe: {progress}"


def test_guards_of_encoders_speak_chinese(comfy: ComfyPage) -> None:
    position = CallPosition(1, 0, math.nan, [0, 1])
    wording = ENCODERS["VAE"]
    failed = sentence(position.event(ORIGIN, "fp16", "fp16", False, FAILS_IN_FP32), ORIGIN)
    repeated = Origin("Text encoder encode", "", "overflow", "", math.nan)
    cured = sentence(position.event(repeated, "fp16", "bf16", True), repeated)
    texts = [failed, cured, wording.no_memory, *wording.advice.values()]
    comfy.evaluate(KEEP, messages_in(texts))
    said = comfy.evaluate(SAID, texts)
    assert [english_in(text) for text in said] == [[]] * len(texts), said
    assert said[0].endswith(WORDS[FAILS_IN_FP32]) and WORDS["The result became NaN or Inf"] in said[0]
