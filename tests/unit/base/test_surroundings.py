"""What a caller set in torch neither reaches an answer that is kept nor is lost by it."""

import contextlib

import pytest
import torch
from halfsafe.precision.base.surroundings import neutral, own_dtypes
from halfsafe.precision.devices import probes

CPU = torch.device("cpu")


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
}


def state() -> tuple:
    return (
        torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.empty(0).device, torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(), torch.is_inference_mode_enabled(), torch.is_grad_enabled(),
    )  # fmt: skip


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_a_caller_set_is_off_inside_and_on_again_after(name):
    with SURROUNDINGS[name]():
        before = state()
        with pytest.raises(ValueError), neutral(CPU):
            assert state() == (False, torch.float32, CPU, False, False, False, False)
            raise ValueError
        assert state() == before


@pytest.mark.usefixtures("fresh_probes")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_no_probe_answers_for_what_a_caller_set(name):
    expected = [(probe.name, probe.ok) for probe in probes.run_probes(CPU)]
    probes._kept.clear()
    with SURROUNDINGS[name]():
        assert [(probe.name, probe.ok) for probe in probes.run_probes(CPU)] == expected
        assert [probes.canary(CPU, dtype)[0] for dtype in ("fp16", "bf16", "fp32")] == [True] * 3


def test_products_in_own_dtypes_are_not_autocast():
    left, right = torch.randn(8, 8), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with own_dtypes(CPU):
            assert torch.equal(left @ right, torch.mm(left, right)) and (left @ right).dtype == torch.float32
        assert (left @ right).dtype == torch.bfloat16
