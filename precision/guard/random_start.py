"""torch's random numbers as a call found them, for its repeats."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from ..devices.hardware import device_module


@dataclass(frozen=True)
class RandomStart:
    """The state of the generators before a call: a repeat from there draws what the call drew."""

    device: torch.device
    cpu: torch.Tensor
    own: torch.Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> "RandomStart":
        """Take the present state; nothing is read back from a GPU, whose generator counts on the CPU."""
        generators = _generators(device)
        return cls(device, torch.get_rng_state(), generators.get_rng_state(device) if generators else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw from there on, and leave the random numbers of the CPU and of this kind of device as they were."""
        generators = _generators(self.device)
        kept = (range(generators.device_count()), self.device.type) if generators else ([], "cuda")
        with torch.random.fork_rng(kept[0], device_type=kept[1]):
            self.put_back()
            yield

    def put_back(self) -> None:
        """Draw from there on."""
        torch.set_rng_state(self.cpu)
        generators = _generators(self.device)
        if generators and self.own is not None:
            generators.set_rng_state(self.own, self.device)


def _generators(device: torch.device) -> ModuleType | None:
    """Return the module with the random numbers of a device in use; None for a CPU, and where torch has none."""
    module = device_module(device)
    is_in_use = getattr(module, "is_initialized", lambda: True)
    return module if hasattr(module, "get_rng_state") and is_in_use() else None
