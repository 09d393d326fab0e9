"""In what a failed call is repeated, and what the guard decides from what a repeat has shown."""

import math

import pytest
import torch
from halfsafe.precision.base.dtypes import FP16_MAX
from halfsafe.precision.guard.localize import Origin
from halfsafe.precision.guard.log import CallPosition, GuardLog, event_of, sentence
from halfsafe.precision.guard.policy import (
    ALL_IN_FP32,
    EncoderStep,
    Escalation,
    ObservedRanges,
    enclosing_block,
    encoder_steps,
    escalation_after,
    model_steps,
    safe_escalation,
)
from halfsafe.precision.plan.rules import rules_from

MODES = {"embed": "fp16", "blocks.0.up": "fp16", "blocks.0.down": "fp16", "blocks.1.up": "fp16", "blocks.1.down": "fp16"}
SMALL = ObservedRanges(dict.fromkeys(MODES, 10.0), {"embed": 10.0, "blocks.0": 10.0, "blocks.1": 10.0})

TWO = {"blocks.0.up": "fp16", "blocks.0.down": "fp16"}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def seen(layers=None, blocks=None, attention=()):
    return ObservedRanges({**SMALL.layers, **(layers or {})}, {**SMALL.blocks, **(blocks or {})}, frozenset(attention))


def escalate(present, observed, origin, modes):
    """What runs wider after the safe repeat in fp16 was finite."""
    return escalation_after(safe_escalation(modes), present, observed, origin, modes, "fp16")


def only_in_fp32(present, origin, stream="bf16"):
    return escalation_after(ALL_IN_FP32, present, SMALL, origin, MODES, stream)


def product(layer, mode="fp16"):
    return Origin(layer, "matmul", "overflow", mode, 100.0, multiplies=True)


def test_one_layer_whose_result_is_harmless_after_its_block():
    grown = escalate(Escalation(), seen({"blocks.0.down": 1e6}), product("blocks.0.down"), MODES)
    assert grown == Escalation({"blocks.0.down": "fp16_wide"}, frozenset({"blocks.0"}))


def test_a_value_that_leaves_its_block_widens_the_stream():
    grown = escalate(Escalation(), seen({"blocks.0.down": 1e6}, {"blocks.0": 1e6}), product("blocks.0.down"), MODES)
    assert grown.stream and grown.layers == {"blocks.0.down": "fp16_wide"}


def test_a_residual_add_widens_the_stream_and_no_layer():
    grown = escalate(Escalation(), seen({}, {"blocks.1": 9e4}), Origin("blocks.1", "add", "overflow", "fp16", 6e4), MODES)
    assert grown.stream and not grown.layers
    assert grown.named() == {"residual stream": "fp32"}


def test_sums_in_fp16_of_a_layer_whose_values_fit_go_back_to_fp32_sums():
    grown = escalate(Escalation(), SMALL, product("blocks.1.up"), {**MODES, "blocks.1.up": "fp16_acc16"})
    assert grown.layers == {"blocks.1.up": "fp16"}


def test_an_attention_widens_every_part_that_has_one_like_it():
    origin = Origin("blocks.0.attn", "attention by sage", "overflow", "fp16", 500.0)
    grown = escalate(Escalation(), seen(attention=["blocks.0", "blocks.1"]), origin, MODES)
    assert grown.blocks == {"blocks.0", "blocks.1"} and not grown.layers


@pytest.mark.parametrize(("size", "widened"), [(FP16_MAX / 2 - 1, False), (FP16_MAX / 2 + 1, True)])
def test_every_layer_past_half_of_fp16s_range_is_widened_too(size, widened):
    grown = escalate(Escalation(), seen({"blocks.1.up": size}), product("blocks.0.down"), MODES)
    assert ("blocks.1.up" in grown.layers) is widened and "blocks.0.down" in grown.layers
    assert escalate(Escalation(), seen({}, {"blocks.1": size}), product("blocks.0.down"), MODES).stream is widened


def test_what_was_learned_stays():
    first = escalate(Escalation(), seen({"blocks.0.down": 1e6}), product("blocks.0.down"), MODES)
    second = escalate(first, seen({"blocks.1.up": 1e6}), product("blocks.1.up"), MODES)
    assert second.layers.keys() == {"blocks.0.down", "blocks.1.up"}


def test_it_always_goes_up_and_ends():
    present, steps = Escalation(), 0
    while not present.whole:
        grown = escalate(present, SMALL, product("blocks.0.down"), MODES)
        assert grown != present
        present, steps = grown, steps + 1
    assert steps <= 4


def test_only_fp32_helped():
    grown = only_in_fp32(Escalation(), product("blocks.1.up", "fp8"))
    assert grown == Escalation({"blocks.1.up": "fp32", "blocks.1.down": "fp32"}, frozenset({"blocks.1"}))
    assert only_in_fp32(grown, product("blocks.1.up")) == only_in_fp32(Escalation(), None) == ALL_IN_FP32
    assert only_in_fp32(Escalation(), product("blocks.1.up"), "fp16") == ALL_IN_FP32, "the safe fp16 was tried"


@pytest.mark.parametrize(
    ("modes", "stream", "present", "steps"),
    [
        (TWO, "fp16", Escalation(), [safe_escalation(TWO), ALL_IN_FP32]),
        (TWO, "fp16", Escalation(stream=True), [safe_escalation(TWO), ALL_IN_FP32]),
        (TWO, "fp16", ALL_IN_FP32, []),
        ({"up": "fp8"}, "bf16", Escalation(), [ALL_IN_FP32]),
        ({"up": "fp32"}, "fp32", Escalation(), [ALL_IN_FP32]),
    ],
)
def test_a_model_is_repeated_safely_in_fp16_then_in_fp32(modes, stream, present, steps):
    assert model_steps(modes, stream, present) == steps


@pytest.mark.parametrize(
    ("dtype", "has_bf16", "steps"),
    [(F16, True, [BF16, F32]), (F16, False, [F32]), (BF16, True, [BF16, F32]), (F32, True, [F32])],
)
def test_an_encoder_is_repeated_as_it_is_unless_it_overflows_again(dtype, has_bf16, steps):
    assert encoder_steps(dtype, has_bf16) == [EncoderStep(step) for step in steps]


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_an_encoder_with_quantized_weights_is_repeated_with_them_dequantized_before_it_is_wider(dtype):
    steps = encoder_steps(dtype, True, quantized=True)
    unpacked = [step.dtype for step in steps if step.unpacked]
    assert unpacked[0] == dtype and unpacked[-1] == F32 and [step for step in steps if not step.unpacked] == ([EncoderStep(dtype)] if dtype != F16 else [])


@pytest.mark.parametrize(
    "escalation",
    [
        Escalation({"blocks.0.down": "fp16_wide"}, frozenset({"blocks.0"})),
        Escalation({}, frozenset({"blocks.1"})),
        Escalation({"blocks.0.down": "fp16_scaled"}, frozenset({"blocks.0"}), stream=True),
        Escalation({"a": "fp32"}, frozenset({"a"})),
        Escalation(whole=True),
    ],
)
def test_escalations_are_rules(escalation):
    rules = rules_from(escalation.rules(), "none")
    for layer, mode in escalation.layers.items():
        assert rules.setting("compute", layer, "Linear")[0] == {"fp32": "fp32"}.get(mode, "fp16_safe")
    for block in escalation.blocks - escalation.layers.keys():
        assert rules.setting("stream", f"{block}.anything", "Linear")[0] == "fp32"


@pytest.mark.parametrize(("layer", "block"), [("blocks.1.up", "blocks.1"), ("blocks.10.up", ""), ("embed", "embed"), ("", "")])
def test_block_of(layer, block):
    assert enclosing_block(layer, SMALL.blocks) == block


def test_the_worst_verdict_of_a_run_stays():
    log, event = GuardLog(), event_of(CallPosition(1, 0, 1.0, [0]), None, "fp16", "fp32", True)
    log.note(event, None, "recovered")
    log.note(event, None, "bad_weights", "Leave it out.")
    log.note(event, None, "recovered")
    assert (log.verdict, log.advice) == ("bad_weights", "Leave it out.")
    report = log.report(Escalation({"blocks.0.down": "fp16_wide"}, frozenset({"blocks.0"})))
    assert report.escalations == {"blocks.0.down": "fp16_wide"} and len(report.events) == 3


def test_a_clamp_is_told_as_such():
    origin = Origin("blocks.0", "add", "overflow", "fp16", math.nan, hidden=True)
    event = event_of(CallPosition(1, 0, 1.0, []), origin, "fp16", "fp32", True)
    assert event.kind == "saturation" and "clamped" in sentence(event, origin)
