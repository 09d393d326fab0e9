"""Rules are read while they are written: which line is wrong, what is wrong with it, and what would be right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.comfy_page import ComfyPage
from halfsafe.precision.plan.rules import VALUES

ROUTE = "**/halfsafe/rules"
WRONG = "blocks.0.* storage=bf16\nblocks.1.* storage=fp4\nre:( compute=fp32"
RIGHT = "blocks.0.* storage=bf16\nblocks.1.* storage=fp16"
OUTSIDE = """() => { const box = document.querySelector(".hs-note").getBoundingClientRect(), area = document.querySelector("textarea:not(.hs-manual)").getBoundingClientRect();
    return [box.top - area.bottom, box.width - area.width, [...document.querySelectorAll(".hs-note *")].filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).length]; }"""
NOTE = "() => document.querySelector('.hs-note')?.innerText.replaceAll(/\\s+/g, ' ').trim() ?? ''"


class Writing:
    """The text of a Layer Rules node; `asked`: the texts that the page sent."""

    def __init__(self, comfy: ComfyPage) -> None:
        self.comfy, self.page, self.asked = comfy, comfy.page, []
        comfy.page.on("request", self._note)
        self.area = comfy.page.locator("textarea:not(.hs-manual)").first
        self.put()

    def put(self) -> None:
        """Put the node on an empty canvas, near enough to be read."""
        self.comfy.add("HalfsafeLayerRules")
        self.comfy.zoom_to("HalfsafeLayerRules", 440, 360)
        self.page.wait_for_selector("textarea:not(.hs-manual)")

    def _note(self, request) -> None:
        if request.url.endswith("/halfsafe/rules"):
            self.asked.append(request.post_data)

    def write(self, text: str) -> None:
        self.area.fill(text)

    def waits_for(self, text: str) -> None:
        self.page.wait_for_function(f"(text) => ({NOTE})().includes(text)", arg=text)

    def note(self) -> str:
        return self.comfy.evaluate(NOTE)


@pytest.fixture
def writing(opened_page: ComfyPage) -> Iterator[Writing]:
    """A Layer Rules node whose text is written."""
    found = Writing(opened_page)
    yield found
    opened_page.page.remove_listener("request", found._note)


@pytest.mark.drawn
def test_a_mistake_is_told_while_it_is_written(writing: Writing, pictures: Path, cell: str) -> None:
    writing.write(WRONG)
    writing.waits_for("Line 3")
    mistakes = writing.page.locator(".hs-mistake").all_inner_texts()
    assert len(mistakes) == 2
    assert mistakes[0].startswith("Line 2 'fp4' is not a valid value for 'storage'.") and all(
        value in mistakes[0] for value in VALUES["storage"]
    )
    assert mistakes[1].startswith("Line 3 're:(' is not a regular expression (")
    writing.comfy.settle()
    below, wider, clipped = writing.comfy.evaluate(OUTSIDE)
    assert below >= 0 and abs(wider) <= 24 and not clipped
    writing.comfy.screenshot(pictures, f"rules-{cell}")
    writing.page.locator(".hs-mistake").first.click()
    assert (
        writing.area.evaluate("(area) => area.value.slice(area.selectionStart, area.selectionEnd)")
        == "blocks.1.* storage=fp4"
    )
    writing.page.keyboard.type("blocks.1.* storage=fp16")
    writing.page.wait_for_function("() => document.querySelectorAll('.hs-mistake').length === 1")
    writing.write(RIGHT)
    writing.waits_for("2 rules are read.")
    assert writing.page.locator(".hs-mistake").count() == 0
    writing.write(" ")
    writing.page.wait_for_function("() => !document.querySelector('.hs-note').textContent")


def test_a_text_is_read_when_it_has_rested(writing: Writing) -> None:
    """All letters come before the page's clock can go on, as fast typing does."""
    writing.area.evaluate("""(area, text) => { for (let end = 1; end <= text.length; end++) {
        area.value = text.slice(0, end); area.dispatchEvent(new Event("input", { bubbles: true })); } }""", "rested.* storage=bf16")  # fmt: skip
    writing.waits_for("1 rule is read.")
    assert writing.asked == ["rested.* storage=bf16"]


def test_what_was_read_is_not_asked_again(writing: Writing) -> None:
    writing.write(RIGHT + " compute=bf17")
    writing.waits_for("'bf17' is not a valid value")
    assert writing.asked
    writing.asked.clear()
    writing.comfy.load(writing.comfy.saved())
    writing.waits_for("'bf17' is not a valid value")
    writing.comfy.evaluate("() => { for (let i = 0; i < 50; i++) app.graph.setDirtyCanvas(true, true); }")
    writing.comfy.evaluate(
        "() => new Promise((done) => setTimeout(done, 600))"
    )  # twice as long as a text rests, by the page's clock
    assert writing.asked == []


def test_text_that_another_node_gives_is_not_judged(writing: Writing) -> None:
    writing.write("nonsense")
    writing.waits_for("'nonsense' has no setting")
    writing.comfy.evaluate("""() => { const [rules] = app.graph.nodes, other = LiteGraph.createNode("PrimitiveStringMultiline"); other.pos = [900, 100];
        app.graph.add(other); other.connect(0, rules, rules.inputs.findIndex((input) => input.name === "rules")); }""")
    writing.page.wait_for_function("() => !document.querySelector('.hs-note').textContent")


@pytest.mark.once  # words; the test above draws them in each renderer of each page
def test_mistakes_are_told_in_chinese(writing: Writing, pictures: Path, cell: str) -> None:
    writing.write(f"{WRONG}\nblocks\na colour=red\nrole:x storage=bf16")
    writing.waits_for("Line 6")
    writing.comfy.speak("zh")
    writing.waits_for("第 6 行")
    lines = writing.page.locator(".hs-mistake").all_inner_texts()
    assert [line.split(" ")[:3] for line in lines] == [["第", str(number), "行"] for number in range(2, 7)]
    assert "“fp4”不是“storage”的有效值。请使用其中之一" in lines[0]
    writing.comfy.screenshot(pictures, f"rules-zh-{cell}")
    words = writing.comfy.evaluate(
        "() => document.querySelector('.hs-note').innerText.match(/\\b[A-Za-z]+ [a-z]+ [a-z]+ [a-z]+\\b/g)"
    )
    assert words is None or words == ["unterminated subpattern at position"], (
        "Python words what is wrong with an expression"
    )


def test_without_the_server_nothing_is_marked(writing: Writing) -> None:
    writing.page.route(ROUTE, lambda route: route.abort())
    with writing.page.expect_event("requestfailed", lambda request: request.url.endswith("/halfsafe/rules")):
        writing.write("a storage=fp5")
    assert writing.note() == ""
    assert writing.area.input_value() == "a storage=fp5"
    writing.page.unroute(ROUTE)
    writing.area.press_sequentially("6")
    writing.waits_for("'fp56' is not a valid value for 'storage'")
    writing.comfy.problems.clear()  # the page tells itself that a request failed
