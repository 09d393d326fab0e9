"""Restore torch's random number generators, so that a repeated call draws the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from .hardware import device_module


@dataclass(frozen=True)
class RandomStart:
    """The state of the generators before a call."""

    device: torch.device
    cpu: torch.Tensor
    own: torch.Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> "RandomStart":
        """Return the present state, without a read from a GPU (its generator's state is on the
        CPU)."""
        generators = _generators(device)
        return cls(device, torch.get_rng_state(), generators.get_rng_state(device) if generators else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the state inside of the context; afterwards the generators of the CPU and this
        kind of device are as before."""
        generators = _generators(self.device)
        kept = (range(generators.device_count()), self.device.type) if generators else ([], "cuda")
        with torch.random.fork_rng(kept[0], device_type=kept[1]):
            self.put_back()
            yield

    def put_back(self) -> None:
        """Restore the state."""
        torch.set_rng_state(self.cpu)
        generators = _generators(self.device)
        if generators and self.own is not None:
            generators.set_rng_state(self.own, self.device)


def _generators(device: torch.device) -> ModuleType | None:
    """Return torch's module with the generators of a device that is in use; None for a CPU or if
    there is none."""
    module = device_module(device)
    is_in_use = getattr(module, "is_initialized", lambda: True)
    return module if hasattr(module, "get_rng_state") and is_in_use() else None
