"""The largest magnitude each operation meets, kept on the device and read once per model call.

A first call measures every operation and fixes how its operands are scaled; later calls only record. When a record
leaves the range the scaling was fixed for, the call is repeated with measuring on. So a clean call costs one reduction
per operation and one small synchronisation, and no value that overflows is ever used.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch

from ..dtypes import FP16_MAX

HEADROOM_BITS = 2
FLOOR_BITS = 12
MAX_GAIN = 2.0**16
MAX_FALLS = 2
MEASURING = "measuring"

Result = TypeVar("Result")


class Slot:
    """One operation: its operand is scaled by ``2**-exponent``, which holds magnitudes from ``floor`` to ``limit``.

    ``gain``: by how much the operation can raise a magnitude in fp16; None until it was measured. ``full``: it runs in
    fp32. ``work``: multiplications and additions of one model call. ``value``: what the present call has recorded.
    ``largest``: the largest magnitude of all calls so far.
    """

    def __init__(self, name: str):
        self.name = name
        self.exponent = 0
        self.gain: float | None = None
        self.full = False
        self.work = 0
        self.value: torch.Tensor | None = None
        self.largest = 0.0
        self._falls = 0

    @property
    def limit(self) -> float:
        """The largest magnitude that stays finite; below any before the first measurement."""
        return -1.0 if self.gain is None else FP16_MAX * 2.0**self.exponent / self.gain

    @property
    def floor(self) -> float:
        """The magnitude below which an operand loses more to fp16's subnormal numbers than bf16 rounds away."""
        return 2.0 ** (self.exponent - FLOOR_BITS)

    def record(self, magnitude: torch.Tensor) -> None:
        """Keep the larger of ``magnitude`` (0-dim) and what this call has recorded already; NaN stays."""
        self.value = magnitude if self.value is None else torch.maximum(self.value, magnitude)

    def holds(self, magnitude: float) -> bool:
        """Whether an operand of this magnitude neither overflows nor underflows; no NaN or inf is held."""
        return self.limit >= 0 and (magnitude == 0 or self.floor <= magnitude <= self.limit)

    def fit(self, magnitude: float, gain: float = 1.0) -> None:
        """Choose the exponent that keeps ``magnitude * gain`` two bits below fp16's largest number (``gain`` >= 1).

        Left to fp32: an operand whose magnitude keeps falling out of the range that its larger ones need, and a gain so
        large that scaling for it costs the operand its precision.
        """
        measured, self.gain = self.gain is not None, gain
        self.largest = max(self.largest, magnitude)
        if gain > MAX_GAIN:
            self.full = True
        if not 0 < magnitude < math.inf or self.holds(magnitude * 2.0**HEADROOM_BITS):
            return
        needed = math.ceil(math.log2(magnitude) + math.log2(gain / FP16_MAX)) + HEADROOM_BITS
        self._falls += measured and needed < self.exponent
        self.full = self.full or self._falls > MAX_FALLS
        self.exponent = needed


class Ranges:
    """The slots of one model on one device.

    ``phase`` is a text that every measurement changes: a compiled graph that read it is compiled again after one.
    """

    def __init__(self):
        self.slots: dict[str, Slot] = {}
        self.phase = MEASURING
        self.measurements = 0
        self.repeats = 0

    @property
    def measuring(self) -> bool:
        """Whether this call may read numbers back from the device, to fix how operands are scaled."""
        return self.phase == MEASURING

    def largest(self) -> dict[str, float]:
        """Operation -> the largest magnitude it was given, of those that met any."""
        return {name: slot.largest for name, slot in self.slots.items() if slot.largest}

    def slot(self, name: str) -> Slot:
        """The slot of that name, made if need be."""
        return self.slots.setdefault(name, Slot(name))

    def run(self, call: Callable[[], Result]) -> Result:
        """One model call; repeated once, measuring, when a magnitude left its range.

        Raises:
            Whatever ``call`` raises.
        """
        if not self.measuring:
            result = self._recorded(call)
            if self._held():
                return result
            self.repeats += 1
        return self._measured(call)

    def _recorded(self, call: Callable[[], Result]) -> Result:
        for slot in self.slots.values():
            slot.value = None
        return call()

    def _measured(self, call: Callable[[], Result]) -> Result:
        self.phase = MEASURING
        for slot in self.slots.values():
            slot.work = 0
        result = call()
        self.measurements += 1
        self.phase = f"measured {self.measurements}"
        return result

    def _held(self) -> bool:
        used = [slot for slot in self.slots.values() if slot.value is not None]
        if not used:
            return True
        device = used[0].value.device
        values = torch.stack([slot.value.to(device) for slot in used]).tolist()
        for slot, value in zip(used, values, strict=True):
            slot.largest = max(slot.largest, value)
        return all(slot.holds(value) for slot, value in zip(used, values, strict=True))


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a tensor, 0-dim fp32, in one pass and without a synchronisation; 0 for an empty one."""
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32)


def largest_row_norm(x: torch.Tensor) -> torch.Tensor:
    """The largest 2-norm of the rows of ``x`` (..., K), 0-dim fp32, without a synchronisation."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax()
