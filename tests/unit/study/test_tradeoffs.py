"""What is made of the measurements: the best for a goal, rules, the table and the chart."""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.base.modes import MODE_OF
from halfsafe.precision.base.options import COMPUTE_OPTIONS, GOALS, STORAGE_OPTIONS
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.plan.facts import LayerSpec
from halfsafe.precision.plan.layers import plan_storage
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.report import draw
from halfsafe.precision.report.result import BEST, CLOSEST, NO_GAIN, NONE_WORKS, UNRANKED
from halfsafe.precision.study import charts
from halfsafe.precision.study.charts import tradeoffs_chart
from halfsafe.precision.study.tradeoffs import (
    Measurements,
    Setting,
    Tradeoff,
    settings_from,
)
from halfsafe.precision.study.tradeoffs_text import NOISY, NOT_FASTER, tradeoffs_result, verdicts
from support.page_words import untranslated

MIB = 1 << 20
LAYERS = [
    LayerSpec("blocks.0.ffn.0", "Linear", (64, 64)),
    LayerSpec("blocks.0.norm3", "LayerNorm", (64,)),
    LayerSpec("time_embedding.0", "Linear", (64, 64)),
    LayerSpec("head.head", "Linear", (64, 64)),
]


def row(text: str, seconds=1.0, mib=100, snr=40.0, extra=None, spread=0.0) -> Tradeoff:
    (setting,) = settings_from(text)
    storage = "as_file" if setting.storage == "auto" else setting.storage
    return Tradeoff(
        setting,
        storage,
        seconds,
        mib * MIB,
        extra,
        snr,
        {storage: mib * MIB},
        {MODE_OF.get(setting.compute, "bf16"): 3},
        spread=spread,
    )


REFERENCE = row("as_file/fp32", 4.0, snr=None)
SLOW = row("as_file/bf16", 2.0, 100, 50.0)
FAST = row("fp8_e4m3fn/fp8", 0.9, 52, 22.0)
SMALL = row("int8/auto", 1.0, 50, 38.0)
WORSE = row("fp8_e4m3fn/auto", 2.5, 53, 30.0)
BAD = Tradeoff(Setting("as_file", "fp16"), problem="NaN or Inf in step 1. NaN Guard names the layer.")
CANNOT = Tradeoff(Setting("int8", "int8"), problem="not on Volta: no int8")
ROWS = [SLOW, FAST, SMALL, WORSE, BAD, CANNOT]


def found(rows=ROWS, given="bf16", is_of_file=True) -> Measurements:
    return Measurements(
        "RTX 40xx",
        "WAN21",
        "bf16",
        "bf16",
        LAYERS,
        (1, 16, 1, 8, 8),
        7,
        REFERENCE,
        rows,
        given,
        is_of_file,
        ("RTX 4090", "580.1", "2.11.0+cu130"),
    )


def test_each_goal_gets_its_best():
    assert found().best == {"balanced": SMALL, "quality": SLOW, "speed": FAST, "memory": SMALL}


@pytest.mark.parametrize(("goal", "rows", "best"), [
    ("quality", [row("as_file/bf16", 3.0, snr=50.9), row("as_file/fp16", 1.0, snr=50.0)], 1),
    ("quality", [row("as_file/bf16", 3.0, snr=51.1), row("as_file/fp16", 1.0, snr=50.0)], 0),
    ("speed", [row("as_file/bf16", 1.02, snr=50.0), row("as_file/fp16", 1.0, snr=30.0)], 0),
    ("speed", [row("as_file/bf16", 1.04, snr=50.0), row("as_file/fp16", 1.0, snr=30.0, spread=0.05)], 0),
    ("speed", [row("as_file/bf16", 1.0, snr=50.0), row("as_file/fp16", 0.1, snr=19.9)], 0),
    ("memory", [row("int8/auto", 2.0, 103), row("fp8_e5m2/auto", 1.0, 101, snr=30.0)], 0),
    ("memory", [row("int8/auto", 2.0, 90, extra=20 * MIB), row("fp8_e5m2/auto", 1.0, 100, extra=0)], 1),
    ("balanced", [row("int8/auto", 1.06, 10, spread=0.05), row("as_file/bf16", 1.0, 100, spread=0.05)], 1),
    ("balanced", [row("int8/auto", 1.04, 80, spread=0.01), row("as_file/bf16", 1.0, 100, spread=0.05), row("fp8_e5m2/auto", 1.0, 79, snr=30.0)], 0),
    ("balanced", [row("int8/auto", 0.1, 10, snr=24.9), row("as_file/bf16", 1.0, 100, snr=25.0)], 1),
    ("balanced", [row("int8/auto", 0.1, 10, snr=9.0), row("as_file/bf16", 1.0, 100, snr=19.0)], 1),
    ("speed", [BAD, row("as_file/bf16", 1.0, snr=math.inf)], 1),
])  # fmt: skip
def test_the_best_for_a_goal(goal, rows, best):
    assert found(rows, given="").best.get(goal) is rows[best]


def test_of_equals_the_closest_is_chosen_or_what_the_model_holds_already():
    """For each goal, in any order, and whatever the times are where the memory is ranked."""
    int8, fp8 = row("int8/auto", 1.02, 101, 40.0), row("fp8_e4m3fn/auto", 1.0, 100, 39.1)
    far = replace(fp8, snr_db=33.0)
    for goal, rows in itertools.product(GOALS, ([int8, fp8], [fp8, int8])):
        assert found(rows, given="").best.get(goal) is int8, goal
        assert found(rows, given="fp8_e4m3fn").best.get(goal) is fp8, goal
        rows = [far if one is fp8 else one for one in rows]
        assert found(rows, given="fp8_e4m3fn").best.get(goal) is int8, f"{goal}: twice the error is no tie"
    for spread in (0.0, 0.9):
        noisy = [replace(int8, seconds=3.3, spread=spread), replace(far, seconds=0.92, spread=spread)]
        assert found(noisy, given="").best.get("memory") is noisy[0]
    for given, storage in (("bf16", "as_file"), ("fp8_e4m3fn", "fp8_e4m3fn")):
        equal = [row(text, 1.0, 50, 40.0) for text in ("int8/auto", "fp8_e4m3fn/auto", "as_file/bf16")]
        assert {one.storage for one in found(equal, given).best.values()} == {storage}


@pytest.mark.parametrize(("seconds", "spread", "mib", "goals"), [
    (3.92, 0.0, 100, {"quality", "memory"}), (2.0, 2.1, 100, {"quality", "memory"}), (5.0, 0.0, 100, {"quality", "memory"}),
    (3.92, 0.0, 50, {"quality", "memory", "balanced"}), (4.1, 0.0, 50, {"quality", "memory", "balanced"}), (5.0, 0.0, 50, {"quality", "memory"}),
    (3.8, 0.0, 100, set(GOALS)), (2.0, 1.9, 100, set(GOALS)),
])  # fmt: skip
def test_what_gains_nothing_over_the_reference_beyond_the_noise_is_no_best(seconds, spread, mib, goals):
    """Not in the sentence, the table, the chart nor the page's rows; balanced may gain memory alone."""
    measured = replace(found([row("as_file/fp16", seconds, mib, 35.0)]), reference=replace(REFERENCE, spread=spread))
    assert measured.best.keys() == goals
    result = tradeoffs_result(measured)
    assert {goal for one in result.best for goal in one["goals"]} == goals - {"balanced"}
    expected = BEST if "balanced" in goals else UNRANKED if measured.is_noisy else NO_GAIN
    assert template_of(result) == expected and (result.use is None) == (expected is not BEST)
    assert untranslated([result.sentence]) == []
    none = {line for line in verdicts(measured) if line.endswith((NOISY, NOT_FASTER))}
    assert len(none) == len(GOALS) - len(goals) == result.text.count(NOISY if measured.is_noisy else NOT_FASTER)


NOISY_ROWS = [
    replace(SLOW, seconds=0.1, spread=0.05),
    replace(SMALL, spread=0.9),
    replace(SMALL, setting=Setting("fp8_e5m2", "auto"), seconds=1.5, snr_db=30.0),
]
"""Of two rows of one size the faster and closer has a noisy time, and so has the closest."""


def test_memory_and_error_are_ranked_where_times_are_too_noisy():
    """By what is known of them: between two of one size the closer, between two as close the smaller."""
    assert (
        found(NOISY_ROWS, given="").best.get("memory") is NOISY_ROWS[1]
        and found(NOISY_ROWS, given="").best.get("quality") is NOISY_ROWS[0]
    )
    as_close = [replace(SLOW, snr_db=49.5), replace(SMALL, snr_db=50.0, spread=0.9)]
    assert found(as_close, given="").best.get("quality") is as_close[1]
    assert [
        found([replace(row, spread=row.seconds) for row in (SLOW, SMALL)], given="").best.get(goal)
        for goal in ("balanced", "speed")
    ] == [None, None]


def test_chart_table_and_sentence_tell_of_one_verdict(monkeypatch):
    """No best in one of them that another has not, whatever the times are like."""
    drawn = []
    monkeypatch.setattr(
        charts, "column_chart", lambda title, heads, rows, notes: drawn.append(notes) or np.zeros((1, 1, 3), np.uint8)
    )
    for rows in (ROWS, [replace(row, spread=row.seconds) for row in (SLOW, SMALL, FAST)], [FAST], [BAD, CANNOT]):
        tradeoffs_chart(found(rows))
        ranked, notes = found(rows).best, drawn.pop()
        best = {note.partition(":")[0].removeprefix("best for ") for note in notes if NOISY not in note}
        assert best == ranked.keys()
        result = tradeoffs_result(found(rows))
        lines = result.text.splitlines()
        table = {line.split(":")[0].strip() for line in lines if line.startswith("  ") and " storage " in line}
        assert table == ranked.keys()
        assert (template_of(result) in (BEST, CLOSEST)) == ("balanced" in ranked) and (
            result.sentence == NONE_WORKS
        ) == (not ranked)


@pytest.mark.parametrize(("storage", "compute"), [
    *[(storage, COMPUTE_OPTIONS[place % len(COMPUTE_OPTIONS)]) for place, storage in enumerate(STORAGE_OPTIONS[1:])], *[("int8", compute) for compute in COMPUTE_OPTIONS],
])  # fmt: skip
def test_rules_store_each_layer_as_the_loader_with_that_storage(storage, compute):
    rules = row(f"{storage}/{compute}").rules_for("bf16", LAYERS)
    wanted = plan_storage(LAYERS, storage, rules_from())
    made = plan_storage(LAYERS, "as_file", rules)
    assert {name: one.storage for name, one in made.items()} == {name: one.storage for name, one in wanted.items()}
    computed = rules.setting("compute", LAYERS[0].name, LAYERS[0].cls)
    assert (computed[0] if computed else "auto") == ("auto" if compute == "int8" else compute)
    stream = rules.setting("stream", LAYERS[0].name, LAYERS[0].cls)
    assert (stream is not None and stream[0] == "fp32") == (compute in ("fp16", "fp16_safe", "fp32"))


def test_rules_name_sensitive_layers_only_where_the_model_has_some():
    text = [str(rule) for rule in SMALL.rules_for("bf16", LAYERS).own]
    assert text[0] == "* storage=int8  # measured: int8/auto"
    assert [line.split()[0] for line in text[1:]] == ["*time_embed*", "head.*"]


def test_the_rules_carry_the_figures_of_their_row_for_the_card_of_a_file_that_is_made_with_them():
    assert found().rules.own[0].reason == (
        "measured: int8/auto, 1 s/step, 50.00 MiB, 38.0 dB, RTX 4090, driver 580.1, torch 2.11.0+cu130, WAN21, "
        "latent 1 x 16 x 1 x 8 x 8"
    )


def cells(text: str) -> list[list[str]]:
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if "s/step" in line)
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start : start + len(ROWS) + 2]]


def test_the_table_has_the_figures_of_every_row():
    header, *body = cells(tradeoffs_result(found()).text)
    assert header == ["setting", "s/step", "memory", "weights", "SNR dB", "what ran"]
    assert body[0] == [
        "1 as_file/bf16",
        "2.00",
        "100.00 MiB",
        "100.00 MiB",
        "50.0",
        "weights as_file 100 %; layers 3 in bf16",
    ]
    assert body[4] == ["5 as_file/fp16", "-", "-", "-", "-", BAD.problem]
    assert body[6][:2] == ["as_file/fp32 (reference)", "4.00"]


def test_the_table_ends_with_the_rules_and_says_what_memory_is():
    text = tradeoffs_result(found()).text
    rules = text.partition("# balanced as rules")[2].partition("\n")[2]
    assert tuple(rules_from(rules).own) == found().rules.own
    assert [line.settings for line in rules_from(rules).own] == [
        line.settings for line in SMALL.rules_for("bf16", LAYERS).own
    ]
    assert "balanced: storage int8, compute auto = bf16 (1.00 s/step, 50.00 MiB, 38.0 dB)" in text
    assert "memory: weights alone" in text
    told = tradeoffs_result(found([replace(SMALL, extra_bytes=10 * MIB)])).text
    assert "weights alone" not in told and "60.00 MiB" in told


def test_a_table_without_any_result_says_so():
    none = found([BAD, CANNOT])
    text = tradeoffs_result(none).text
    assert (
        "No setting gave a finite result." in text
        and "rules" not in text
        and none.rules == rules_from()
        and not none.best
    )
    assert tradeoffs_result(none).tone == "bad" and tradeoffs_result(found()).marked == 0


def sentence(rows, **about) -> str:
    return tradeoffs_result(found(rows, **about)).sentence


def template_of(result) -> str:
    """The template of the first sentence, which is the answer."""
    first, *_ = getattr(result.sentence, "sentences", ()) or (result.sentence,)
    return getattr(first, "template", first)


def test_the_first_line_answers_in_one_sentence():
    assert (
        sentence(ROWS)
        == "Best: int8, computed in bf16. 1.00 s a step (bf16 2.00), 50.00 MiB (100.00 MiB), error 1.3 %."
    )
    assert sentence([SLOW, WORSE]) == "Best: bf16. 2.00 s a step (fp32 4.00), 100.00 MiB, error 0.32 %.", (
        "beside the reference"
    )
    assert sentence([row("int8/int8")]).startswith("Best: int8. 1.00 s a step (fp32 4.00), 100.00 MiB, "), (
        "nothing else of the file's own weights"
    )
    assert sentence([FAST]).startswith(
        "No setting has an error of 5.6 % or less. The closest: fp8_e4m3fn, computed in fp8. 0.900 s a step (fp32 4.00)"
    )
    noisy = [replace(row, spread=row.seconds) for row in (SLOW, SMALL)]
    assert sentence(noisy).endswith("Smallest: int8, computed in bf16, 50.00 MiB. Closest: bf16, error 0.32 %.")


def test_weights_whose_file_is_not_known_are_told():
    assert sentence(ROWS, is_of_file=False).endswith(
        "error 1.3 % against the weights as loaded, whose file is not known."
    )
    assert (
        "weights as loaded, in bf16: their file is not known; latent" in tradeoffs_result(found(is_of_file=False)).text
    )
    assert (
        "weights of the file in bf16 (loaded in int8, measured from the file); latent"
        in tradeoffs_result(found(given="int8")).text
    )


def test_what_a_button_puts_into_the_workflow_is_what_was_measured():
    """A storage and compute of loaders, and for nodes that plan anew, what is not computed by itself."""
    assert tradeoffs_result(found()).use == {"storage": "int8", "compute": "auto", "rules": ""}
    assert tradeoffs_result(found([row("as_file/fp16_safe")])).use == {
        "storage": "as_file",
        "compute": "fp16_safe",
        "rules": "compute=fp16_safe stream=fp32",
    }
    assert [tradeoffs_result(found(rows)).use for rows in ([FAST], [BAD], NOISY_ROWS[1:])] == [None] * 3


def test_what_a_button_copies_is_a_table_and_json():
    *lines, _, told = tradeoffs_result(found()).copied.splitlines()
    head, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head == ["card", "driver", "torch", "model", "setting", "s/step", "memory", "SNR dB"] and {*rule} == {"---"}
    here = ["RTX 4090", "580.1", "2.11.0+cu130", "WAN21, latent 1 x 16 x 1 x 8 x 8"]
    assert [row[:4] for row in rows] == [here] * 5 and [row[4] for row in rows] == [
        "as_file/bf16",
        "fp8_e4m3fn/fp8",
        "int8/auto",
        "fp8_e4m3fn/auto",
        "as_file/fp32 (reference)",
    ]
    assert rows[2][5:] == ["1.00", "50.00 MiB", "38.0"]
    assert json.loads(told) == [dict(zip(head, row, strict=True)) for row in rows]
    assert tradeoffs_result(found([FAST])).copied and not tradeoffs_result(found([BAD])).copied


def test_a_copied_row_has_its_spread():
    rows = [replace(SMALL, spread=0.41), replace(SLOW, spread=0.06)]
    copied = tradeoffs_result(found(rows)).copied
    assert "| 1.00 \u00b141 % |" in copied and "| 2.00 \u00b13 % |" in copied and "\\u00b141 %" in copied


def test_several_seeds_are_told_by_their_mean_and_least_cosine():
    seen = replace(SMALL, cosines=[0.999, 0.95, 0.998])
    measured = replace(found([SLOW, seen]), seeds=3)
    said = "cosine 0.9823 over 3 seeds (least 0.9500, seed 8)"
    result = tradeoffs_result(measured)
    assert seen.worst == 1 and f"{said}, error 1.3 %." in result.sentence and said in result.text
    assert "cosine" not in tradeoffs_result(found([SLOW, seen])).sentence, "one seed is told by its error"


def test_two_pictures_stand_below_the_chart(monkeypatch):
    """Of the reference and of the best setting, with the seed of the least cosine."""
    said = []
    monkeypatch.setattr(charts, "write_text", lambda drawing, x, y, text, *_: said.append(text))
    drawn = [np.full((4, 8, 3), value, np.uint8) for value in (0, 255)]
    plain, shown = (
        tradeoffs_chart(replace(found([SLOW, replace(SMALL, cosines=[0.9, 0.8], pictures=each)]), seeds=2))
        for each in ((), drawn)
    )
    below = shown[len(plain) :]
    assert np.array_equal(shown[: len(plain)], plain) and shown.shape[1] == 1024 and len(below) > 190
    assert (below[140, 100] == 0).all() and (below[140, 900] == 1).all()
    assert said == [f"{setting}, after four steps, seed 8 (least cosine)" for setting in ("as_file/fp32", "int8/auto")]


TWIN = replace(row("auto/auto", 3.9, snr=math.inf), storages=REFERENCE.storages, modes=REFERENCE.modes)
"""Computes as the reference does, as ``auto`` of an fp16 file on a CPU."""


def test_a_setting_that_computes_as_the_reference_is_shown_without_a_gain():
    assert sentence([TWIN]).startswith("No setting is better than as_file/fp32: ")
    assert "Best" not in sentence([replace(TWIN, seconds=2.0, spread=3.0)])
    lossy = replace(TWIN, seconds=3.8, snr_db=60.0)
    assert sentence([lossy]).startswith("Best: bf16, computed in fp32. 3.80 s a step (fp32 4.00)"), "TF32 is no twin"
    assert "s a step (fp32 3.90), " in sentence([replace(SMALL, seconds=1.0), TWIN]), "a gain over the twin is one"


@pytest.mark.parametrize(("seconds", "spread", "ranks"), [
    (3.9, 0.0, True), (3.0, 0.0, False), (5.0, 0.0, False), (3.0, 0.9, False), (3.0, 1.1, True), (3.9, 1.1, True),
])  # fmt: skip
def test_twins_that_differ_by_more_than_their_spread_rank_nothing(seconds, spread, ranks):
    """Whichever of both is the faster: what they differ by is the noise of the measurement."""
    twin = replace(TWIN, seconds=seconds, spread=0.0)
    for rows in ([twin, SMALL, SLOW], [SMALL, twin]):
        measured = replace(found(rows), reference=replace(REFERENCE, spread=spread))
        assert (measured.best.keys() == {"balanced", "quality", "speed", "memory"}) == ranks
        assert ranks or measured.best == {"quality": twin, "memory": SMALL}, "which need no time"
        result = tradeoffs_result(measured)
        text = " ".join(result.text.split())
        assert (template_of(result) == UNRANKED) != ranks and (result.use is None) != ranks
        assert ("their times differ by more than the spread" in text) != ranks and (
            "their times agree" in text
        ) == ranks


def test_only_the_rows_that_may_win_make_the_ranking_doubtful():
    here = row("as_file/bf16", 1.0, 100, 50.0)
    may, cannot = (row("as_file/bf16", seconds, snr=50.0, spread=0.5) for seconds in (0.9, 1.1))
    tables = ([here], [FAST], [here, may], [here, cannot], [FAST, may, may], [may], [FAST, may])
    assert [template_of(tradeoffs_result(found(rows))) for rows in tables] == [
        BEST,
        CLOSEST,
        UNRANKED,
        BEST,
        UNRANKED,
        BEST,
        BEST,
    ]


def test_the_best_row_comes_first_and_a_noisy_one_is_not_ranked():
    noisy = replace(SMALL, spread=0.21)
    rows = tradeoffs_result(found([SLOW, noisy, FAST])).rows
    assert [(row[0], NOISY in row[1]) for row in rows] == [
        ("as_file/bf16", False),
        ("int8/auto = int8/bf16", True),
        ("fp8_e4m3fn/fp8", False),
        ("as_file/fp32 (reference)", False),
    ]
    assert untranslated([list(row[1:4]) for row in rows]) == []
    none_ranks = tradeoffs_result(found([noisy, noisy]))
    assert none_ranks.marked is None and none_ranks.tone == "warn" and found([noisy, noisy]).rules == rules_from()
    assert tradeoffs_result(found()).rows[0][0] == "int8/auto = int8/bf16"


def test_the_fastest_the_smallest_and_the_closest_are_given_as_numbers():
    """One row for each, and one for all where they are the same; nothing is fastest where times are too noisy."""
    measured = found()
    best = {goal: one for one in tradeoffs_result(measured).best for goal in one["goals"]}
    for goal, row in ((goal, measured.best[goal]) for goal in ("speed", "memory", "quality")):
        figures = (row.seconds, row.bytes, pytest.approx(10 ** (-row.snr_db / 20)), row.storage, row.setting.compute)
        one = best[goal]
        assert (one["seconds"], one["bytes"], one["error"], one["use"]["storage"], one["use"]["compute"]) == figures
    assert [one["goals"] for one in tradeoffs_result(found([FAST])).best] == [["speed", "memory", "quality"]]
    noisy = tradeoffs_result(found([replace(row, spread=row.seconds) for row in (SLOW, SMALL)]))
    assert "speed" not in {goal for one in noisy.best for goal in one["goals"]} and noisy.best


def pixels(chart: np.ndarray, colour) -> int:
    return int((np.rint(chart * 255) == colour).all(-1).sum())


def test_the_chart_draws_every_row_and_is_read_at_half_its_size():
    """Three bars a row and nothing else in their colour, so that no legend is taken for a row."""
    chart, one = tradeoffs_chart(found()), tradeoffs_chart(found([SMALL, BAD]))
    assert chart.dtype == np.float32 and chart.shape[1] == 1024 and 0 <= chart.min() <= chart.max() <= 1
    assert pixels(chart, draw.FILL) > 1.5 * pixels(one, draw.FILL) > 0
    filled = (np.rint(chart * 255) == draw.FILL).all(-1).any(1)
    bars = int((np.diff(filled.astype(int)) == 1).sum())
    assert bars == 1 + sum(not row.problem for row in ROWS), bars
    assert draw.LARGE / 2 >= 13 and chart.shape[0] <= 0.75 * 1024, "a node of 560 x 420 pixels shows it whole"


def test_lines_are_read_in_order_and_each_setting_once():
    text = "\n# first\nint8/auto  # small\n  FP8_e4m3fn / fp8 \nint8/auto\nauto/auto\r\n"
    assert settings_from(text) == [Setting("int8", "auto"), Setting("fp8_e4m3fn", "fp8"), Setting("auto", "auto")]
    every = [Setting(storage, compute) for storage in STORAGE_OPTIONS for compute in COMPUTE_OPTIONS]
    assert settings_from("\n".join(map(str, every))) == every


@pytest.mark.parametrize(("text", "words"), [
    ("auto/auto\nint8", "Candidates, line 2, int8: '' is not a compute option. Use one of: auto"),
    ("\n\nint8/auto/fp16", "line 3, int8/auto/fp16: 'auto/fp16' is not a compute option"),
    ("int4/auto", "line 1, int4/auto: 'int4' is not a storage option. Use one of: auto"),
    ("# ok\nint8/fp8_e4m3fn", "line 2, .*'fp8_e4m3fn' is not a compute option"), ("/fp16", "line 1, /fp16: '' is not a storage option"),
    ("fp9/auto\nint8/fp7", "line 1, .*'fp9' is not a storage option. .* line 2, .*'fp7' is not a compute option. Use .* as storage. Use .* as compute."),
    ("", "no candidate"), ("# nothing\n\n", "no candidate to measure. Write: <storage>/<compute>"),
])  # fmt: skip
def test_a_text_that_cannot_be_read_is_an_error_with_its_line(text, words):
    with pytest.raises(HalfsafeError, match=words):
        settings_from(text)


@pytest.mark.parametrize(("setting", "profile", "capability"), [
    ("as_file/bf16", "sm_75", "bf16"), ("as_file/fp16", "sm_61", "fp16"), ("as_file/fp16_safe", "sm_61", "fp16"),
    ("fp8_e4m3fn/fp8", "sm_86", "fp8_matmul"), ("int8/int8", "sm_70", "int8_matmul"),
])  # fmt: skip
def test_a_device_that_cannot_is_told_with_its_reason(setting, profile, capability):
    (asked,), device = settings_from(setting), detect(profile=profile)
    assert asked.why_not(device) == f"not on {device.label}: {device.reason(capability)}"
    assert asked.why_not(detect(profile="sm_100")) == "" == Setting("auto", "auto").why_not(device)


def test_a_device_without_fp8_stores_none():
    device = detect(profile="sm_86").without("fp8_storage", "No fp8 here.")
    assert Setting("fp8_e5m2", "auto").why_not(device).endswith("No fp8 here.") and not Setting("int8", "auto").why_not(
        device
    )


@pytest.mark.parametrize("setting", ["as_file/bf16", "as_file/fp16", "auto/fp16_safe", "int8/int8", "fp8_e5m2/fp32"])
def test_a_cpu_is_measured_in_what_it_emulates(setting):
    (asked,) = settings_from(setting)
    assert asked.why_not(detect(profile="cpu")) == ""
