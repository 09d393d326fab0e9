"""How a check counts: decibels, thresholds, the worst blocks, casts that stay fp32."""

import itertools
import math
import re

import pytest
import torch
from halfsafe.precision.arithmetic.casting import CastsToFp32
from halfsafe.precision.check import drift
from halfsafe.precision.guard.log import GuardLog
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.report.schema import CheckReport


@pytest.mark.parametrize(("error", "signal"), [(math.inf, 1.0), (math.nan, 1.0), (1.0, 0.0), (1e18, 1e-18)])
def test_an_error_without_bounds_is_the_lowest_snr(error, signal):
    exact = torch.tensor([[signal]])
    assert drift.row_decibels(torch.tensor([[error]]), exact, torch.zeros_like(exact)) == [drift.LOWEST_DB]


def test_the_signal_is_what_the_network_gives_and_rows_count_alone():
    """As of v prediction at a low noise level: nearly all of the denoised latent is the noisy one."""
    noisy, output = torch.full((2, 4), 100.0), torch.tensor([[1.0], [2.0]]).expand(2, 4)
    reference = 0.9 * noisy - 0.4 * output
    result = 0.9 * noisy - 0.4 * (output + torch.tensor([[0.1], [0.0]]))
    assert drift.row_decibels(result, reference, 0.9 * noisy) == [pytest.approx(20.0, abs=0.01), math.inf]


@pytest.mark.parametrize(("check", "steps"), [("first step", [0]), ("every 5th step", [0, 5, 10])])
def test_the_steps_that_are_checked_once_each(check, steps):
    seen = set()
    for step in (0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 11):
        seen |= {step} if drift.is_checked(check, step, seen) else set()
    assert sorted(seen) == steps


def test_a_threshold_falls_with_the_number_of_layers_as_powers_add_up():
    assert drift.threshold_of("bf16", 10) == drift.threshold_of("bf16", drift.USUAL_LAYERS) == drift.THRESHOLDS["bf16"]
    assert drift.threshold_of("bf16", 10 * drift.USUAL_LAYERS) == drift.THRESHOLDS["bf16"] - 10
    assert drift.coarsest({"fp32", "bf16", "fp8"}) == "fp8" and drift.coarsest(set()) == "fp32"


@pytest.mark.parametrize("names", list(itertools.permutations(("fp32", "fp16_safe", "none of them"))))
def test_the_coarsest_arithmetic_does_not_depend_on_the_order_of_a_set(names):
    assert drift.THRESHOLDS["fp32"] == drift.THRESHOLDS["fp16_safe"], (
        "a tie, which the order of a set would break by the process's hash seed"
    )
    assert drift.coarsest(names) == "fp16_safe"
    assert list(drift.THRESHOLDS.values()) == sorted(drift.THRESHOLDS.values(), reverse=True), "finest first"


def test_casts_to_16_bit_give_fp32_and_bits_are_read_as_they_are():
    x = torch.tensor([4001.0])
    bits = torch.tensor([1.0], dtype=torch.bfloat16).view(torch.int16)
    with CastsToFp32():
        made = [
            x.bfloat16(),
            x.half(),
            x.to(torch.bfloat16),
            x.to(dtype=torch.float16),
            x.type(torch.bfloat16),
            torch.full((1,), 4001.0, dtype=torch.bfloat16),
        ]
        read = bits.view(torch.bfloat16)
    assert all(tensor.dtype == torch.float32 and tensor.item() == 4001.0 for tensor in made)
    assert read.dtype == torch.bfloat16 and read.item() == 1.0
    assert x.bfloat16().dtype == torch.bfloat16


def test_samples_are_few_and_spread_and_worst_blocks_come_first():
    large = torch.arange(100_000.0)
    taken = drift.sampled((large, [large[:3]], None))
    assert taken[:4096].max() > 99_000 and drift.SAMPLES // 2 < taken.numel() <= drift.SAMPLES + 3
    assert drift.sampled((None, 3)) is None
    reference = {name: [torch.ones(10)] for name in "abcd"}
    off = {name: [torch.ones(10) + error] for name, error in zip("abcd", (0.0, 0.1, 0.01, 0.001), strict=True)}
    assert [block["name"] for block in drift.worst_blocks(off, reference)] == ["b", "c", "d"]
    assert drift.worst_blocks({"a": [torch.ones(3)]}, reference) == []


@pytest.mark.parametrize("arithmetic", drift.THRESHOLDS)
def test_a_drift_event_leaves_the_verdict_names_the_worst_blocks_and_what_to_do(arithmetic):
    told = []
    log = GuardLog(notify=lambda *message: told.append(message))
    blocks = [{"name": "blocks.1", "snr_db": 8.1}, {"name": "head", "snr_db": 12.0}]
    event = drift.drift_event(CheckReport(1, 0, 1.0, arithmetic, blocks=blocks), 8.1, 33.0, [0])
    log.note_drift(event)
    assert log.verdict == "clean" and log.events == [event] and (event.kind, event.from_mode) == ("drift", arithmetic)
    assert told[0][2].startswith(f"Step 0, sigma 1: finite, but off ({arithmetic}). 8.1 dB from the same call in fp32")
    assert ("Farthest: blocks.1 8.1 dB, head 12.0 dB." in event.evidence) == (arithmetic != "step cache")
    rule = re.search(r"rule (blocks\.\S+ \w+=\w+)", event.advice, re.IGNORECASE)
    assert event.advice and (rule is None) == (arithmetic == "step cache")
    assert rule is None or [str(found) for found in rules_from(rule[1]).own] == [rule[1]]
