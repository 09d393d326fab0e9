"""Bounds on the numbers of one operation, valid while the numbers recorded in each call stay in a
range.

``Calibration`` owns the proofs of a model and checks each one after every call that recorded a
number for it.

Numbers are recorded on the device and read back once per model call. A number that a compiled graph
reads from a tensor is not a constant of the graph: scales can change without a new compilation, and
blocks of a model can share one graph. Eager code writes to its slot in one tensor of records. A
graph writes to a separate tensor for each record, which inductor fuses into the kernel that
computes the number: a slot whose index is an input would take another kernel.
"""

import math

import torch

from ..base.amax import amax
from ..base.dtypes import FP16_MAX

HEADROOM_BITS = 2
FLOOR_BITS = 12
NOTHING = -1.0


class AmaxBuffer:
    """One record and one power of two for each operation on a device."""

    def __init__(self, count: int, device: torch.device):
        # Only a tensor made outside of inference mode can be written to both inside and outside of
        # it.
        with torch.inference_mode(False):
            self.records = torch.full((count,), NOTHING, dtype=torch.float32, device=device)
            self.scales = torch.ones((2, count), dtype=torch.float32, device=device)
            self.entries = [AmaxEntry(self, index) for index in range(count)]
        self.graph_records = [entry.graph_record for entry in self.entries]
        self.has_graphs = False
        self.call = 0

    def clear(self) -> None:
        """Reset all records to ``NOTHING`` at the start of a call."""
        self.call += 1
        self.records.fill_(NOTHING)
        if self.has_graphs:
            torch._foreach_copy_(self.graph_records, [self.records[0]] * len(self.entries))

    def read(self) -> list[float]:
        """Return all records, with ``NOTHING`` for operations that did not run: one transfer and
        one synchronization."""
        if self.has_graphs:
            torch.maximum(self.records, torch.stack(self.graph_records), out=self.records)
        return self.records.tolist()


class AmaxEntry:
    """Slot of one record in a buffer. A graph receives tensors, so that one graph serves all
    operations: ``graph_record`` to write to, and the index ``at`` to read the scale."""

    def __init__(self, buffer: AmaxBuffer, index: int):
        self.buffer = buffer
        self.device = buffer.records.device
        self.at = torch.tensor([index], device=self.device)
        self.view = buffer.records[index]
        self.graph_record = torch.full((), NOTHING, dtype=torch.float32, device=self.device)
        self.written = -1

    def record(self, magnitude: torch.Tensor) -> None:
        """Record the maximum of ``magnitude`` (0-dim fp32) and the present record; NaN stays."""
        magnitude = magnitude.detach()
        if torch.compiler.is_compiling():
            self.buffer.has_graphs = True
            self.graph_record.copy_(torch.maximum(self.graph_record, magnitude))
        else:
            torch.maximum(self.view, magnitude, out=self.view)

    def scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``2**-exponent`` and ``2**exponent``, each 0-dim fp32."""
        down, up = self.buffer.scales.index_select(1, self.at).unbind()
        return down.reshape(()), up.reshape(())


class Missed:
    """``any``: set if a layer runs that has no record on this device; the call is then calibrated
    again."""

    any = False


class Proof:
    """Bound on the numbers of an operation, from a calibrating call, and their record in every
    other call without a synchronisation. The base class checks the amax of a result: if it is
    finite, no number up to there was Inf or NaN.

    An operand that is Inf or NaN gives Inf or NaN times any weight, and so does each sum with it:
    every result of its row. A product above fp16's range is Inf itself. So a finite result is
    correct, unless model code hid an overflow before (``hiding.py``).

    ``exponent``: the operand is multiplied by ``2**-exponent``. ``largest``: largest magnitude of
    all calls so far. ``device``: device of the measurement, None before it. ``entries``: the
    records on that device. ``missed``: the calibration's :class:`Missed`.
    """

    width = 1
    """How many numbers it records in a call."""

    def __init__(self, name: str):
        self.name = name
        self.exponent: float = 0
        self.largest = 0.0
        self.device: torch.device | None = None
        self.entries: list[AmaxEntry] = []
        self.missed = Missed()

    def magnitude(self, numbers: list[float]) -> float:
        """Return the magnitude to check, from the ``width`` numbers recorded in a call."""
        return numbers[0]

    def holds(self, magnitude: float) -> bool:
        """True if the proof covers a magnitude: every finite one."""
        return magnitude < math.inf

    def forget(self) -> None:
        """Reset the measurements, for a model with other operands."""
        self.largest = 0.0

    @property
    def entry(self) -> AmaxEntry | None:
        return self.entries[0] if self.entries else None

    def record(self, magnitude: torch.Tensor, place: int = 0) -> None:
        """Record the maximum of ``magnitude`` (0-dim fp32) and this call's record; NaN stays."""
        if self.entry is None or self.entry.device != magnitude.device:
            self.missed.any = True
        else:
            self.entries[place].record(magnitude)

    def record_amax(self, tensor: torch.Tensor) -> None:
        """Record the amax of a tensor: one kernel for the first record of an eager call, else
        two."""
        if (
            (entry := self.entry) is None
            or torch.compiler.is_compiling()
            or entry.device != tensor.device
            or entry.written == entry.buffer.call
        ):
            self.record(amax(tensor))
        else:
            entry.written = entry.buffer.call
            amax(tensor.detach(), out=entry.view)


def fits_range(magnitude: float, limit: float = FP16_MAX, floor: float = 2.0**-FLOOR_BITS) -> bool:
    """True for 0 and for magnitudes from ``floor`` to ``limit``; False for NaN.

    Below ``floor`` fp16's subnormal numbers lose more than rounding to bf16.
    """
    # fp16's largest number is what model code's own clamp leaves of an overflow (``clamp_fp16`` in
    # comfy/ldm/lumina/model.py).
    return limit > 0 and magnitude != FP16_MAX and (magnitude == 0 or floor <= magnitude <= limit)
