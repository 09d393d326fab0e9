"""Clean runs of every family are silent: a sample of what `python -m benchmarks drift` measures and docs/internals/drift.md lists."""

import json
from pathlib import Path

import pytest
from halfsafe.precision.check.drift import THRESHOLDS, threshold_of
from support import clean_runs, tiny_models
from support.guarding import report_of
from support.rows import the_rest_before_a_release

ROOT = Path(__file__).absolute().parents[3]
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "drift.json").read_text(encoding="utf-8"))["rows"]
ARITHMETICS = list(clean_runs.ARITHMETICS)
SAMPLE = [(family, ARITHMETICS[index % len(ARITHMETICS)]) for index, family in enumerate(clean_runs.FAMILIES)]
EACH = [row for row in SAMPLE if row[0] != "segmind_vega"]
"""SDXL, which it is with fewer blocks, runs each time."""


@pytest.mark.parametrize(("family", "arithmetic"), the_rest_before_a_release(EACH, SAMPLE))
def test_a_clean_run_is_silent(comfy, models_dir, family, arithmetic):
    path = clean_runs.write(family, models_dir / "diffusion_models")
    silent(clean_runs.checked(comfy, family, path, arithmetic), arithmetic)
    path.unlink()


@pytest.fixture(scope="module")
def wide(models_dir):
    return tiny_models.ltxv(models_dir / "diffusion_models" / "wide.safetensors", head_dim=64, layers=1)


@pytest.mark.parametrize("arithmetic", [pytest.param("bf16", marks=pytest.mark.release), "int8"])
def test_a_clean_run_at_the_width_of_the_published_model_is_silent(comfy, wide, arithmetic):
    silent(clean_runs.checked(comfy, "ltxv", wide, arithmetic), arithmetic)


def silent(model, arithmetic):
    (check,) = report_of(model).checks
    print(f"\nclean | {arithmetic} | {check.arithmetic} | {check.snr_db:.1f} | {check.threshold_db}")
    assert report_of(model).events == [] and report_of(model).verdict == "clean"
    assert check.arithmetic in (arithmetic, "bf16") and check.arithmetic in THRESHOLDS
    assert check.snr_db >= check.threshold_db and (check.repeats, check.left_out) == (1, "")
    assert check.blocks


def test_the_thresholds_are_those_that_every_family_was_measured_with():
    assert list(MEASURED) == list(clean_runs.FAMILIES)
    for row in MEASURED.values():
        assert list(row["arithmetics"]) == [name for name in ARITHMETICS if name != "fp32"]
        for found in row["arithmetics"].values():
            assert found["threshold_db"] == threshold_of(found["as"], row["layers"])
            assert found["margin_db"] > 5 and (found["verdict"], found["events"]) == ("clean", 0)


def test_the_document_has_the_closest_run_of_each_arithmetic():
    lines = (ROOT / "docs" / "internals" / "drift.md").read_text(encoding="utf-8").splitlines()
    for arithmetic in [name for name in ARITHMETICS if name != "fp32"]:
        found = {family: row["arithmetics"][arithmetic] for family, row in MEASURED.items()}
        closest = min(found, key=lambda family: found[family]["margin_db"])
        snr, margin, own = (found[closest][key] for key in ("snr_db", "margin_db", "as"))
        assert f"| {arithmetic} | {THRESHOLDS[own]:g} | {closest} | {snr:.1f} | {margin:.1f} |" in lines
