"""Track the amax of each operation's operand on the device, read back once per model call.

The first call calibrates: it fixes how each operand is scaled. Later calls only record. When a record leaves the range the
scaling was fixed for, the call is repeated with calibration. So a clean call costs one reduction
per operation and one small synchronisation, and no value that overflows is ever used.

An operation whose result is proven to fit fp16 may return fp16. What model code makes of two such results can still overflow,
and is then the operand of a later operation, whose record shows it: fp16 results are given up for the model.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from ..amax import amax
from ..dtypes import FP16_MAX
from ..oom import is_oom
from .cells import NOTHING, Cells
from .slot import Slot

Result = TypeVar("Result")


class Shared(NamedTuple):
    """An operand that the next operations may have in common: as given, whose it was, as multiplied, how many follow."""

    x: torch.Tensor
    slot: Slot
    operand: torch.Tensor
    followers: int = 0


class Ranges:
    """The slots of one model.

    ``calibrating``: this call may read numbers back from the device, to fix how operands are scaled; nothing compiled runs in
    it. A compiled graph depends on what a slot decides, such as ``in_fp32``, and not on the number of measurements.
    ``fp16_results``: results that are proven to fit may be fp16.
    """

    def __init__(self):
        self.slots: dict[str, Slot] = {}
        self.calibrating = True
        self.fp16_results = False
        self.repeats = 0
        self._overflowed = False
        self._widened = False
        self._chain: list[Slot] = []
        self._last: Shared | None = None
        self._cells: dict[torch.device, tuple[Cells, list[Slot]]] = {}

    def largest(self) -> dict[str, float]:
        """Operation -> the largest magnitude it was given, of those that met any."""
        return {name: slot.largest for name, slot in self.slots.items() if slot.largest}

    def slot(self, name: str) -> Slot:
        """The slot of that name, made if need be."""
        return self.slots.setdefault(name, Slot(name))

    def operand(self, slot: Slot, x: torch.Tensor) -> torch.Tensor:
        """``x`` as it is multiplied: in fp16, scaled, recorded. Cast and recorded once for operations that share it."""
        if torch.compiler.is_compiling():
            operand = slot.scaled(x)
            slot.record_operand(x, operand)
            return operand
        last = self._last
        if last is not None and last.x is x and slot.copies is last.slot and slot.exponent == last.slot.exponent:
            self._last = last._replace(followers=last.followers - 1) if last.followers > 1 else None
            return last.operand
        operand = slot.scaled(x)
        slot.record_operand(x, operand)
        self._last = Shared(x, slot, operand, len(slot.copied_by)) if slot.copied_by else None
        return operand

    def calibrated_operand(self, slot: Slot, x: torch.Tensor) -> torch.Tensor:
        """The same in a call that calibrates, which finds out who shares an operand: who is given the very same tensor next,
        not written to in between."""
        operand, last = slot.scaled(x), self._last
        slot.uses += 1
        if slot.uses == 1 and last is not None and last.x is x and _are_equal(last, slot, operand):
            slot.copies = last.slot
            last.slot.copied_by.append(slot)
        else:
            slot.copies = None
            self._last = Shared(x, slot, operand)
        return operand

    def check(self, operand: torch.Tensor) -> None:
        """In a call that calibrates: give fp16 results up where one of them may be why an operand is not finite.

        ComfyUI clamps what overflows in some models (``clamp_fp16`` in ``comfy/ldm/lumina/model.py``): fp16's largest number
        counts as not finite.
        """
        if any(slot.returns_fp16 for slot in self.slots.values()):
            limit = FP16_MAX if operand.dtype == torch.float16 else math.inf
            self._overflowed = self._overflowed or not amax(operand).item() < limit

    def measure_anew(self) -> None:
        """Calibrate in the next call, as in the first one. What was compiled stays as it is where the outcome is the same."""
        self.calibrating = True
        for slot in self.slots.values():
            slot.forget()

    def returned_fp16(self, slot: Slot) -> None:
        """In a call that calibrates: tell which operation has returned fp16."""
        self._chain.append(slot)

    def end_chain(self, widen: bool) -> None:
        """In a call that calibrates: have the operations since the last end return fp32 where fp16 is too coarse for what is
        made of them."""
        for slot in self._chain if widen else ():
            slot.stays_wide = self._widened = True
        self._chain = []

    def run(self, call: Callable[[], Result]) -> Result:
        """One model call; repeated once with calibration when a magnitude left its range, and without fp16 results where
        those are what model code fails on: not every operation of torch takes fp16 beside fp32.

        Raises:
            Whatever ``call`` raises.
        """
        try:
            return self._run(call)
        except RuntimeError as error:
            if is_oom(error) or not any(slot.returns_fp16 for slot in self.slots.values()):
                raise
            self.fp16_results = False
            try:
                return self._calibrated(call)
            except BaseException:
                self.fp16_results = True  # they are not what fails
                raise
        finally:
            self._last = None

    def _run(self, call: Callable[[], Result]) -> Result:
        if not self.calibrating:
            result = self._recorded(call)
            if self._held():
                return result
            self.repeats += 1
        return self._calibrated(call)

    def _recorded(self, call: Callable[[], Result]) -> Result:
        self._last = None
        for slot in self.slots.values():
            slot.missed = False
        for cells, _ in self._cells.values():
            cells.clear()
        return call()

    def _calibrated(self, call: Callable[[], Result]) -> Result:
        self.calibrating = True
        result = self._calibrating(call)
        while self._overflowed or self._widened:
            self.fp16_results = self.fp16_results and not self._overflowed
            result = self._calibrating(call)
        self._place()
        self.calibrating = False
        return result

    def _calibrating(self, call: Callable[[], Result]) -> Result:
        self._overflowed, self._widened, self._chain, self._last = False, False, [], None
        for slot in self.slots.values():
            slot.flops = slot.uses = 0
            slot.returns_fp16, slot.copies, slot.copied_by = False, None, []
        return call()

    def _place(self) -> None:
        """Give every measured slot its cells on its device, and the graphs the exponents."""
        devices: dict[torch.device, list[Slot]] = {}
        for slot in self.slots.values():
            if slot.device is not None:
                devices.setdefault(slot.device, []).append(slot)
        for device, slots in devices.items():
            if device not in self._cells or self._cells[device][1] != slots:
                self._cells[device] = cells, _ = Cells(sum(slot.width for slot in slots), device), slots
                left = iter(cells.cells)
                for slot in slots:
                    slot.cells = [next(left) for _ in range(slot.width)]
                    slot.cell = slot.cells[0]
            self._cells[device][0].set_exponents([slot.exponent for slot in slots for _ in range(slot.width)])

    def _held(self) -> bool:
        """Tell whether every magnitude that this call has recorded is inside of its range."""
        held = not any(slot.missed for slot in self.slots.values())
        for cells, slots in self._cells.values():
            values = iter(cells.read())
            for slot in slots:
                recorded = [next(values) for _ in range(slot.width)]
                if NOTHING not in recorded:
                    held = _is_held(slot, slot.magnitude(recorded)) and held
        return held


def _is_held(slot: Slot, magnitude: float) -> bool:
    """Tell whether a magnitude is inside of the range of an operation and of those that share its operand."""
    sharing = (slot, *slot.copied_by)
    for each in sharing:
        each.largest = max(each.largest, magnitude)
    return all(each.holds(magnitude) for each in sharing)


def _are_equal(last: Shared, slot: Slot, operand: torch.Tensor) -> bool:
    return last.slot is not slot and last.slot.exponent == slot.exponent and torch.equal(last.operand, operand)


def largest_row_norm(x: torch.Tensor) -> torch.Tensor:
    """The largest 2-norm of the rows of ``x`` (..., K), 0-dim fp32, without a synchronisation."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax()
