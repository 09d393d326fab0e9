"""The report's JSON is a public contract; its text and picture are what people read and paste."""

import json
import platform
import types
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from halfsafe.precision.base import flags
from halfsafe.precision.base.layer_names import count_patterns, group_name, grouped, pattern_of
from halfsafe.precision.base.modes import MODES
from halfsafe.precision.devices import detect as devices
from halfsafe.precision.guard import verdicts
from halfsafe.precision.plan.accumulation import PARTS, flag_report
from halfsafe.precision.report import draw
from halfsafe.precision.report import report_chart as chart
from halfsafe.precision.report import schema as report

CONTRACT = """
{"version": 1,
 "device": {"name": "NVIDIA GeForce RTX 3090", "profile": "sm_86", "simulated": false,
            "capabilities": {"bf16": true, "fp8_matmul": false}},
 "model": {"class": "WAN21", "parameters": 1420000000, "weight_bytes": 1500000000,
           "bytes_by_storage": {"fp8_e4m3fn": 1400000000, "fp16": 100000000}},
 "layers": [{"name": "blocks.0.ffn.0", "class": "Linear", "storage": "fp8_e4m3fn", "mode": "fp16_wide",
             "accumulation": "fp32", "stream": "fp32", "reason": "may overflow", "kernel": "dequantized"}],
 "flags": {"fp16_accumulation": {"requested": "auto", "in_scope": false, "outside": false, "reason": "no gain"}},
 "without_effect": [{"setting": "tf32", "reason": "bf16 model"}],
 "kept_high": [{"name": "head.head", "reason": "last projection"}],
 "guard": {"verdict": "recovered", "calls": 20, "extra_calls": 2, "escalations": {"blocks.0.ffn.2": "fp16_wide"},
           "events": [{"call": 4, "step": 2, "sigma": 0.75, "layer": "blocks.0.ffn.2", "op": "add", "kind": "overflow",
                       "batch_rows": [0], "from": "fp16", "to": "fp16_wide", "recovered": true}]}}
"""


RULE = "blocks.0.ffn.2 compute=fp16_safe stream=fp32"


def contract_report():
    event = report.GuardEvent(4, 2, 0.75, "blocks.0.ffn.2", "add", "overflow", [0], "fp16", "fp16_wide", True)
    layer = report.LayerReport(
        "blocks.0.ffn.0", "Linear", "fp8_e4m3fn", "fp16_wide", "fp32", "fp32", "may overflow", "dequantized"
    )
    sizes = {"fp8_e4m3fn": 1_400_000_000, "fp16": 100_000_000}
    return report.Report(
        device=json.loads(CONTRACT)["device"],
        model=report.ModelReport("WAN21", 1_420_000_000, 1_500_000_000, sizes),
        layers=[layer],
        flags={"fp16_accumulation": {"requested": "auto", "in_scope": False, "outside": False, "reason": "no gain"}},
        without_effect=[report.WithoutEffect("tf32", "bf16 model")],
        kept_high=[report.KeptHigh("head.head", "last projection")],
        guard=report.GuardReport("recovered", 20, 2, {"blocks.0.ffn.2": "fp16_wide"}, [event], RULE, "Nothing to do."),
    )


def wan(blocks=30, kept=(0, 1, 29)):
    """Layers like Wan's: blocks that are alike but for those in ``kept``."""
    layers = [report.LayerReport("patch_embedding", "Conv3d", "fp16", "fp32", "fp32", "fp32", "embedder")]
    for block in range(blocks):
        storage, reason = ("fp16", "first and last blocks") if block in kept else ("fp8_e4m3fn", "")
        for part in ("self_attn.q", "ffn.0", "ffn.2"):
            name = f"blocks.{block}.{part}"
            layers.append(report.LayerReport(name, "Linear", storage, "fp16", "fp32", "same", reason))
    high = [report.KeptHigh(layer.name, layer.reason) for layer in layers if layer.reason]
    sizes = {"fp8_e4m3fn": 3 * 1024**3, "fp16": 1024**3}
    model = report.ModelReport("WAN21", 3_000_000_000, 4 * 1024**3, sizes)
    return report.Report(model=model, layers=layers, kept_high=high, flags={name: flag_report(name) for name in PARTS})


def test_an_empty_report_has_every_section_and_no_guard():
    found = report.Report().to_json()
    assert set(found) == set(contract_report().to_json()) and found["guard"]["verdict"] == "off"
    assert set(found["modes"]) == set(MODES) and set(found["storages"]) == set(chart.STORAGE_COLOURS)
    assert found["view"] == {"parameters": "0", "size": "0 B", "stored": [], "computed": [], "rows": []}


def test_json_is_the_contracts_key_for_key_in_its_order():
    found, contract = contract_report().to_json(), json.loads(CONTRACT)
    assert list(found) == [
        *contract,
        "decisions",
        "notes",
        "ranges",
        "encoders",
        "control_nets",
        "attention_in_fp32",
        "file",
        "modes",
        "storages",
        "rules",
        "view",
    ]
    assert list(found["guard"]) == [*contract["guard"], "rules", "advice", "checks", "about"]
    found["guard"] = {key: found["guard"][key] for key in contract["guard"]}
    for event in found["guard"]["events"]:
        assert [event.pop(key) for key in list(event)[-6:]] == ["", None, None, "", False, False]
    assert json.dumps({key: found[key] for key in contract}) == json.dumps(contract)


def test_every_value_becomes_json():
    half, infinite = torch.tensor(0.5), torch.tensor(float("inf"))
    values = [
        float("nan"),
        float("inf"),
        half,
        torch.tensor([1, 2]),
        infinite,
        np.float32(0.5),
        np.int64(3),
        (1, (2.0, None)),
        {1: True},
    ]
    assert report.plain(values) == [None, None, 0.5, [1, 2], None, 0.5, 3, [1, [2.0, None]], {"1": True}]
    json.dumps(report.plain(values), allow_nan=False)


def test_verdict_words_are_the_contracts():
    contracts = {"clean", "recovered", "stopped", "bad_weights", "bad_input", "not_precision", "device_fault"}
    assert {*verdicts.VERDICTS} == contracts == {*get_args(report.Verdict)}


def test_the_device_section_is_what_the_device_can_do():
    section = report.device_section(devices.detect(torch.device("cpu"), profile="sm_75"))
    assert (section["profile"], section["simulated"]) == ("sm_75", True)
    assert section["host"] == platform.node() != ""
    assert section["capabilities"]["bf16"] is False and section["capabilities"]["fp8_storage"] is True
    json.dumps(section)


def test_repeated_blocks_are_told_once():
    text = wan(kept=()).to_text()
    assert "  blocks.*.ffn.0 x30 " in text
    assert "blocks.0." not in text
    assert text.count("ffn.2") == 1


def test_blocks_that_differ_are_told_apart_by_number():
    lines = wan().to_text().splitlines()
    assert any("blocks.[0-1,29].ffn.0 x3" in line and " fp16 " in line for line in lines)
    assert any("blocks.[2-28].ffn.0 x27" in line and "fp8_e4m3fn" in line for line in lines)


def test_the_text_has_kept_layers_and_a_table_of_storages():
    text = wan().to_text()
    kept = text.split("Kept in high precision (10)")[1]
    assert "patch_embedding" in kept and "embedder" in kept and "blocks.[0-1,29].self_attn.q x3" in kept
    row = next(line for line in text.splitlines() if line.startswith("fp8_e4m3fn")).split()
    assert row == ["fp8_e4m3fn", "81", "3.00", "GiB", "75.0%"]


def test_the_text_tells_guard_flags_and_settings_without_effect():
    text = contract_report().to_text()
    assert "Guard: recovered (20 calls, 2 repeated)" in text
    assert "step 2, sigma 0.75, call 4: overflow in blocks.0.ffn.2 (add), batch rows 0, fp16 -> fp16_wide" in " ".join(
        text.split()
    )
    assert RULE in text and "Nothing to do." in text
    assert "tf32: bf16 model" in text
    assert (
        "NVIDIA GeForce RTX 3090, profile sm_86" in text and "in hardware: bf16; emulated or absent: fp8_matmul" in text
    )
    flag = next(line for line in text.splitlines() if line.startswith("  fp16_accumulation"))
    assert flag.split()[:4] == ["fp16_accumulation", "auto", "off", "off"]


def test_a_run_without_nan_that_drifted_is_not_called_clean(monkeypatch):
    event = report.GuardEvent(
        5, 5, 0.75, "", "step cache", "drift", [], "", "", False, "7 dB.", 7.0, 8.0, "Leave it out."
    )
    found = report.Report(guard=report.GuardReport("clean", 6, 2, events=[event]))
    assert "Guard: drift (6 calls, 2 repeated)" in found.to_text()
    drawn = []
    monkeypatch.setattr(draw, "write_text", lambda drawing, x, y, text, *rest: drawn.append(text))
    chart.chart(found)
    assert "guard: drift, 6 calls, 2 repeated" in drawn
    assert "Guard: clean (6 calls, 0 repeated)" in report.Report(guard=report.GuardReport("clean", 6)).to_text()


def test_the_text_tells_what_the_guards_of_encoders_saw():
    vae = report.EncoderReport("8", "VAE", "recovered", ["VAE decode: repeated in bf16: finite."])
    lines = report.Report(encoders=[vae, report.EncoderReport("9", "text encoder")]).to_text().splitlines()
    assert lines[lines.index("  VAE (node 8): recovered") + 1] == "      VAE decode: repeated in bf16: finite."
    assert lines[-1] == "  text encoder (node 9): not run yet"


GUARDS_IN_WORDS = {
    "clean": (report.GuardReport("clean", calls=3), "clean"),
    "before a run": (report.GuardReport("clean"), "not run yet"),
    "ended before its result": (report.GuardReport("stopped", calls=3), "no result"),
    "no repeat cured it": (replace(contract_report().guard, verdict="stopped"), "not cured"),
}


@pytest.mark.parametrize("state", GUARDS_IN_WORDS)
def test_a_guard_is_clean_in_words_only_after_a_result(state):
    guard, words = GUARDS_IN_WORDS[state]
    assert f"Guard: {words} ({guard.calls} calls" in report.Report(guard=guard).to_text()


def test_the_text_lists_control_nets_with_their_layers():
    layer = report.LayerReport("blocks.0.ffn.0", "Linear", "int8", "bf16", "fp32", "bf16", kernel="dequantized")
    refused = report.WithoutEffect("storage=int8", "it is small")
    planned = report.ControlReport("depth.safetensors", "ControlNetFlux", 3, {"storage": "int8"}, [layer])
    text = report.Report(
        control_nets=[planned, report.ControlReport("sketch.safetensors", "T2IAdapter", without_effect=[refused])]
    ).to_text()
    lines = text.splitlines()
    first = lines.index("ControlNet depth.safetensors: ControlNetFlux, ran 3 times")
    assert lines[first + 1] == "  storage: int8" and "bf16" in lines[first + 3] and "dequantized" in lines[first + 3]
    assert lines[lines.index("ControlNet sketch.safetensors: T2IAdapter") + 2] == "  storage=int8: it is small"


def test_a_sigma_that_is_nan_is_readable():
    broken = contract_report()
    broken.guard.events[0].sigma = float("nan")
    assert "call 4: overflow in blocks.0.ffn.2 (add)" in broken.to_text() and "sigma" not in broken.to_text()


def test_text_fits_eighty_columns_whatever_the_names():
    full = contract_report()
    name = "diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_out.0.projection.with.a.long.name"
    setup = ("CausalConv3dWithLongName", "fp8_e4m3fn", "fp16_acc16", "fp16", "fp32")
    full.layers += [report.LayerReport(name, *setup, "why " * 60)]
    full.kept_high += [report.KeptHigh(f"{name[:60]}.{index}", "reason " * 40) for index in range(9)]
    full.flags = {name: flag_report(name) for name in PARTS}
    full.without_effect += [report.WithoutEffect("setting", "word " * 60)]
    text = full.to_text()
    assert name in text
    assert max(len(line) for line in text.splitlines() if line.strip() != name) <= 80
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_repeated_layers_are_named_by_their_numbers():
    for name, pattern in (
        ("blocks.12.ffn.0", "blocks.*.ffn.0"), ("layers.7.mlp.0", "layers.*.mlp.0"), ("img_in", "img_in"),
        ("input_blocks.4.1.transformer_blocks.0.attn1.to_q", "input_blocks.*.1.transformer_blocks.*.attn1.to_q"),
    ):  # fmt: skip
        assert pattern_of(name) == pattern
    for numbers, text in (([0, 1, 2, 39], "0-2,39"), ([3, 1, 2], "1-3"), ([1, 3, 5, 6], "1,3,5-6")):
        members = [f"blocks.{number}.q" for number in numbers]
        assert group_name("blocks.*.q", members, 99) == f"blocks.[{text}].q"
    names = [f"input_blocks.{a}.1.transformer_blocks.{b}.q" for a in range(3) for b in range(2)]
    assert grouped(names[:2], count_patterns(names)) == ["input_blocks.*.1.transformer_blocks.*.q x2 of 6"]


def rows_of(picture, colour):
    """How many pixels of each row of a picture have a colour."""
    wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return (picture == np.array(wanted, dtype=np.uint8)).all(axis=-1).sum(axis=1)


def test_the_charts_bars_are_as_wide_as_their_shares():
    picture = chart.chart(wan())
    fp8, fp16 = (rows_of(picture, chart.STORAGE_COLOURS[name]) / draw.BAR for name in ("fp8_e4m3fn", "fp16"))
    for found, share in ((fp8, 0.75), (fp8, 81 / 91), (fp16, 0.25), (fp16, 10 / 91)):
        assert np.isclose(found, share, atol=0.003).sum() >= draw.BAR_HEIGHT


@pytest.mark.parametrize("layers", [0, 1, 5000])
def test_charts_of_any_size_are_drawn(layers):
    rows = [report.LayerReport(f"l{index}", "Linear", "unheard_of", "fp32", "fp32", "same") for index in range(layers)]
    picture = chart.chart(report.Report(layers=rows, model=report.ModelReport("A" * 200, 1, 2, {"unheard_of": 2})))
    assert picture.shape[1:] == (1024, 3)


def test_a_flag_report_shows_the_present_flags_and_changes_none(monkeypatch):
    before = {name: flags.state_of(name) for name in flags.SETTINGS}
    entries = {name: flag_report(name) for name in PARTS}
    assert list(entries) == ["fp16_accumulation", "reduced_precision_reduction", "tf32", "fp8_fast_accumulation"]
    assert all(
        entry["requested"] == "unchanged" and entry["in_scope"] == entry["outside"] for entry in entries.values()
    )
    assert (
        entries["fp8_fast_accumulation"]["in_scope"] is False
        and {name: flags.state_of(name) for name in flags.SETTINGS} == before
    )
    matmul = types.SimpleNamespace(allow_fp16_accumulation=True, allow_tf32=False)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    assert flag_report("fp16_accumulation") == {
        "requested": "unchanged", "in_scope": True, "outside": True, "reason": "No accumulation node is attached.",
    }  # fmt: skip
    missing = flag_report("reduced_precision_reduction")
    assert missing["in_scope"] is missing["outside"] is None
    tf32 = flag_report("tf32", "off", "Asked for.")
    assert (tf32["requested"], tf32["in_scope"]) == ("off", torch.backends.cudnn.allow_tf32)


def test_a_report_from_inside_of_a_models_call_tells_what_is_outside():
    before = flag_report("tf32")
    with flags.flags_set({"tf32_matmul": True, "tf32_convolution": False}):
        assert flag_report("tf32") == before


def test_a_name_of_any_length_is_cut_at_once():
    text = draw._shortened("x" * 10_000_000, 100, 15)
    assert text.endswith("...") and len(text) < 100
