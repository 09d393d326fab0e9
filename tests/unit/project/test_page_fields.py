"""What the page decides by: fields that the server sends. Texts for people are drawn, and not read: a reworded sentence changes nothing."""

from __future__ import annotations

import inspect
import re

import pytest
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.base.message import Message, messages_in
from halfsafe.precision.check import drift
from halfsafe.precision.guard import evidence, verdicts
from halfsafe.precision.report import result
from support.shipped import ROOT

READS = re.compile(
    r"""[^\s(!,;{]*\.(?:startsWith|endsWith|split|match|matchAll|test|exec|search|indexOf|lastIndexOf)\([^,()]*"""
    r"""|new RegExp\([^,()]*|[\w.]+\.includes\(["`'][^,()]*|[!=]==? "[^"]* [^"]*\""""
)
"""What looks into a text, or compares it with one that has a space."""
ALLOWED = {
    "names of nodes, types, files, inputs, dtypes, storages, goals, layers and ids": (
        "cards.mjs: goals.includes(\"speed\"", "dom.mjs: name.split(/", "flow.mjs: BROADCASTS.test(type", 'flow.mjs: id.split(":"',
        "flow.mjs: step.type.startsWith(OURS", "flow.mjs: SAVES.test(step.type", "flow.mjs: BROADCASTS.test(take.step.type",
        "flow.mjs: MODEL_FILE.test(value", "flow.mjs: file.split(/[\\\\/]/", "guard.mjs: DTYPE.test(name", 'guard.mjs: makes.includes("IMAGE"',
        'guard.mjs: makes.includes("AUDIO"', 'guard.mjs: source.split(" "', "main.js: WATCHED.test(message.node_id",
        "main.js: node.comfyClass?.startsWith(PREFIX", "measure.mjs: QUANTIZED.test(storage", 'measure.mjs: stored.split(" + "',
        "measure.mjs: QUANTIZED.test(word", 'measure.mjs: goals.includes("memory"', 'memory.mjs: name.includes("_name"',
        "memory.mjs: /\\d/.exec(storage", 'memory.mjs: path.split(":"', "memory.mjs: IN_8_BITS.test(valuesOf",
        "missing.mjs: FILE.test(info?.received_value", "missing.mjs: FILE.test(value", "missing.mjs: file.split(/[\\\\/]/",
        "page.mjs: comfyClass?.startsWith(PREFIX", "page.mjs: WATCHED.test(id", "page.mjs: WATCHED.exec(id",
        "page.mjs: node).endsWith(`:${id.split", "page.mjs: node.comfyClass?.startsWith(PREFIX", 'result.mjs: name.split(" "',
        "run.mjs: type).startsWith(OURS", "timing.mjs: /load/i.test(this.#running.type", "words.mjs: template.includes(`{${name}}`",
        "words.mjs: NAME.test(value", 'words.mjs: paths.split("', "words.mjs: path.split(/[\\\\/]/",
    ),
    "rules: a text that the user writes, with a comment that marks the lines which the page wrote": (
        'guard.mjs: rules.split("\\n"', "guard.mjs: line.endsWith(MEASURED", 'measure.mjs: text.split("\\n"', "measure.mjs: line.endsWith(MEASURED",
        'panel.mjs: this.#report.rules.split("\\n"', 'rules.mjs: area.value.split("\\n"',
    ),
    "what the user looks for in a report": ("report.mjs: ).split(/\\s+/",),
    "the page's own numbers and badges, put together again": (
        'cards.mjs: from.split("\\u00a0"', 'cards.mjs: to.split("\\u00a0"', "main.js: text.split(BETWEEN_WORDS",
    ),
    "how much room a text takes, and the space after a sentence": (
        "cards.mjs: text.match(/[\\u3400-\\u9fff]/g", 'cards.mjs: ").split(/\\s+/', 'result.mjs: words.includes("\\n"',
        "words.mjs: /[\\u3002\\uff01\\uff1f]$/.test(before",
    ),
    "the mark before our text in a widget of ComfyUI's, which holds nothing else": ("progress.mjs: widget.value?.startsWith(OUR_PROGRESS",),
    "what torch, ComfyUI, other packs and browsers say, who send no fields": (
        "run.mjs: NO_FP8_ON_MPS.test(error", "run.mjs: OUT_OF_PINNED_MEMORY.test(error", "run.mjs: ASKED_AT_ONCE.exec(error",
        "run.mjs: OUT_OF_HOST_MEMORY.test(error", "run.mjs: OUT_OF_MEMORY.test(error", "run.mjs: BRINGS_WEIGHTS.test(traceback",
        "run.mjs: COMPUTES.test(traceback", 'run.mjs: text.split("\\n"', "run.mjs: SENTENCE.exec(text", "words.mjs: /fetch/i.test(error.message",
    ),
}  # fmt: skip
"""Why a place of the page looks into a text that is no message of the pack -> the places."""
MOST_WORDS = 14
"""Of what is drawn large, and of the line below it."""


def test_no_module_of_the_page_reads_a_sentence() -> None:
    found = {
        f"{path.name}: {place}"
        for path in (ROOT / "web").iterdir()
        if path.suffix in (".js", ".mjs")
        for place in READS.findall(path.read_text(encoding="utf-8"))
    }
    allowed = {place for places in ALLOWED.values() for place in places}
    assert found - allowed == set(), "a field of the server's says it, or the place joins ALLOWED with its reason"
    assert allowed - found == set(), "this is no longer in the page"


def test_what_reads_a_sentence_is_found() -> None:
    for code in ('if (said.startsWith("A"))', "/^A/.test(brief)", 'a === "of 16 bit"', 'brief.includes("NaN")'):
        assert READS.search(code), code


def kinds_of(error: type[HalfsafeError]) -> list[type[HalfsafeError]]:
    return [error, *(kind for below in error.__subclasses__() for kind in kinds_of(below))]


@pytest.mark.parametrize("kind", kinds_of(HalfsafeError), ids=lambda kind: kind.__name__)
def test_each_error_has_its_problem_and_advice_apart(kind: type[HalfsafeError]) -> None:
    given = {
        "problem": Message("{0} is wrong. It is", "A tensor"), "mistake": "no rule", "path": "/a/b.safetensors", "line": 3,
        "tensor": "w", "verdict": "stopped", "advice": "Write version 2.0 of it. Then run.",
    }  # fmt: skip
    error = kind(**{name: given[name] for name in inspect.signature(kind).parameters})
    sent = messages_in({"text": str(error)})
    assert sent[str(error)]["values"] == {"problem": error.problem, "advice": error.advice}
    assert error.problem and error.advice and str(error) == f"{error.problem} {error.advice}"
    if hasattr(error, "path"):
        assert sent[error.problem]["values"]["file"] == "/a/b.safetensors"


def words_of(template: str) -> int:
    return len(template.split())


def advice_of_guards() -> list[str]:
    """All that a guard advises after a failure that is not repaired, but for advice to switch it, which is a button."""
    wordings = [verdicts.MODEL, *verdicts.ENCODERS.values()]
    found = [row.advice for row in verdicts.VERDICTS.values() if row.advice and not row.repaired]
    found += [advice for _, advice in verdicts.ENCODER_INPUTS.values()]
    found += [text for one in wordings for text in (one.no_memory, one.broken_off, *filter(None, one.advice.values()))]
    found += [verdicts.OTHERWISE, verdicts.COMPILED, verdicts.UNGUARDED, verdicts.LEAVE_OUT, verdicts.OF_ITS_OWN]
    found += [verdicts.UNPACKED, verdicts.CONTROL_ADVICE, evidence.RAISE_RETRIES]
    return [advice for advice in (*found, *drift.ADVICE.values(), drift.OTHERWISE) if "{switch}" not in advice]


def test_advice_that_is_too_long_for_a_card_has_a_line() -> None:
    """Without one, advice that was reworded would be large on the card, or behind Why: the table says which."""
    lines = {**verdicts.LINES, **drift.LINES}
    assert all(words_of(line) <= MOST_WORDS for line in lines.values())
    templates = {getattr(advice, "template", advice): advice for advice in advice_of_guards()}
    missing = {
        template
        for template, advice in templates.items()
        if template not in lines and words_of((getattr(advice, "sentences", ()) or (template,))[0]) > MOST_WORDS
    }
    assert missing == set()


def test_advice_to_switch_names_the_switch() -> None:
    """The page makes a button of it, which it knows by this name."""
    for advice in (verdicts.VERDICTS["stopped"].advice, *(one.advice["stopped"] for one in verdicts.ENCODERS.values())):
        told = verdicts.NAN_GUARD.worded(advice)
        assert messages_in(told)[told]["values"]["switch"] == "on_nan" and "{switch}" in advice


@pytest.mark.parametrize(
    "answer", [text for name, text in vars(result).items() if name.isupper() and isinstance(text, str) and " " in text]
)
def test_a_sentence_of_a_result_is_one_and_short(answer: str) -> None:
    """Several are joined, so that the first is the headline: it is not cut out of a text."""
    assert not re.search(r"[.!?] +[A-Z\d(]", answer)
    assert words_of(answer) <= 18
