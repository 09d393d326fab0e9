"""The largest magnitude each operation meets, kept on the device and read once per model call.

A first call measures every operation and fixes how its operands are scaled; later calls only record. When a record
passes what the scaling allows, the call is repeated with measuring on. So a clean call costs one reduction per operation
and one small synchronisation, and no value that overflows is ever used.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch

FP16_MAX = 65504.0
HEADROOM_BITS = 2

Result = TypeVar("Result")


class Slot:
    """One operation: ``exponent`` scales its operand by ``2**-exponent``; magnitudes up to ``limit`` are then safe."""

    def __init__(self, name: str):
        self.name = name
        self.exponent = 0
        self.limit = math.inf
        self.work = 0
        self.value: torch.Tensor | None = None

    def record(self, magnitude: torch.Tensor) -> None:
        """Keep the larger of ``magnitude`` (0-dim) and what this call has recorded already; NaN stays."""
        if self.value is None:
            self.value = magnitude.clone()
        else:
            self.value.copy_(torch.maximum(self.value, magnitude))

    def fit(self, magnitude: float, gain: float = 1.0) -> None:
        """Choose the exponent that keeps ``magnitude * gain`` two bits below fp16's largest number (``gain`` >= 1)."""
        if math.isfinite(magnitude * gain) and magnitude * gain > 0:
            needed = math.ceil(math.log2(magnitude * gain / FP16_MAX)) + HEADROOM_BITS
            self.exponent = max(self.exponent, needed, 0)
        self.limit = FP16_MAX * 2.0**self.exponent / gain


class Ranges:
    """The slots of one model on one device."""

    def __init__(self):
        self.slots: dict[str, Slot] = {}
        self.measuring = True
        self.repeats = 0

    def slot(self, name: str) -> Slot:
        return self.slots.setdefault(name, Slot(name))

    def run(self, call: Callable[[], Result]) -> Result:
        """One model call; repeated once, measuring, when a magnitude passed its limit.

        Raises:
            Whatever ``call`` raises.
        """
        if not self.measuring:
            self._reset()
            result = call()
            if not self._exceeded():
                return result
            self.repeats += 1
        return self._measured(call)

    def _measured(self, call: Callable[[], Result]) -> Result:
        self.measuring = True
        for slot in self.slots.values():
            slot.work = 0
        result = call()
        self.measuring = False
        return result

    def _reset(self) -> None:
        values = [slot.value for slot in self.slots.values() if slot.value is not None]
        if values:
            torch._foreach_zero_(values)

    def _exceeded(self) -> bool:
        used = [slot for slot in self.slots.values() if slot.value is not None]
        if not used:
            return False
        values = torch.stack([slot.value for slot in used])
        limits = torch.tensor([slot.limit for slot in used], device=values.device)
        return not bool((values <= limits).all())


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor, 0-dim fp32, in one pass and without a synchronisation."""
    return torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32)
