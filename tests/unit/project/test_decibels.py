"""The benchmark of errors in dB: the ratio of a rounding whose noise is known, and what documents and the product say of it."""

import json
import math

import pytest
import torch
from halfsafe.precision.base.options import QUANTIZED_NAMES
from halfsafe.precision.plan.storage import NVFP4_ERROR, PREDICTED_ERROR
from support.inprocess import ROOT, benchmark

rounding = benchmark("rounding")
SAVED = json.loads((ROOT / "benchmarks" / "results" / "decibels.json").read_text(encoding="utf-8"))
UNIFORM = 10 * math.log10(4 * 127**2)
"""48.1 dB: numbers spread evenly over -1 to 1, with a variance of 1/3, rounded to steps of 1/127, with one of 1/12 of its square."""


def toy() -> torch.nn.Sequential:
    """Two layers whose weights are spread evenly over -1 to 1."""
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64, bias=False)).requires_grad_(False)
    for layer in model:
        layer.weight.copy_(torch.rand(layer.weight.shape, generator=generator) * 2 - 1)
    return model


def figures(layers: torch.nn.Sequential, x: torch.Tensor, *roundings: tuple[str, str]) -> list[dict]:
    linears = {str(number): layer for number, layer in enumerate(layers)}
    named = {str(each): rounding.Rounding(*each) for each in roundings}
    inputs = rounding.inputs_of(linears, lambda: layers(x))
    found = rounding.measured(linears, {"call": lambda: layers(x)}, named, inputs)
    assert not any("forward" in vars(layer) for layer in layers)
    return list(found.values())


def test_evenly_spread_numbers_in_int8_have_the_noise_of_theory():
    model, plain = toy(), "int8, not rotated"
    x = torch.rand((128, 256), generator=torch.Generator().manual_seed(2)) * 2 - 1
    weights, product = figures(model[:1], x, (plain, "unpacked"), (plain, plain))
    (two_layers,) = figures(model, x, (plain, "unpacked"))
    twice = 10 * math.log10(2)
    assert weights["call"] == weights["layers_mean"] == weights["layers_worst"] == pytest.approx(UNIFORM, abs=0.3)
    assert product["call"] == pytest.approx(UNIFORM - twice, abs=0.3), "weights and inputs are rounded alike"
    assert two_layers["call"] == pytest.approx(UNIFORM - twice, abs=0.3), "the errors of two layers add up"
    assert two_layers["layers_mean"] == pytest.approx(UNIFORM, abs=0.3), "each layer has exact inputs"
    error = pytest.approx(10 ** (-two_layers["layers_mean"] / 20), rel=0.01)
    assert two_layers["layers_mean_relative_error"] == error


def test_an_overflow_has_no_figure_and_fp16_safe_has_one():
    model, x = toy()[:1], torch.full((4, 256), 1e5)
    plain, safe = figures(model, x, ("fp16", "fp16"), ("fp16", "fp16_safe"))
    assert plain["call"] is plain["layers_mean"] is plain["layers_worst"] is None
    assert safe["call"] > 60


@pytest.mark.parametrize("storage", ["fp16", "bf16", "int8", "fp8_e4m3fn", "fp8_e5m2", "Q8_0", *rounding.FOREIGN])
def test_each_storage_is_near_the_weight(storage):
    # Rotated, numbers are nearly normal: the largest of a row is further from most of them than where they spread evenly.
    expected = {"fp16": 76, "bf16": 56, "fp8_e4m3fn": 33, "fp8_e4m3fn, no scale": 33, "fp8_e5m2": 26, "int8": 43}
    weight = toy()[0].weight
    assert rounding.snr(weight, rounding.in_storage(weight, storage)) == pytest.approx(expected.get(storage, 48), abs=2)


def test_every_product_runs_and_is_near_the_exact_one():
    x = torch.randn(48, 256, generator=torch.Generator().manual_seed(2))
    exact = torch.nn.functional.linear(x, toy()[0].weight)
    floor = {"fp16_safe": 60, "fp16": 60, "fp16 sums": 55, "bf16": 45, "nvfp4": 17}
    for name, product in rounding.PRODUCTS.items():
        result = product(x, toy()[0].weight, None)
        assert result.shape == exact.shape and result.dtype == torch.float32
        assert rounding.snr(exact, result) > floor.get(name, 27), name


def test_every_storage_of_a_setting_has_rows():
    rows = benchmark("decibels").ROWS
    assert set(QUANTIZED_NAMES) <= {storage for storage, product in rows if product == "unpacked"}
    titles = [f"{storage} / {product}" for storage, product in rows]
    assert all(list(model["rows"]) == titles for model in SAVED["models"].values())


def test_errors_that_reports_predict_are_the_measured_ones():
    errors = {
        name: {row: figures["layers_mean_relative_error"] for row, figures in model["rows"].items()}
        for name, model in SAVED["models"].items()
    }
    measured = {storage: errors["MiniLM"][f"{storage} / int8"] for storage in PREDICTED_ERROR}
    assert pytest.approx(measured, rel=0.05) == PREDICTED_ERROR
    of_trained = errors["HunyuanVideo"]
    nvfp4, fp8 = of_trained["nvfp4 / nvfp4"], of_trained["fp8_e4m3fn / fp8_e4m3fn"]
    assert pytest.approx(nvfp4 / fp8, rel=0.05) == NVFP4_ERROR


@pytest.mark.parametrize("page", ["docs/numbers.md", "docs/numbers.zh.md"])
def test_the_table_of_decibels_has_the_figures_of_the_file(page):
    decibels = benchmark("decibels")
    told = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    figures = [cells[3:7] for cells in told if (len(cells) == 8 and cells[3][:1].isdigit()) or cells[3:4] == ["-"]]
    assert figures == [decibels.cells(SAVED["models"], *row) for row in decibels.ROWS]
