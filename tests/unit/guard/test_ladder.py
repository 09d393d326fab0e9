"""The order in which a failed call is repeated, and where that ends."""

import pytest
import torch
from halfsafe.precision.guard.ladder import (
    RandomStart,
    encoder_steps,
    escalation_after,
    model_steps,
    safe_escalation,
)
from halfsafe.precision.guard.localize import Origin
from halfsafe.precision.guard.policy import ALL_IN_FP32, Escalation, ObservedRanges

MODES = {"blocks.0.up": "fp16", "blocks.0.down": "fp16"}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def test_a_repeat_draws_what_the_call_drew_and_takes_nothing():
    start = RandomStart.of(torch.device("cpu"))
    first = torch.rand(3)
    after = torch.get_rng_state()
    for _ in range(2):
        with start.again():
            assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), after)


class Generators:
    """torch's module of a device: one generator, whose state is a number."""

    def __init__(self):
        self.state = 7

    def device_count(self) -> int:
        return 1

    def get_rng_state(self, device) -> torch.Tensor:
        return torch.tensor(self.state)

    def set_rng_state(self, state, device) -> None:
        self.state = int(state)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_a_repeat_draws_anew_on_the_device_too(monkeypatch, kind):
    generators = Generators()
    monkeypatch.setattr(torch, kind, generators)
    start = RandomStart.of(torch.device(kind))
    generators.state = 9
    with start.again():
        assert generators.state == 7
        generators.state = 8
    assert generators.state == 9


def test_a_device_without_a_module_of_torch_keeps_the_cpus_numbers():
    assert not hasattr(torch, "privateuseone")
    start = RandomStart.of(torch.device("privateuseone"))
    first = torch.rand(2)
    with start.again():
        assert torch.equal(torch.rand(2), first)


@pytest.mark.parametrize(
    ("modes", "stream", "present", "steps"),
    [
        (MODES, "fp16", Escalation(), [safe_escalation(MODES), ALL_IN_FP32]),
        (MODES, "fp16", Escalation(stream=True), [safe_escalation(MODES), ALL_IN_FP32]),
        (MODES, "fp16", ALL_IN_FP32, []),
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
    assert encoder_steps(dtype, has_bf16) == steps


def test_what_fp32_alone_cured_is_all_in_fp32_where_the_safe_fp16_was_tried():
    origin = Origin("blocks.0.up", "matmul", "overflow", "fp8", 100.0, multiplies=True)
    ranges = ObservedRanges(dict.fromkeys(MODES, 10.0), {"blocks.0": 10.0})
    after = [escalation_after(ALL_IN_FP32, Escalation(), ranges, origin, MODES, in_fp16, ["blocks.0"]) for in_fp16 in (True, False)]
    assert after[0] == ALL_IN_FP32
    assert after[1] == Escalation(dict.fromkeys(MODES, "fp32"), frozenset({"blocks.0"}))
    safe = escalation_after(safe_escalation(MODES), Escalation(), ranges, origin, MODES, True, ["blocks.0"])
    assert safe == Escalation({"blocks.0.up": "fp16_wide"}, frozenset({"blocks.0"}))
