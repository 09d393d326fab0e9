"""Graphs in which everything stands beside everything: each pair of values of `support.compose`'s factors, judged by ComfyUI alone and by the report.

`python scripts/compose.py` draws others. A row, as a failure prints it, makes its case again.
"""

from __future__ import annotations

import itertools

import pytest
from support import compose
from support.composing import Composer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        option = metafunc.config.getoption
        rows, count, seed = (option(f"composed_{name}", None) for name in ("row", "cases", "seed"))
        drawn = itertools.islice(compose.draws(seed or 0), count or 0)
        cases = map(compose.case_of, rows) if rows else drawn if count else compose.pairs()[0]
        metafunc.parametrize("case", cases, ids=compose.row_of)


@pytest.fixture(scope="module")
def composer(comfy, models_dir):
    return Composer(comfy, models_dir)


def test_a_graph_is_right_or_refused_in_a_sentence(composer, case, record_property):
    found = composer.judge(case)
    record_property("outcome", tuple(found))
    assert found.kind != "wrong", f"{found.text}\n{compose.row_of(case)}"


ACTING = {"lora": ("both", "hook_keyframes"), "merge": ("whole", "blocks"), "foreign": ("wrapper", "block", "attn2")}


@pytest.mark.parametrize("factor", ACTING)
@pytest.mark.parametrize("family", compose.FACTORS["family"])
def test_what_a_graph_would_lose_is_seen(composer, family, factor):
    """A LoRA, a merge or another pack's code moves the reference by more than what storage and compute may cost."""
    rows = [f"family={family} {factor}={value} storage=fp8_e4m3fn nodes=G" for value in ACTING[factor]]
    cases = [case for case in map(compose.case_of, rows) if not compose.refusal(case)]
    assert {compose.row_of(case): small for case in cases if (small := composer.is_blind(case))} == {}


def test_what_cannot_be_combined_is_told_in_words():
    cases, impossible = compose.pairs()
    assert [pair for pair in impossible if not compose.refusal(dict(pair))] == []
    assert not any(compose.refusal(case) for case in cases)
