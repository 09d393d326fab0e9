"""Track the amax of each operation's operand on the device, read back once per model call.

The first call calibrates: it fixes how each operand is scaled. Later calls only record. When a record leaves the range the
scaling was fixed for, the call is repeated with calibration. So a clean call costs one reduction
per operation and one small synchronisation, and no value that overflows is ever used.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch

from ..dtypes import FP16_MAX
from .cells import NOTHING, Cell, Cells

HEADROOM_BITS = 2
FLOOR_BITS = 12
MAX_GAIN = 2.0**16
MAX_FALLS = 2

Result = TypeVar("Result")


class Slot:
    """One operation: its operand is scaled by ``2**-exponent``, which holds magnitudes from ``floor`` to ``limit``.

    ``gain``: by how much the operation can raise a magnitude in fp16; None until it was measured. ``in_fp32``: it runs in
    fp32. ``flops``: floating-point operations of one model call. ``largest``: the largest magnitude of all calls so far.
    ``device``: where it ran when it was measured; ``cell``: its numbers there; ``missed``: it ran in this call without one.
    """

    def __init__(self, name: str):
        self.name = name
        self.exponent = 0
        self.gain: float | None = None
        self.in_fp32 = False
        self.flops = 0
        self.largest = 0.0
        self.device: torch.device | None = None
        self.cell: Cell | None = None
        self.missed = False
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
        """Keep the larger of ``magnitude`` (0-dim fp32) and what this call has recorded already; NaN stays."""
        if self.cell is None or self.cell.device != magnitude.device:
            self.missed = True
        else:
            self.cell.record(magnitude)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` times ``2**-exponent``, exact. A compiled graph multiplies by a tensor, whatever the exponent is."""
        if torch.compiler.is_compiling() and self.cell is not None:
            return x * self.cell.scale()[0]
        return x * 2.0**-self.exponent if self.exponent else x

    def unscaled(self, product: torch.Tensor) -> torch.Tensor:
        """``product`` times ``2**exponent``, in place."""
        if torch.compiler.is_compiling() and self.cell is not None:
            return product.mul_(self.cell.scale()[1])
        return product.mul_(2.0**self.exponent) if self.exponent else product

    def holds(self, magnitude: float) -> bool:
        """Tell whether an operand of this magnitude neither overflows nor underflows; no NaN or inf is held."""
        return self.limit >= 0 and (magnitude == 0 or self.floor <= magnitude <= self.limit)

    def calibrate(self, magnitude: float, gain: float = 1.0) -> None:
        """Choose the exponent that keeps ``magnitude * gain`` two bits below fp16's largest number (``gain`` >= 1).

        Left to fp32: an operand whose magnitude keeps falling out of the range that its larger ones need, and a gain so
        large that scaling for it costs the operand its precision.
        """
        measured, self.gain = self.gain is not None, gain
        self.largest = max(self.largest, magnitude)
        if gain > MAX_GAIN:
            self.in_fp32 = True
        if not 0 < magnitude < math.inf or self.holds(magnitude * 2.0**HEADROOM_BITS):
            return
        needed = math.ceil(math.log2(magnitude) + math.log2(gain / FP16_MAX)) + HEADROOM_BITS
        self._falls += measured and needed < self.exponent
        self.in_fp32 = self.in_fp32 or self._falls > MAX_FALLS
        self.exponent = needed


class Ranges:
    """The slots of one model.

    ``calibrating``: this call may read numbers back from the device, to fix how operands are scaled; nothing compiled runs in
    it. A compiled graph depends on what a slot decides, such as ``in_fp32``, and not on the number of measurements.
    """

    def __init__(self):
        self.slots: dict[str, Slot] = {}
        self.calibrating = True
        self.repeats = 0
        self._cells: dict[torch.device, tuple[Cells, list[Slot]]] = {}

    def largest(self) -> dict[str, float]:
        """Operation -> the largest magnitude it was given, of those that met any."""
        return {name: slot.largest for name, slot in self.slots.items() if slot.largest}

    def slot(self, name: str) -> Slot:
        """The slot of that name, made if need be."""
        return self.slots.setdefault(name, Slot(name))

    def run(self, call: Callable[[], Result]) -> Result:
        """One model call; repeated once with calibration when a magnitude left its range.

        Raises:
            Whatever ``call`` raises.
        """
        if not self.calibrating:
            result = self._recorded(call)
            if self._held():
                return result
            self.repeats += 1
        return self._calibrated(call)

    def _recorded(self, call: Callable[[], Result]) -> Result:
        for slot in self.slots.values():
            slot.missed = False
        for cells, _ in self._cells.values():
            cells.clear()
        return call()

    def _calibrated(self, call: Callable[[], Result]) -> Result:
        self.calibrating = True
        for slot in self.slots.values():
            slot.flops = 0
        result = call()
        self._place()
        self.calibrating = False
        return result

    def _place(self) -> None:
        """Give every measured slot a cell on its device, and the graphs the exponents."""
        devices: dict[torch.device, list[Slot]] = {}
        for slot in self.slots.values():
            if slot.device is not None:
                devices.setdefault(slot.device, []).append(slot)
        for device, slots in devices.items():
            if device not in self._cells or self._cells[device][1] != slots:
                self._cells[device] = cells, _ = Cells(len(slots), device), slots
                for slot, cell in zip(slots, cells.cells, strict=True):
                    slot.cell = cell
            self._cells[device][0].set_exponents([slot.exponent for slot in slots])

    def _held(self) -> bool:
        used = [
            (slot, value)
            for cells, slots in self._cells.values()
            for slot, value in zip(slots, cells.read(), strict=True)
            if value != NOTHING
        ]
        for slot, value in used:
            slot.largest = max(slot.largest, value)
        return all(slot.holds(value) for slot, value in used) and not any(slot.missed for slot in self.slots.values())


def largest_row_norm(x: torch.Tensor) -> torch.Tensor:
    """The largest 2-norm of the rows of ``x`` (..., K), 0-dim fp32, without a synchronisation."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax()
