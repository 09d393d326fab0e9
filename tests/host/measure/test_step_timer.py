"""The probe of Measure Precisions: what it times, counts and finds, on a device that tells its memory."""

from types import SimpleNamespace

import pytest
import torch
from halfsafe.nodes.host.measure.step_timer import NotFinite, Probe

SIGMAS = torch.tensor([1.0]), torch.tensor([0.5])


class Memory:
    """torch's module of a device: bytes allocated now and at most, and when it was waited for."""

    def __init__(self):
        self.now = self.most = 1000
        self.events = []

    def allocate(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)

    def memory_allocated(self, device) -> int:
        return self.now

    def max_memory_allocated(self, device) -> int:
        return self.most

    def reset_peak_memory_stats(self, device) -> None:
        self.most = self.now

    def synchronize(self, device) -> None:
        assert device == torch.device("cpu"), "the probe's own, not the current one"
        self.events.append("wait")


def probe_on(memory, advance=lambda: None) -> Probe:
    probe = Probe(torch.device("cpu"), advance)
    probe._memory = memory
    return probe


def test_the_peak_counts_from_the_first_step_on():
    memory = Memory()
    memory.allocate(5000)
    memory.allocate(-5000)  # while loading
    probe = probe_on(memory)

    def executor(model, conds, x, timestep):
        memory.events.append("call")
        memory.allocate(300)
        memory.allocate(-300)
        return [x]

    for sigma in SIGMAS:
        probe.step(executor, None, [], torch.ones(2), sigma)
    assert probe.extra_bytes() == 300 and len(probe.seconds) == 2
    assert memory.events == ["wait", "call", "wait"] * 2


def test_parts_of_a_step_are_one_step():
    """Context windows and SkipLayerGuidance make several such calls in a step."""
    advanced = []
    probe = probe_on(Memory(), lambda: advanced.append(1))
    for sigma in (SIGMAS[0], SIGMAS[0], SIGMAS[1], SIGMAS[1], SIGMAS[1]):
        probe.step(lambda model, conds, x, timestep: [x], None, [], torch.ones(2), sigma)
    assert len(probe.seconds) == len(advanced) == 2 and all(seconds > 0 for seconds in probe.seconds)


def test_a_device_that_tells_no_memory_has_no_peak():
    probe = probe_on(SimpleNamespace(synchronize=lambda device: None))
    probe.step(lambda model, conds, x, timestep: [x], None, [], torch.ones(2), SIGMAS[0])
    assert probe.extra_bytes() is None and probe.seconds[0] >= 0


def test_a_failed_step_is_made_once_more_under_watch():
    layer = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(layer.weight, 1e30)
    model = SimpleNamespace(diffusion_model=torch.nn.Sequential(layer))
    calls, probe = [], probe_on(Memory())

    def apply(x):
        calls.append(x)
        return model.diffusion_model(x)

    def executor(_, conds, x, timestep):
        inner = type("Executor", (), {"class_obj": model, "__call__": lambda self, x: apply(x)})()
        return [probe.inside(inner, x)]

    probe.step(executor, model, [], torch.zeros(1, 4), SIGMAS[0])
    with pytest.raises(NotFinite, match=r"^NaN or Inf in step 2, overflow in 0 \(matmul in fp32\)$"):
        probe.step(executor, model, [], torch.full((1, 4), 1e30), SIGMAS[1])
    assert len(calls) == 3 and "forward" not in vars(layer)


def test_each_step_may_be_interrupted():
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe_on(Memory(), stop).step(lambda *_: pytest.fail("called"), None, [], torch.ones(1), SIGMAS[0])
