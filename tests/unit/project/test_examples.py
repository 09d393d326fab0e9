"""The examples run as they are, quickly, and measure what they claim."""

import math
import runpy

import pytest
from support.shipped import ROOT
from torch.utils.flop_counter import FlopCounterMode

EXAMPLES = sorted(path.name for path in (ROOT / "docs" / "examples").glob("*.py"))


def run(name: str):
    """What the example's ``main`` returns."""
    return runpy.run_path(str(ROOT / "docs" / "examples" / name))["main"]()


@pytest.mark.parametrize("name", EXAMPLES)
def test_prints_its_measurements_in_a_few_seconds(name, capsys):
    with FlopCounterMode(display=False) as counted:
        runpy.run_path(str(ROOT / "docs" / "examples" / name), run_name="__main__")
    assert 1e6 < counted.get_total_flops() < 5e9, "a CPU takes seconds for more"
    assert capsys.readouterr().out.count("error") >= 3


def test_the_readme_lists_every_example():
    text = (ROOT / "docs" / "examples" / "README.md").read_text(encoding="utf-8")
    assert [name for name in EXAMPLES if f"docs/examples/{name}" not in text] == []


def test_scaled_fp8_beats_the_plain_cast_and_is_near_bf16():
    scaled, plain, half = run("fp8_pipeline.py").values()
    assert half < scaled < 0.05 and plain > 2 * scaled


def test_the_half_float_mix_is_closer_than_bf16_where_fp16_overflows():
    errors = run("half_float_mix.py")
    assert math.isnan(errors["fp16"])
    assert max(errors["first call"], errors["later call, 100 times larger"]) < errors["bf16"] / 3


def test_attention_is_right_where_plain_fp16_is_not():
    found = run("large_attention.py")
    assert [mode for _, _, mode in found.values()] == ["unchanged", "smooth-K", "fp32"]
    for plain, ours, mode in found.values():
        assert ours < 2e-3 and (mode == "unchanged" or not plain < 0.1)
