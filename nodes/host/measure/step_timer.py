"""Watch the steps of a sampler's run: seconds of each, bytes the device allocates, and results that are not finite."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ....precision.devices.hardware import device_module
from ....precision.guard.localize import Localizer, Origin


class StepNotFinite(Exception):
    """A step gave NaN or Inf; the message names the step, and the layer where it began."""


class StepTimer:
    """ComfyUI's wrappers around the steps of one run. Steps are timed on an idle device.

    Args:
        device: the one the model runs on.
        advance: called before each step; may raise.
    """

    def __init__(self, device: torch.device, advance: Callable[[], object]):
        self.seconds: list[float] = []
        self._device = device
        self._memory = device_module(device)
        self._advance = advance
        self._before: int | None = None
        self._sigma: float | None = None
        self._locating = False
        self._origin: Origin | None = None

    def step(self, executor, model, conds: list, x: torch.Tensor, timestep: torch.Tensor, *args) -> list[torch.Tensor]:
        """Time one step with all of its conditionings, or a part of it, as ComfyUI's CALC_COND_BATCH wrapper.

        Context windows and SkipLayerGuidance make a step in parts.

        Raises:
            StepNotFinite: its result is not finite. The step was then made once more, to find the layer.
        """
        self._begin(float(timestep.flatten()[0]))
        start = self._now()
        results = executor(model, conds, x, timestep, *args)
        self.seconds[-1] += self._now() - start
        if all(torch.isfinite(result).all() for result in results):
            return results
        self._locating = True
        executor(model, conds, x, timestep, *args)
        raise StepNotFinite(f"NaN or Inf in step {len(self.seconds)}{_where(self._origin)}")

    def inside(self, executor, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Watch every operation once a step has failed, as ComfyUI's innermost APPLY_MODEL wrapper."""
        if not self._locating or self._origin:
            return executor(x, *args, **kwargs)
        with Localizer(executor.class_obj.diffusion_model).watching() as localizer:
            result = executor(x, *args, **kwargs)
        self._origin = localizer.origin(result)
        return result

    def extra_bytes(self) -> int | None:
        """Count the most bytes allocated at one time beyond those at the first step's beginning, weights among them.

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
        if self._memory is None:
            torch.zeros((), device=self._device).item()  # a read waits for what was asked before it
        else:
            self._memory.synchronize(*[self._device] * (self._device.type != "mps"))  # torch.mps takes no device
        return time.perf_counter()


def _where(origin: Origin | None) -> str:
    if origin is None or not (origin.layer or origin.op):
        return ""
    operation = f" ({origin.op} in {origin.dtype})" if origin.op and origin.dtype else ""
    return f", {origin.kind} in {origin.layer or 'the model'}{operation}"
