"""The timer of Measure Precisions: what it times, counts and finds, on a device that tells its memory."""

from types import SimpleNamespace

import pytest
import torch
from halfsafe.nodes.host.study.step_timer import StepTimer
from halfsafe.precision.base.errors import HalfsafeError

SIGMAS = torch.tensor([1.0]), torch.tensor([0.5])


class Memory:
    """torch's module of a device: bytes allocated now and at most."""

    def __init__(self):
        self.now = self.most = 1000

    def allocate(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)

    def memory_allocated(self, device) -> int:
        return self.now

    def max_memory_allocated(self, device) -> int:
        return self.most

    def reset_peak_memory_stats(self, device) -> None:
        self.most = self.now


def timer_on(memory, advance=lambda: None) -> StepTimer:
    timer = StepTimer(torch.device("cpu"), advance)
    timer._memory = memory
    return timer


def test_the_peak_counts_from_the_first_step_on():
    memory = Memory()
    memory.allocate(5000)
    memory.allocate(-5000)  # while loading
    timer = timer_on(memory)

    def executor(model, conds, x, timestep):
        memory.allocate(300)
        memory.allocate(-300)
        return [x]

    for sigma in SIGMAS:
        timer.step(executor, None, [], torch.ones(2), sigma)
    assert timer.extra_bytes() == 300 and len(timer.seconds) == 2


def test_parts_of_a_step_are_one_step():
    """Context windows and SkipLayerGuidance make several such calls in a step."""
    advanced = []
    timer = timer_on(Memory(), lambda: advanced.append(1))
    for sigma in (SIGMAS[0], SIGMAS[0], SIGMAS[1], SIGMAS[1], SIGMAS[1]):
        timer.step(lambda model, conds, x, timestep: [x], None, [], torch.ones(2), sigma)
    assert len(timer.seconds) == len(advanced) == 2 and all(seconds > 0 for seconds in timer.seconds)


def test_a_step_begins_and_ends_on_an_idle_device(monkeypatch):
    """A read waits for what was asked of the device before it."""
    events, item = [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: events.append("wait") or item(tensor))
    timer_on(Memory()).step(
        lambda model, conds, x, timestep: events.append("call") or [x], None, [], torch.ones(2), SIGMAS[0]
    )
    assert events == ["wait", "call", "wait"]


def test_a_device_that_tells_no_memory_has_no_peak():
    """DirectML's is ``privateuseone``."""
    assert StepTimer(torch.device("privateuseone"), lambda: None)._memory is None
    for memory in (None, SimpleNamespace()):
        timer = timer_on(memory)
        timer.step(lambda model, conds, x, timestep: [x], None, [], torch.ones(2), SIGMAS[0])
        assert timer.extra_bytes() is None and timer.seconds[0] >= 0


def test_a_step_that_is_not_finite_ends_the_run():
    timer = timer_on(Memory())
    timer.step(lambda model, conds, x, timestep: [x], None, [], torch.ones(2), SIGMAS[0])
    with pytest.raises(HalfsafeError, match=r"^NaN or Inf in step 2\. NaN Guard names the layer\.$"):
        timer.step(lambda model, conds, x, timestep: [x, x / 0], None, [], torch.ones(2), SIGMAS[1])
