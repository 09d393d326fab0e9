"""Watch the steps of a sampler's run: seconds of each, bytes the device allocates, and results that
are not finite."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ....precision.base.errors import HalfsafeError
from ....precision.base.message import Message
from ....precision.devices.hardware import device_module


class StepTimer:
    """ComfyUI's wrapper around the steps of one run. Steps are timed on an idle device."""

    def __init__(self, device: torch.device, advance: Callable[[], object]):
        self.seconds: list[float] = []
        self._device = device
        self._memory = device_module(device)
        self._advance = advance
        self._before: int | None = None
        self._sigma: float | None = None

    def step(self, executor, model, conds: list, x: torch.Tensor, timestep: torch.Tensor, *args) -> list[torch.Tensor]:
        """Time a step with all conditionings, or a part of a step, as ComfyUI's CALC_COND_BATCH
        wrapper.

        Context windows and SkipLayerGuidance make a step in parts.

        Raises:
            HalfsafeError: its result is not finite.
        """
        self._begin(float(timestep.flatten()[0]))
        start = self._now()
        results = executor(model, conds, x, timestep, *args)
        self.seconds[-1] += self._now() - start
        if not all(torch.isfinite(result).all() for result in results):
            raise HalfsafeError(Message("NaN or Inf in step {0}.", len(self.seconds)), "NaN Guard names the layer.")
        return results

    def extra_bytes(self) -> int | None:
        """Count the peak of allocated bytes beyond those at the first step's beginning, weights
        among them.

        None where the device does not report it.
        """
        return None if self._before is None else self._memory.max_memory_allocated(self._device) - self._before

    def _begin(self, sigma: float) -> None:
        if sigma == self._sigma:
            return
        self._sigma = sigma
        self._advance()
        self.seconds.append(0.0)
        if len(self.seconds) == 1 and hasattr(self._memory, "max_memory_allocated"):
            self._memory.reset_peak_memory_stats(self._device)
            self._before = self._memory.memory_allocated(self._device)

    def _now(self) -> float:
        torch.zeros((), device=self._device).item()  # a read waits for what was asked before it
        return time.perf_counter()
