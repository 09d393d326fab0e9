"""What the page shows of a report, and the rules that repeat it, are derived on the server."""

import json
from dataclasses import replace

import pytest
from halfsafe.precision.base.modes import MODES
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.report.schema import GuardReport, LayerReport, ModelReport, Report
from halfsafe.precision.report.view import rules_text


def layer(name, mode="bf16", cls="Linear", storage="bf16", reason=""):
    return LayerReport(name, cls, storage, mode, "fp32", "same", reason)


def blocks(count=4, part="ffn.0", **setup):
    return [layer(f"blocks.{number}.{part}", **setup) for number in range(count)]


def rules_in(report):
    return {rule.pattern: dict(rule.settings) for rule in rules_from(report.to_json()["rules"]).own}


def test_rows_hold_every_layer_once_and_name_the_blocks_they_are_in():
    layers = [layer("embed", cls="Embedding"), *blocks(), *blocks(4, "ffn.2")]
    layers[2].storage = layers[3].storage = "fp8_e4m3fn"
    rows = Report(layers=layers).to_json()["view"]["rows"]
    assert [(row["name"], row["layers"]) for row in rows] == [
        ("embed", [0]), ("blocks.[0,3].ffn.0", [1, 4]), ("blocks.[1-2].ffn.0", [2, 3]), ("blocks.*.ffn.2", [5, 6, 7, 8]),
    ]  # fmt: skip


def test_layers_with_different_reasons_have_rows_of_their_own():
    layers = blocks(2)
    layers[1].reason = "first and last blocks"
    assert [row["name"] for row in Report(layers=layers).to_json()["view"]["rows"]] == [
        "blocks.0.ffn.0",
        "blocks.1.ffn.0",
    ]


def test_shares_are_largest_first_and_count_layers_that_multiply():
    model = ModelReport("WAN21", 1_420_000_000, 4 * 1024**3, {"fp16": 1024**3, "fp8_e4m3fn": 3 * 1024**3})
    layers = [layer("norm", "fp32", "RMSNorm"), layer("head", "fp32"), *blocks(3)]
    view = Report(model=model, layers=layers).to_json()["view"]
    assert (view["parameters"], view["size"]) == ("1.42 B", "4.00 GiB")
    assert view["stored"] == [
        {"name": "fp8_e4m3fn", "share": 0.75, "size": "3.00 GiB"}, {"name": "fp16", "share": 0.25, "size": "1.00 GiB"},
    ]  # fmt: skip
    assert view["computed"] == [
        {"name": "bf16", "share": 0.75, "layers": 3},
        {"name": "fp32", "share": 0.25, "layers": 1},
    ]


def test_every_mode_and_storage_has_a_colour_for_the_page():
    data = json.loads(json.dumps(Report().to_json()))
    assert list(data["modes"]) == list(MODES)
    assert data["modes"]["fp16_wide"] == {"label": "fp16 with fp32 results", "colour": "#3e74d8"}
    assert data["storages"]["fp8_e4m3fn"] == {"colour": "#eea52a"}


def test_rules_name_what_runs_otherwise_than_most_and_then_the_guards():
    layers = [*blocks(4, "q"), *blocks(4, "ffn.0"), *blocks(4, "ffn.2")]
    for place in (0, 1, 2, 3, 5):
        layers[place].mode = "fp16_scaled"
    guard = GuardReport("recovered", 1, 1, {"blocks.0.ffn.2": "fp32", "residual stream": "fp32"})
    guard.rules = "* stream=fp32\nblocks.0.ffn.2 compute=fp32 stream=fp32"
    assert rules_in(Report(layers=layers, guard=guard)) == {
        "blocks.*.q": {"compute": "fp16_safe"},
        "blocks.1.ffn.0": {"compute": "fp16_safe"},
        "*": {"stream": "fp32"},
        "blocks.0.ffn.2": {"compute": "fp32", "stream": "fp32"},
    }


def test_a_pattern_that_would_match_other_layers_is_not_used():
    layers = [layer("blocks.0.img.q", "fp32"), layer("blocks.1.img.q", "fp32"), layer("blocks.1.img.txt.q"), *blocks(9)]
    layers[2].name = "blocks.1.up.img.q"
    assert set(rules_in(Report(layers=layers))) == {"blocks.0.img.q", "blocks.1.img.q"}


@pytest.mark.parametrize("mode", MODES)
def test_every_modes_rule_is_written(mode):
    usual = "bf16" if mode != "bf16" else "fp32"
    data = Report(layers=[*blocks(3, mode=usual), layer("head", mode)]).to_json()
    assert rules_text(data) == f"head {MODES[mode].rule}"


def test_layers_that_multiply_nothing_or_run_in_no_mode_have_no_rule():
    layers = [layer("norm", "fp32", "RMSNorm"), layer("odd", "fp64"), *blocks(3)]
    assert Report(layers=layers).to_json()["rules"] == ""


def test_a_layer_that_model_code_itself_calls_in_fp32_needs_no_rule():
    embedding = LayerReport(
        "patch_embedding", "Conv3d", "bf16", "fp32", "fp32", "bf16", "in any words", called_in_fp32=True
    )
    report = Report(layers=[*blocks(3), embedding]).to_json()
    assert report["rules"] == "" and "called_in_fp32" not in report["layers"][-1]
    assert "patch_embedding" in Report(layers=[*blocks(3), replace(embedding, called_in_fp32=False)]).to_json()["rules"]
