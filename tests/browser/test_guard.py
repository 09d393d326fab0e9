"""What a guard says, in the page: toasts, lines on the report, the sidebar; told by the page's own event, then by a real run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from browser.comfy_page import WORKFLOWS, ComfyPage
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.base.message import Message, joined, messages_in
from halfsafe.precision.guard.verdicts import VERDICTS
from halfsafe.precision.report.schema import GuardReport, LayerReport, ModelReport, Report

EVENT = {
    "call": 1, "step": 3, "sigma": 0.7031, "layer": "blocks.0.ffn.2", "op": "", "kind": "overflow", "batch_rows": [0],
    "from": "fp16", "to": "fp16_wide", "recovered": True,
}  # fmt: skip
TOGGLE_TAB = "async () => { await app.extensionManager.command.execute('Workspace.ToggleSidebarTab.halfsafe'); }"
PUT_GUARD_IN = """() => { const of = (type) => app.graph.nodes.find((n) => n.type === type);
    const loader = of("HalfsafeLoadDiffusionModel"), guard = LiteGraph.createNode("HalfsafeNaNGuard");
    const values = { model_name: "wan_overflowing.safetensors", storage: "fp16", compute: "fp16" };
    for (const widget of loader.widgets) widget.value = values[widget.name] ?? widget.value;
    guard.widgets.find((widget) => widget.name === "max_retries").value = 7;  // another guard than those of other tests, which have learned
    app.graph.add(guard);
    loader.connect(0, guard, "model"); guard.connect(0, of("KSampler"), "model"); guard.connect(0, of("HalfsafeReport"), "model"); }"""

PLAIN_FP16 = """() => { const loader = app.graph.nodes.find((n) => n.type === "HalfsafeLoadDiffusionModel");
    const values = { model_name: "wan_overflowing.safetensors", storage: "fp16", compute: "fp16" };
    for (const widget of loader.widgets) widget.value = values[widget.name] ?? widget.value; }"""

PUT_STALE_CACHE_IN = """() => { const of = (type) => app.graph.nodes.find((n) => n.type === type);
    const guard = LiteGraph.createNode("HalfsafeNaNGuard"), cache = LiteGraph.createNode("EasyCache");
    const put = (node, values) => { for (const widget of node.widgets) widget.value = values[widget.name] ?? widget.value; };
    put(of("HalfsafeLoadDiffusionModel"), { compute: "bf16" });
    put(guard, { check: "every 5th step" }); put(of("KSampler"), { steps: 6, cfg: 6 });
    put(cache, { reuse_threshold: 3.0, start_percent: 0.0, end_percent: 1.0 });
    app.graph.add(guard); app.graph.add(cache);
    of("HalfsafeLoadDiffusionModel").connect(0, cache, "model"); cache.connect(0, guard, "model");
    guard.connect(0, of("KSampler"), "model"); guard.connect(0, of("HalfsafeReport"), "model"); }"""

DEVICE = {"name": "CPU", "profile": "cpu", "simulated": False, "capabilities": {}}
REPORT = Report(
    DEVICE,
    ModelReport("WAN21", 1, 2, {"bf16": 2}),
    [LayerReport("blocks.0", "Linear", "bf16", "bf16", "fp32", "bf16")],
    guard=GuardReport("recovered", 2),
).to_json()
WORDS = json.loads((WORKFLOWS.parent / "locales" / "zh" / "main.json").read_text(encoding="utf-8"))["halfsafe"]
ADVICE = VERDICTS["bad_weights"].advice
ENGLISH = """(selector) => [...document.querySelectorAll(selector)].flatMap((e) => e.textContent.match(/[a-z]+ [a-z]+ [a-z]+ [a-z]+/g) ?? [])"""


@pytest.fixture
def comfy(opened_page) -> ComfyPage:
    """A page with a report and a guard node on it, the guard before the report."""
    opened_page.add("HalfsafeLoadDiffusionModel", "HalfsafeNaNGuard", "HalfsafeReport")
    opened_page.evaluate(
        "() => { const [load, guard, report] = app.graph.nodes; load.connect(0, guard, 'model'); guard.connect(0, report, 'model'); guard.setSize([420, guard.size[1]]); }"
    )  # a badge keeps to its node
    return opened_page


def guard_id(comfy: ComfyPage) -> str:
    return comfy.evaluate("() => String(app.graph.nodes.find((n) => n.type === 'HalfsafeNaNGuard').id)")


def tell(comfy: ComfyPage, prompt_id: str, count: int = 1, **message: object) -> None:
    for number in range(count):
        event = {**EVENT, "step": number, "layer": f"blocks.{number}.ffn.2"}
        text = f"Step {number}: blocks.{number}.ffn.2 overflowed in fp16 and was repeated in fp16_wide."
        brief = message.get("message", text.replace("fp16_wide", "fp16 with fp32 results"))
        comfy.send_guard(
            **{
                "node_id": guard_id(comfy),
                "prompt_id": prompt_id,
                "message": text,
                "brief": brief,
                "event": event,
                **message,
            }
        )


@pytest.mark.drawn
def test_an_event_shows_a_toast_and_a_line_until_run_is_pressed(comfy: ComfyPage, pictures: Path, cell: str) -> None:
    comfy.zoom_to("HalfsafeReport", 460, 480)
    tell(comfy, "one")
    comfy.page.wait_for_selector("text=Halfsafe: Black image prevented")
    comfy.page.wait_for_selector(".hs-guard .hs-event")
    comfy.screenshot(pictures, f"toast-{cell}")
    assert "repeated in fp16 with fp32 results" in comfy.page.inner_text(".hs-guard"), "nobody can choose fp16_wide"
    tell(comfy, "one", kind="verdict", verdict="stopped", event=None, message="Told.")
    messages = comfy.page.locator("li[role=alert], .p-toast-message", has_text="Halfsafe: ")
    messages.nth(1).wait_for()
    comfy.send("execution_success", prompt_id="one")
    messages.nth(2).wait_for(state="detached")
    assert messages.count() == 2, "what is told again takes its own place"
    comfy.send("promptQueueing", requestId=1, batchCount=1)
    messages.first.wait_for(state="detached")


def test_a_cause_is_told_once_and_lines_are_all_there(comfy: ComfyPage) -> None:
    shown = comfy.record_toasts()
    tell(comfy, "two", count=12)
    assert comfy.page.locator(".hs-guard .hs-event").count() == 12
    assert (
        comfy.page.locator(".hs-guard > .hs-event").count() == 5
        and comfy.page.inner_text(".hs-guard .hs-rest summary") == "7 more"
    )
    comfy.page.locator(".hs-guard .hs-rest").evaluate("(rest) => { rest.open = true; }")
    tell(comfy, "two", kind="verdict", event=None, message="12 events, all recovered.")
    (toast,) = shown()
    assert toast["detail"] == "Step 0 was repeated in fp16 with fp32 results: blocks.0.ffn.2 overflowed in fp16."
    tell(comfy, "two", verdict="not_precision")
    assert len(shown()) == 2
    tell(comfy, "two", count=50)
    assert comfy.page.locator(".hs-guard .hs-event").count() == 50
    assert "and 13 more" in comfy.page.inner_text(".hs-guard"), "what was unfolded stays so"
    comfy.set("halfsafe.toasts", False)
    tell(comfy, "four", count=2)
    tell(
        comfy,
        "four",
        node_id=comfy.evaluate(
            "() => { const node = LiteGraph.createNode('HalfsafeNaNGuard'); app.graph.add(node); return String(node.id); }"
        ),
    )
    assert len(shown()) == 2 and comfy.page.locator(".hs-guard .hs-event").count() == 2, (
        "another model's guard is not shown"
    )


def test_a_badge_says_what_a_model_fell_back_to_until_its_node_runs_anew(comfy: ComfyPage) -> None:
    node = guard_id(comfy)

    def badge_after(*cached: str, end: str = "execution_success") -> str:
        for event, detail in (("execution_start", {}), ("execution_cached", {"nodes": list(cached)}), (end, {})):
            comfy.send(event, prompt_id="shown", **detail)
        comfy.show({node: {"halfsafe_badge": [["fp32", "fp16", "guarded"]]}})
        return comfy.badges()["HalfsafeNaNGuard"]

    assert badge_after(end="") == "fp32 \u00b7 plans fp16 \u00b7 guarded", "it runs yet"
    assert badge_after() == "fp32 \u00b7 fp16 \u00b7 guarded"
    tell(comfy, "shown", node_id="a guard of its own", fell_back=node)
    assert comfy.badges()["HalfsafeNaNGuard"] == "fp32 \u00b7 fp16_safe \u00b7 guarded"
    assert badge_after(node) == "fp32 \u00b7 fp16_safe \u00b7 guarded", (
        "the server sends a cached node's badge again as it was planned"
    )
    assert badge_after() == "fp32 \u00b7 fp16 \u00b7 guarded"
    tell(
        comfy,
        "shown",
        kind="verdict",
        verdict="clean",
        event=None,
        message="Started as the last repair ended, with these in a higher precision: blocks.0.",
    )
    assert (
        comfy.badges()["HalfsafeNaNGuard"] == badge_after(node) == "fp32 \u00b7 fp16, some layers wider \u00b7 guarded"
    )


def test_a_real_overflow_is_told_while_it_runs_and_in_the_report(
    opened_page: ComfyPage, pictures: Path, cell: str
) -> None:
    comfy = opened_page
    comfy.load_small()
    comfy.evaluate(PUT_GUARD_IN)
    comfy.load(comfy.saved())
    shown = comfy.record_toasts()
    comfy.run()
    assert shown() and all("blocks." in toast["summary"] + toast["detail"] for toast in shown())
    comfy.page.wait_for_selector(".hs-guard .hs-event")
    comfy.zoom_to("HalfsafeReport", 520, 640)
    comfy.screenshot(pictures, f"guard-{cell}")
    assert comfy.page.inner_text(".hs-title .hs-verdict") == "recovered"
    text = comfy.page.inner_text(".hs-guard")
    assert "blocks.0.ffn" in text and "recovered" in text and "repeated" in text
    comfy.page.fill(".hs-filter", "blocks.0.ffn.2")
    assert comfy.page.locator(".hs-table .hs-up").count() == 1
    comfy.page.fill(".hs-filter", "")
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.wait_for_selector(".hs-sidebar .hs-bar", state="attached")
    comfy.screenshot(pictures, f"sidebar-{cell}")
    assert "WAN21" in comfy.page.text_content(".hs-sidebar .hs-fold")
    assert "Black image prevented" in comfy.page.inner_text(".hs-answer")


@pytest.mark.once  # a run is the server's, words are the pack's; test_nodes changes the language of each page
def test_a_drift_is_told_and_stays_on_the_report_when_the_language_changes(
    opened_page: ComfyPage, pictures: Path, cell: str
) -> None:
    comfy = opened_page
    comfy.load_small()
    comfy.evaluate(PUT_STALE_CACHE_IN)
    comfy.load(comfy.saved())
    shown = comfy.record_toasts()
    comfy.run()
    summaries = [
        toast["summary"] for toast in shown() if "MiB" not in toast["summary"]
    ]  # the loader tells what it holds
    assert summaries == ["Halfsafe: A step is farther from fp32 than it should be"]
    comfy.page.wait_for_selector(".hs-guard .hs-event")
    comfy.zoom_to("HalfsafeReport", 520, 640)
    comfy.screenshot(pictures, f"drift-{cell}")
    assert comfy.page.inner_text(".hs-title .hs-verdict") == "drift"
    text = comfy.page.inner_text(".hs-guard")
    assert text.count("lower the threshold of the step cache") == 1 and text.count("lowest after: ") == 1, text
    assert "6 calls, 2 repeats" in text and "step 0: " in text, text
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.wait_for_selector(".hs-sidebar .hs-answer")
    assert comfy.page.inner_text(".hs-answer .hs-headline") == "A step is farther from fp32 than it should be"
    assert comfy.page.locator(".hs-sidebar .hs-verdict").all_text_contents() == ["drift"]
    comfy.evaluate(TOGGLE_TAB)
    comfy.speak("zh")
    comfy.page.wait_for_function(
        "() => [...document.querySelectorAll('.hs-verdict')].some((pill) => pill.textContent === '\u504f\u5dee')"
    )
    for selector in (".hs-guard", ".hs-remark", ".hs-sidebar"):
        assert (found := comfy.evaluate(ENGLISH, selector)) == [], found
    tell(
        comfy,
        "zh",
        kind="verdict",
        verdict="bad_weights",
        event=None,
        message=Message("Guard: {0}.", "bad weights"),
        advice=ADVICE,
    )
    (toast,) = [
        toast for toast in shown() if toast["summary"].startswith("Halfsafe: ") and "MiB" not in toast["summary"]
    ][1:]
    assert (toast["summary"], toast["detail"]) == (
        f"Halfsafe: {WORDS['A weight is NaN']}",
        f"\u9632\u62a4\uff1a{WORDS['bad weights']}\u3002",
    )
    comfy.send("execution_success", prompt_id="zh")
    comfy.speak("en")
    comfy.page.wait_for_function(
        "(text) => [...document.querySelectorAll('.hs-guard')].some((guard) => guard.innerText === text)", arg=text
    )


def test_the_sidebar_tells_the_last_run_and_a_rescue_before_it_in_its_queue(
    comfy: ComfyPage, pictures: Path, cell: str
) -> None:
    shown, cured = (
        comfy.record_toasts(),
        "Step 0 was repeated in fp16 with fp32 results: blocks.0.ffn.2 overflowed in fp16.",
    )
    comfy.send("promptQueueing", requestId=1, batchCount=1)
    comfy.send("execution_start", prompt_id="first")
    tell(comfy, "first", count=2)
    tell(
        comfy,
        "first",
        kind="verdict",
        event=None,
        message="2 events in 2 layers, all recovered.",
        advice="Nothing to do.",
    )
    for prompt in ("second", "third"):
        comfy.send("execution_success", prompt_id="first")
        comfy.send("execution_start", prompt_id=prompt)
        tell(
            comfy,
            prompt,
            kind="verdict",
            verdict="clean",
            event=None,
            message="Started as the last repair ended, with these in a higher precision: blocks.0.",
        )
        assert [toast["detail"] for toast in shown()] == [cured, cured, f"Previous run: {cured}"]
        comfy.evaluate(TOGGLE_TAB)
        comfy.page.wait_for_selector(".hs-sidebar .hs-card")
        comfy.screenshot(pictures, f"sidebar-guard-{cell}")
        assert "Earlier in this queue" in comfy.page.inner_text(".hs-run")
        last, before = comfy.page.locator(".hs-reason-of").all_text_contents()
        cards = comfy.page.locator(".hs-sidebar article").all_inner_texts()
        comfy.evaluate(TOGGLE_TAB)
        assert (
            "Started as the last repair ended" in last
            and "Black image prevented" in cards[-1]
            and "blocks.1.ffn.2 overflowed" in before
            and "Nothing to do." in before
        )
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.click(".hs-run .hs-why > summary")
    comfy.page.click(".hs-sidebar .hs-link")
    assert comfy.evaluate("() => [...app.canvas.selectedItems].map((n) => n.type)") == ["HalfsafeNaNGuard"]
    comfy.send("execution_success", prompt_id="third")
    comfy.send("promptQueueing", requestId=1, batchCount=1)
    comfy.send("execution_start", prompt_id="fourth")
    assert "Earlier in this queue" not in comfy.page.inner_text(".hs-sidebar"), "it was not queued behind one"
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.wait_for_selector(".hs-sidebar", state="detached")


def test_a_run_that_ends_is_told_once_by_what_is_at_fault(comfy: ComfyPage, pictures: Path, cell: str) -> None:
    """The report of the run before is told to be of that one, and the error that ComfyUI shows is on the guard's card."""
    shown, sentence = (
        comfy.record_toasts(),
        "Step 0, sigma 1: A weight is not finite in blocks.0.ffn.2, computed in fp16.",
    )
    comfy.send("execution_start", prompt_id="clean")
    comfy.show_report(REPORT)
    comfy.send("execution_success", prompt_id="clean")
    assert "blocks" in comfy.page.inner_text(".hs-table")
    cure = joined(["leave it out or download it again.", "(tensor 'lora_up.weight')"])
    event = {
        **EVENT,
        "recovered": False,
        "ended": True,
        "layer": "blocks.0.ffn.2",
        "evidence": "The weight itself is NaN.",
    }
    comfy.send("promptQueueing", requestId=1, batchCount=1)
    comfy.evaluate(TOGGLE_TAB)
    assert "Nothing has begun yet." in comfy.page.inner_text(".hs-sidebar")
    comfy.evaluate(TOGGLE_TAB)
    comfy.send("execution_start", prompt_id="bad")
    comfy.send_guard(
        node_id=guard_id(comfy),
        prompt_id="bad",
        verdict="bad_weights",
        message=sentence,
        advice=Message("{culprit}: {cure}", culprit="nan_lora.safetensors holds NaN or Inf", cure=cure),
        event=event,
    )
    error = {
        "exception_type": "halfsafe.NonFinite",
        "exception_message": "Worded as it may be: the event says that the guard ended the run with it.",
    }
    comfy.send("execution_error", prompt_id="bad", node_id="9", **error)
    (toast,) = shown()
    assert (
        toast["summary"] == "Halfsafe: nan_lora.safetensors holds NaN or Inf"
        and toast["detail"] == "Leave it out or download it again."
    )
    comfy.evaluate(TOGGLE_TAB)
    text = comfy.page.text_content(".hs-run")
    comfy.screenshot(pictures, f"sidebar-bad-weights-{cell}")
    assert text.count("nan_lora.safetensors") == text.count("download it again") == 1 and "Verdict" not in text
    assert text.index("nan_lora.safetensors") < text.index("Leave it out") < text.index("blocks.0.ffn.2")
    assert comfy.page.locator(".hs-sidebar .hs-card").count() == 1
    assert "of an earlier run" in comfy.page.text_content(
        ".hs-sidebar .hs-earlier"
    ) and "of an earlier run" in comfy.page.inner_text(".hs-panel .hs-earlier")
    comfy.evaluate(TOGGLE_TAB)


def test_the_sidebar_keeps_what_messages_told(comfy: ComfyPage) -> None:
    shown = comfy.record_toasts()
    comfy.send("promptQueueing", requestId=1, batchCount=1)
    comfy.send("execution_start", prompt_id="kept")
    computed, black = (
        "Computed in fp32, not in the fp16 that the model was set to.",
        "Above 65504 fp16 overflows, which gives black pictures.",
    )
    slow, command, why = (
        "int8 is slow here without its kernels.",
        'To install them, run "C:/ComfyUI/python.exe" -m pip install -U comfy-kitchen and restart ComfyUI.',
        "Expected here, but the probe int8_kernels failed.",
    )
    output = {
        "halfsafe_badge": [["fp16", "fp32"]],
        "halfsafe_instead": [joined([computed, black])],
        "halfsafe_unmatched": ["blocks.77.* storage=bf16"],
        "halfsafe_kernels": [joined([slow, command, why])],
    }
    output["halfsafe_messages"] = [messages_in(output)]
    comfy.send("executed", node=guard_id(comfy), display_node=guard_id(comfy), prompt_id="kept", output=output)
    comfy.send("execution_success", prompt_id="kept")
    told = {toast["summary"].removeprefix("Halfsafe: "): toast["detail"] for toast in shown()}
    assert told == {
        computed: black,
        "No layer of this model matches:": "blocks.77.* storage=bf16",
        slow: command,
    }
    comfy.evaluate(TOGGLE_TAB)
    text = comfy.page.text_content(".hs-run")
    assert all(what in text for both in told.items() for what in both) and why in text, (
        "a message shows the first sentence of each part"
    )
    comfy.send("promptQueueing", requestId=1, batchCount=1)
    problem = "Candidates, line 1, int9/auto: 'int9' is not a storage option."
    refused = str(HalfsafeError(problem, "Use one of: auto, int8 as storage."))
    comfy.send("halfsafe.refused", message=refused, messages=messages_in(refused))
    text = comfy.page.text_content(".hs-run")
    assert (
        "The run did not start" in text
        and "'int9' is not a storage option" in text
        and "Use one of" in text
        and "blocks.77" not in text
    )
    comfy.evaluate(TOGGLE_TAB)


def test_the_setting_alone_guards_every_run(opened_page: ComfyPage, small_models: Path) -> None:
    """On a file of its own: the server keeps a model that another test's guard has widened."""
    comfy, folder = opened_page, small_models / "diffusion_models"
    shutil.copy(folder / "wan_overflowing.safetensors", folder / f"by_setting_{comfy.vue}.safetensors")
    comfy.load_small()
    comfy.evaluate(PLAIN_FP16.replace("wan_overflowing", f"by_setting_{comfy.vue}"))
    comfy.evaluate("""() => { app.graph.nodes.find((n) => n.type === 'KSampler').widgets.find((w) => w.name === 'seed').value += 70;
        const bypassed = LiteGraph.createNode("HalfsafeNaNGuard"); bypassed.mode = 4; app.graph.add(bypassed); }""")
    shown = comfy.record_toasts()
    runs = (
        ("off", [], "The picture is black"),
        ("report", ["Halfsafe: NaN or Inf found"], "NaN or Inf found"),
        ("retry_higher", ["Halfsafe: Black image prevented"] * 2, "Black image prevented"),
    )
    for setting, told, said in runs:
        comfy.set("Halfsafe.WatchEveryRun", setting)
        with comfy.page.expect_request(
            lambda request: request.method == "POST" and request.url.endswith("/prompt")
        ) as sent:
            comfy.run()
        assert not any("halfsafe" in name for name in sent.value.post_data_json["extra_data"]), (
            "ComfyUI's own request is as it was"
        )
        assert [toast["summary"] for toast in shown()] == told, (
            "one cause is one message, and a rescue is told once more beside the picture"
        )
        comfy.evaluate("() => { window.toasts.length = 0; }")
        comfy.evaluate(TOGGLE_TAB)
        comfy.page.locator(".hs-answer .hs-headline", has_text=said).wait_for()
        text = comfy.page.text_content(".hs-run")
        assert "stopped" not in text
        assert ("Set Guard every run to retry_higher: it repeats" in text) == (setting == "report"), (
            "in the words of the list above it"
        )
        assert comfy.evaluate(
            "() => document.querySelector('.hs-sidebar .hs-watch select').selectedOptions[0].textContent"
        ).startswith(setting)
        comfy.evaluate(TOGGLE_TAB)


def test_a_verdict_is_shown_by_what_is_said_of_it(comfy: ComfyPage) -> None:
    """A report of an earlier version says nothing of its verdict: words without a colour. A verdict that the page has no word of has its row's."""
    pill, heading = comfy.page.locator(".hs-title .hs-verdict"), ".hs-guard .hs-happened"
    guard = {key: value for key, value in REPORT["guard"].items() if key != "about"}
    comfy.show_report({**REPORT, "guard": guard}, is_old=True)
    assert (pill.inner_text(), pill.get_attribute("data-tone")) == ("recovered", None)
    assert comfy.page.locator(heading).count() == 0
    about = {**VERDICTS["recovered"].shown(), "cause": "New words"}
    comfy.show_report({**REPORT, "guard": {**guard, "verdict": "a_new_one", "about": about}}, is_old=True)
    assert (pill.inner_text(), pill.get_attribute("data-tone")) == ("a new one", "warn")
    assert "Black image prevented" in comfy.page.inner_text(heading)
