"""The random numbers of a repeat are those of the call."""

import pytest
import torch
from halfsafe.precision.devices.random_start import RandomStart


@pytest.mark.parametrize("kind", ["cpu", "privateuseone"])
def test_a_repeat_draws_what_the_call_drew_and_takes_nothing(kind):
    """A device without a module of torch has the CPU's numbers."""
    assert not hasattr(torch, "privateuseone")
    start = RandomStart.of(torch.device(kind))
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
