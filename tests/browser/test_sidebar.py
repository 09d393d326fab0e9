"""The sidebar knows its workflow: what it says is true of the open tab as it is now, and stays under the hands of its user."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage
from browser.test_guard import EVENT, REPORT, TOGGLE_TAB
from halfsafe.precision.base.message import Message, joined, messages_in
from halfsafe.precision.guard.verdicts import VERDICTS
from halfsafe.precision.report.result import KEPT_IN, LESS, Result
from support.page_words import english_in

DID = "() => document.querySelector('.hs-did').innerText"
RUN = "() => document.querySelector('.hs-run').innerText"
OPEN_WHY = "() => { for (const why of document.querySelectorAll('.hs-why')) why.open = true; }"
BUTTONS = "() => [...document.querySelectorAll('.hs-actions b')].map((b) => b.textContent)"
FOCUSED = "() => document.activeElement.querySelector('b')?.textContent"
ANOTHER_TAB = "async () => { await app.loadGraphData(app.graph.serialize(), true, true, 'another'); }"
LEAVE = "() => { window.left = app.extensionManager.workflow.activeWorkflow; }"
BACK = "async () => { const { workflow, command } = app.extensionManager; for (const _ of workflow.openWorkflows) if (workflow.activeWorkflow !== window.left) await command.execute('Workspace.PreviousOpenedWorkflow'); }"
"""To the tab that was left: a new one is put behind all that tests before opened."""
KEEP_STATUS = "() => { window.told = document.querySelector('.hs-did'); window.taken = 0; window.watcher = new MutationObserver((all) => all.forEach(({ removedNodes }) => removedNodes.forEach((node) => { if (node.contains(window.told)) window.taken += 1; }))); window.watcher.observe(document.body, { childList: true, subtree: true }); }"
DELETE = """(type) => { const node = app.graph.nodes.find((n) => n.type === type); app.canvas.deselectAll(); app.canvas.selectItems([node]); app.canvas.canvas.focus(); }"""
PLAIN = """async () => { app.graph.clear(); app.canvas.ds.reset(); await new Promise(requestAnimationFrame);
    const put = (type, pos, values = {}) => { const node = LiteGraph.createNode(type); node.pos = pos; app.graph.add(node); for (const widget of node.widgets ?? []) widget.value = values[widget.name] ?? widget.value; return node; };
    const model = put("UNETLoader", [0, 50], { unet_name: "wan.safetensors" }), clip = put("CLIPLoader", [0, 200], { clip_name: "clip_l.safetensors", type: "sd3" });
    const vae = put("VAELoader", [0, 350], { vae_name: "wan_vae.safetensors" }), text = put("CLIPTextEncode", [400, 50]);
    const latent = put("EmptyHunyuanLatentVideo", [400, 300], { width: 64, height: 64, length: 1 }), sampler = put("KSampler", [850, 50], { steps: 2 });
    const decode = put("VAEDecode", [1200, 50]), show = put("PreviewImage", [1450, 50]);
    model.connect(0, sampler, 0); clip.connect(0, text, 0); text.connect(0, sampler, 1); text.connect(0, sampler, 2); latent.connect(0, sampler, 3);
    sampler.connect(0, decode, 0); vae.connect(0, decode, 1); decode.connect(0, show, 0); app.canvas.emitBeforeChange(); app.canvas.emitAfterChange(); }"""
OVERLAP = """() => { const boxes = [...document.querySelectorAll(".lg-node")].map((e) => e.getBoundingClientRect()), edge = 1;
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => a.left + edge < b.right && b.left + edge < a.right && a.top + edge < b.bottom && b.top + edge < a.bottom)).length; }"""
BADGES_DRAWN = "() => [...document.querySelectorAll('.lg-node [style*=\"rgb(29, 92, 82)\"]')].map((e) => e.textContent.trim()).sort()"


@pytest.fixture
def tab(opened_page: ComfyPage) -> ComfyPage:
    """A page with the sidebar open beside a plain workflow that runs."""
    opened_page.evaluate(PLAIN)
    opened_page.evaluate(TOGGLE_TAB)
    opened_page.page.wait_for_selector(".hs-actions button")
    return opened_page


def press(comfy: ComfyPage, name: str) -> None:
    comfy.page.locator(".hs-sidebar .hs-actions .hs-button", has_text=name).click()
    comfy.page.wait_for_function(f"() => ({DID})() !== ''")


def test_two_tabs_with_the_same_graph_id_have_each_its_own_answer_and_run(tab: ComfyPage) -> None:
    tab.load({**tab.saved(), "id": "5c3f1d52-8a0e-4f0e-9f6b-2f6a1f0c7e10"})
    press(tab, "Guard this workflow")
    tab.send("execution_start", prompt_id="first")
    tab.send_guard(prompt_id="first", message="Step 3: overflow.", event=EVENT)
    tab.send("execution_success", prompt_id="first")
    press(tab, "Take the guard out")
    before = tab.evaluate("() => app.graph.id")
    tab.evaluate(LEAVE)
    tab.evaluate(ANOTHER_TAB)
    tab.page.wait_for_function(f"() => ({RUN})() === ''")
    assert tab.evaluate("() => app.graph.id") == before, "as 335 of ComfyUI's templates share theirs"
    assert tab.evaluate(DID) == ""
    tab.evaluate(BACK)
    tab.page.wait_for_function(f"() => ({RUN})().includes('Black image prevented')")
    assert tab.evaluate(DID) == "", "what was answered then is not said again"


def test_a_run_is_of_the_tab_that_it_was_queued_from(tab: ComfyPage) -> None:
    press(tab, "Guard this workflow")
    tab.evaluate(LEAVE)
    tab.evaluate(
        "async () => { const { api } = await import('/scripts/api.js'); window.ended = new Promise((done) => api.addEventListener('execution_success', done, { once: true })); await app.queuePrompt(0, 1); }"
    )
    tab.evaluate(
        "async () => { await app.extensionManager.command.execute('Comfy.NewBlankWorkflow'); await window.ended; }"
    )
    assert tab.evaluate(RUN) == ""
    tab.evaluate(BACK)
    tab.page.wait_for_function(f"() => ({RUN})().includes('calls of the model')")


def test_without_the_store_of_runs_a_run_is_of_the_tab_that_queued(opened_page: ComfyPage) -> None:
    code = """async () => { const { Tabs } = await import("/extensions/Halfsafe-Pack/tabs.mjs"), activeWorkflow = {};
        return [undefined, {}, { _s: new Map() }].map((_p) => {
            const tabs = new Tabs({ extensionManager: { workflow: { activeWorkflow, $onAction: () => {} }, _p } });
            tabs.watch(() => {}); tabs.press(); const pressed = tabs.of("one"); tabs.settle();
            return [pressed === activeWorkflow, tabs.of("one")]; }); }"""
    assert opened_page.evaluate(code) == [[True, None]] * 3


def test_buttons_and_the_answer_follow_nodes_that_come_and_go(tab: ComfyPage) -> None:
    press(tab, "Guard this workflow")
    assert "Take the guard out" in tab.evaluate(BUTTONS)
    tab.evaluate(DELETE, "HalfsafeAutoPrecision")
    tab.page.keyboard.press("Delete")
    tab.page.wait_for_function(f"() => ({BUTTONS})().includes('Guard this workflow')")
    assert tab.evaluate(DID) == ""


def test_the_focus_stays_on_the_button_and_the_answer_is_a_live_region(tab: ComfyPage) -> None:
    tab.evaluate(KEEP_STATUS)
    for name, after in (
        ("Guard this workflow", "Take the guard out"),
        ("Halve the memory", "Put ComfyUI's loaders back"),
    ):
        tab.page.locator(".hs-actions .hs-button", has_text=name).focus()
        tab.page.keyboard.press("Enter")
        tab.page.wait_for_function(f"(after) => ({BUTTONS})().includes(after)", arg=after)
        assert tab.found(FOCUSED, after) == after
        tab.page.wait_for_function(f"() => ({DID})() !== ''")
    assert tab.evaluate(
        "() => { window.watcher.disconnect(); return [window.told.isConnected, window.told.getAttribute('role'), window.taken]; }"
    ) == [True, "status", 0], "one that is put in anew is not read out"


def test_it_is_said_before_the_run_that_the_picture_will_differ(tab: ComfyPage) -> None:
    press(tab, "Guard this workflow")
    said = tab.evaluate(DID)
    tab.evaluate(OPEN_WHY)
    why = tab.evaluate(DID)
    native = tab.evaluate(
        "async () => { const found = await (await fetch('/halfsafe/device')).json(); return found.messages[found.messages[found.sentence].sentences[0]].values.compute; }"
    )
    assert ("The picture will differ a little." in said) == ("bf16" in native), (said, native)
    assert ("wan.safetensors computes in bf16 now, with ComfyUI alone in fp32." in why) == ("bf16" in native), why


DTYPE_SET = """() => { const of = (type) => app.graph.nodes.find((n) => n.type === type), dtype = LiteGraph.createNode("ModelComputeDtype"); app.graph.add(dtype);
    dtype.pos = [400, -300]; of("UNETLoader").connect(0, dtype, 0); dtype.connect(0, of("KSampler"), 0); }"""


def test_nothing_is_said_of_dtypes_where_the_workflow_sets_them(tab: ComfyPage) -> None:
    """A file says what ComfyUI loads it in, and not what a node behind the loader computes in."""
    tab.evaluate(DTYPE_SET)
    press(tab, "Guard this workflow")
    assert tab.evaluate(DID) == "1 node was added: run the workflow."


def test_a_guard_put_in_while_comfyui_does_not_answer_is_said_to_be_there(tab: ComfyPage) -> None:
    tab.page.route("**/halfsafe/**", lambda route: route.abort())
    press(tab, "Guard this workflow")
    assert tab.evaluate(DID) == "1 node was added: run the workflow." and "Take the guard out" in tab.evaluate(BUTTONS)
    press(tab, "Halve the memory")
    assert tab.found(DID, "ComfyUI does not answer. Nothing was changed.").startswith(
        "ComfyUI does not answer."
    ) and "Halve the memory" in tab.evaluate(BUTTONS)
    tab.page.unroute_all()
    tab.problems.clear()  # the requests that failed


def test_a_report_without_calls_is_not_green_and_an_old_one_is_earlier(opened_page: ComfyPage) -> None:
    comfy = opened_page
    comfy.add("HalfsafeNaNGuard", "HalfsafeReport")
    comfy.send("execution_start", prompt_id="shown")
    comfy.show_report({**REPORT, "guard": {**REPORT["guard"], "verdict": "clean", "calls": 0}})
    assert (
        comfy.page.inner_text(".hs-title .hs-verdict") == "not run yet"
        and comfy.page.locator(".hs-verdict[data-tone=good]").count() == 0
    )
    comfy.show_report(REPORT)
    comfy.send("execution_success", prompt_id="shown")
    assert comfy.page.locator(".hs-earlier").count() == 0
    for end in ("execution_interrupted", "execution_error", "execution_success"):
        comfy.send("execution_start", prompt_id=end)
        comfy.evaluate("async () => { (await import('/scripts/api.js')).api.dispatchCustomEvent('executing', '1'); }")
        comfy.send(end, prompt_id=end, node_id="1", exception_type="ValueError", exception_message="Not ours.")
        assert "of an earlier run" in comfy.page.inner_text(".hs-panel .hs-earlier"), end


def test_what_ran_with_other_settings_is_of_an_earlier_run(tab: ComfyPage) -> None:
    press(tab, "Guard this workflow")
    tab.run()
    marked = "() => [document.querySelector('.hs-panel .hs-earlier'), document.querySelector('.hs-sidebar .hs-earlier')].filter(Boolean).length"
    ran = tab.badges()["HalfsafeAutoPrecision"]
    assert tab.evaluate(marked) == 0 and ran
    tab.evaluate(
        "() => { app.canvas.emitBeforeChange(); app.graph.nodes.find(({ type }) => type === 'HalfsafeAutoPrecision').widgets.find(({ name }) => name === 'goal').value = 'speed'; app.canvas.emitAfterChange(); }"
    )
    assert tab.found(marked, 2) == 2 and tab.badges()["HalfsafeAutoPrecision"] == f"of an earlier run \u00b7 {ran}"
    tab.evaluate("async () => { await app.extensionManager.workflow.activeWorkflow.changeTracker.undo(); }")
    assert tab.found(marked, 0) == 0 and tab.badges()["HalfsafeAutoPrecision"] == ran
    tab.evaluate("async () => { await app.extensionManager.workflow.activeWorkflow.changeTracker.redo(); }")
    assert tab.found(marked, 2) == 2
    tab.run()
    assert tab.found(marked, 0) == 0


def test_nan_that_goes_on_to_the_vae_is_told_on_one_card(opened_page: ComfyPage) -> None:
    comfy = opened_page
    comfy.add("HalfsafeNaNGuard", "HalfsafeGuardVAE")
    comfy.evaluate(TOGGLE_TAB)
    comfy.send("execution_start", prompt_id="one")
    lost = {**EVENT, "recovered": False, "kind": "nan"}
    comfy.send_guard(
        node_id="1",
        prompt_id="one",
        verdict="not_precision",
        message="Step 3: NaN in blocks.0.",
        advice="Try another sampler.",
        event=lost,
    )
    comfy.send_guard(
        node_id="2",
        prompt_id="one",
        of="vae",
        verdict="bad_input",
        message="NaN or Inf in the latent.",
        advice="Guard the model.",
        event={**lost, "kind": "input", "layer": "latent", "ended": True},
    )
    comfy.send(
        "execution_error",
        prompt_id="one",
        node_id="9",
        exception_type="halfsafe.NonFinite",
        exception_message="NaN or Inf in the latent.",
    )
    assert comfy.page.locator(".hs-sidebar article").count() == 1
    comfy.evaluate(OPEN_WHY)
    card = comfy.page.inner_text(".hs-run")
    assert "NaN in blocks.0." in card and "This NaN also reached Guard VAE" in card and "Guard the model." not in card


def test_badges_follow_exchanged_loaders_and_fit_their_nodes(tab: ComfyPage) -> None:
    press(tab, "Guard this workflow")
    tab.run()
    press(tab, "Halve the memory")
    tab.run()
    badges = tab.badges()
    assert (
        badges["HalfsafeAutoPrecision"].startswith("int8")
        and badges["HalfsafeLoadDiffusionModel"]
        and badges["HalfsafeLoadCLIP"]
    )
    if tab.vue:
        assert tab.found(BADGES_DRAWN, sorted(badges.values())) == sorted(badges.values()), "as drawn"
        assert tab.evaluate(OVERLAP) == 0
        return
    room = """() => { app.graph.nodes.find((n) => n.type === "HalfsafeAutoPrecision").setSize([230, 400]); const { ctx } = app.canvas;
        return app.graph.nodes.filter((n) => n.type.startsWith("Halfsafe")).map((n) => n.size[0] - n.badges.map((b) => (typeof b === "function" ? b() : b)).reduce((sum, b) => sum + b.getWidth(ctx) + 2, 0)); }"""
    assert min(tab.evaluate(room)) >= 0, "none covers its neighbour's"


FACTS = [
    {
        "what": "dynamic VRAM",
        "here": Message("off: ComfyUI estimates how much to load and leaves {0} free", "400.00 MiB"),
        "switch": "--disable-dynamic-vram",
    },
    {
        "what": "loaded",
        "here": joined(
            (
                Message("{0}, all of {1} on the device", name, size)
                for name, size in (("WanVAE", "3.53 MiB"), ("HunyuanVideo", "8.12 MiB"), ("SD1ClipModel", "235.84 MiB"))
            ),
            "; ",
        ),
        "switch": "",
    },
]
HERE = "() => [...document.querySelectorAll('.hs-facts dd')].map((fact) => fact.textContent)"


def test_each_loaded_model_is_worded_and_a_switch_is_named_as_one(opened_page: ComfyPage) -> None:
    comfy = opened_page
    comfy.page.route(
        "**/halfsafe/here", lambda route: route.fulfill(json={"facts": FACTS, "messages": messages_in(FACTS)})
    )
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.wait_for_function(f"() => ({HERE})().length === 3")
    device, dynamic, loaded = comfy.evaluate(HERE)
    assert device.startswith("CPU computes in")
    assert (
        dynamic
        == "off: ComfyUI estimates how much to load and leaves 400.00 MiB freeTo change it: --disable-dynamic-vram"
        and loaded.startswith(FACTS[1]["here"])
    )
    comfy.evaluate(TOGGLE_TAB)
    comfy.speak("zh")
    comfy.evaluate(TOGGLE_TAB)
    comfy.page.wait_for_function(f"() => ({HERE})()[2]?.split('全部在设备上').length === 4")
    assert english_in("".join(comfy.evaluate(HERE))) == []


def test_the_list_of_guards_has_the_words_that_advice_names(opened_page: ComfyPage) -> None:
    opened_page.evaluate(TOGGLE_TAB)
    offered = opened_page.page.locator(".hs-watch option")
    offered.first.wait_for(state="attached")
    assert [text.split(":")[0] for text in offered.all_inner_texts()] == ["off", "report", "retry_higher"]
    assert "retry_higher" in VERDICTS["stopped"].advice


def test_a_message_has_two_lines_and_none_is_shown_beside_its_card(
    opened_page: ComfyPage, pictures: Path, cell: str
) -> None:
    comfy = opened_page
    comfy.add("HalfsafeNaNGuard")
    shown = comfy.record_toasts()
    less = Message(LESS, file="clip_l.safetensors", before="235.84 MiB", after="154.84 MiB")
    kept = Message(KEPT_IN, formats="fp16", kept="73.84 MiB", reasons="embedding: 72.49 MiB")
    output = {name: list(value) for name, value in Result(joined([less, kept]), toast=True).ui().items()}
    for prompt in ("closed", "open"):
        comfy.send("execution_start", prompt_id=prompt)
        comfy.send("executed", node="1", display_node="1", prompt_id=prompt, output=output)
        comfy.send_guard(
            node_id="1",
            prompt_id=prompt,
            message="Step 3: overflow.",
            event={**EVENT, "evidence": "Until a restart later runs start in that precision."},
        )
        comfy.send("execution_success", prompt_id=prompt)
        if prompt == "closed":
            told = [(toast["summary"], toast.get("detail") or "") for toast in shown()]
            assert told[0] == ("Halfsafe: clip_l.safetensors: 235.84 MiB -> 154.84 MiB.", "")
            assert set(told[1:]) == {
                (
                    "Halfsafe: Black image prevented",
                    "Step 3 was repeated in fp16 with fp32 results: blocks.0.ffn.2 overflowed in fp16.",
                )
            }
            comfy.evaluate("() => { window.toasts.length = 0; }")
            comfy.evaluate(TOGGLE_TAB)
            comfy.page.wait_for_selector(".hs-actions button")
    assert shown() == []
    comfy.evaluate(OPEN_WHY)
    assert "73.84 MiB (embedding: 72.49 MiB)" in comfy.page.inner_text(".hs-sidebar"), "the card has all of it"
