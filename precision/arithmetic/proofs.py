"""Bounds on the numbers of one operation, which hold while the numbers recorded in each call stay in a range.

``Calibration`` holds the proofs of a model and checks each one after every call that recorded a number for it.

Their numbers are recorded on the device at fixed addresses and read back once per model call. A CUDA graph overwrites
its results when it runs again ("accessing tensor output of CUDAGraphs that has been overwritten"), so graphs write to
tensors made outside of them; and a number read from a tensor is no constant of the graph: how an operand is scaled can
change without a new compilation, and blocks of a model can share one graph. Eager code writes to its place in one
tensor of records. A graph writes to a tensor of its own for each record, which inductor does in the kernel that finds
the number: a place whose index is an input takes a kernel more.
"""

import math
import sys

import torch

from ..base.amax import amax, norm_loses_nan
from ..base.dtypes import FP16_MAX

HEADROOM_BITS = 2
FLOOR_BITS = 12
MARGIN = 2.0
"""What a bound on a sum must leave: rounding moves a sum by less than it is (``fp16_accumulation``)."""
NOTHING = -1.0


def largest_row_norm(x: torch.Tensor) -> torch.Tensor:
    """Compute the largest 2-norm of the rows of ``x`` (..., K), 0-dim fp32 and on its device; 0 without rows."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax()


class AmaxBuffer:
    """Hold a record and a power of two for each operation on a device."""

    def __init__(self, count: int, device: torch.device):
        # Only a tensor made outside of inference mode can be written to both inside and outside of it.
        with torch.inference_mode(False):
            self.records = torch.full((count,), NOTHING, dtype=torch.float32, device=device)
            self.scales = torch.ones((2, count), dtype=torch.float32, device=device)
            self.entries = [AmaxEntry(self, index) for index in range(count)]
        self.graph_records = [entry.graph_record for entry in self.entries]
        self.has_graphs = False
        self.call = 0
        self._is_marked = False

    def clear(self) -> None:
        self.call += 1
        if not self._is_marked and "torch._dynamo" in sys.modules:  # importing it takes seconds
            # Inductor makes no CUDA graph of one that writes to an input at any other address ("skipping cudagraphs due
            # to mutated inputs", torch/_inductor/cudagraph_utils.py), and copies such an input at each replay.
            for tensor in (self.records, self.scales, *self.graph_records, *(entry.at for entry in self.entries)):
                torch._dynamo.mark_static_address(tensor, guard=False)
            self._is_marked = True
        self.records.fill_(NOTHING)
        if self.has_graphs:
            torch._foreach_copy_(self.graph_records, [self.records[0]] * len(self.entries))

    def read(self) -> list[float]:
        """Return every record, ``NOTHING`` where the operation did not run: one transfer and one synchronization."""
        if self.has_graphs:
            torch.maximum(self.records, torch.stack(self.graph_records), out=self.records)
        return self.records.tolist()


class AmaxEntry:
    """Address one record of a buffer. A graph is given tensors, so that it holds for every operation: ``graph_record``
    and, for what it reads, the index."""

    def __init__(self, buffer: AmaxBuffer, index: int):
        self.buffer = buffer
        self.device = buffer.records.device
        self.at = torch.tensor([index], device=self.device)
        self.view = buffer.records[index]
        self.graph_record = torch.full((), NOTHING, dtype=torch.float32, device=self.device)
        self.written = -1

    def record(self, magnitude: torch.Tensor) -> None:
        """Record the larger of ``magnitude`` (0-dim fp32) and the present record; NaN stays."""
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
    """Say whether an operation of the call had no valid record: never measured, or on another device."""

    any = False


class Proof:
    """State a bound on the numbers of an operation, from a call that calibrates, and record them in every other call
    without a synchronisation. By itself: from the amax of a result, no number up to there was Inf or NaN.

    An operand that is Inf or NaN times any weight is Inf or NaN, and so is each sum with it: every result of its row. A
    product past fp16's range is Inf itself. So a finite result is right, unless model code has hidden an overflow
    before (``hiding.py``).

    ``exponent``: its operand is multiplied by ``2**-exponent``. ``largest``: the largest magnitude of all calls so far.
    ``device``: where the operation was measured, None before. ``entries``: its records there. ``missed``: the
    calibration's.
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
        """Return the magnitude to be checked, from the ``width`` numbers recorded in a call."""
        return numbers[0]

    def holds(self, magnitude: float) -> bool:
        """Tell whether the proof holds for a magnitude: for any that is finite."""
        return magnitude < math.inf

    def forget(self) -> None:
        """Begin anew, for a model with other operands."""
        self.largest = 0.0

    @property
    def entry(self) -> AmaxEntry | None:
        return self.entries[0] if self.entries else None

    def record(self, magnitude: torch.Tensor, place: int = 0) -> None:
        """Record the larger of ``magnitude`` (0-dim fp32) and the record of this call so far; NaN stays."""
        if self.entry is None or self.entry.device != magnitude.device:
            self.missed.any = True
        else:
            self.entries[place].record(magnitude)

    def record_amax(self, tensor: torch.Tensor) -> None:
        """Record the amax of a tensor: one kernel where it is the first record of a call of eager code, else two."""
        if (
            (entry := self.entry) is None
            or torch.compiler.is_compiling()
            or entry.device != tensor.device
            or entry.written == entry.buffer.call
            or tensor.numel() == 0
            or norm_loses_nan(tensor.device)
        ):
            self.record(amax(tensor))
        else:
            entry.written = entry.buffer.call
            torch.linalg.vector_norm(tensor.detach(), math.inf, dtype=torch.float32, out=entry.view)


def fits_range(magnitude: float, limit: float = FP16_MAX, floor: float = 2.0**-FLOOR_BITS) -> bool:
    """Tell whether a magnitude is 0 or from ``floor`` to ``limit``; no NaN is.

    Below ``floor`` fp16's subnormal numbers lose more than bf16 rounds away.
    """
    # fp16's largest number is what model code's own clamp leaves of an overflow (``clamp_fp16`` in
    # comfy/ldm/lumina/model.py).
    return limit > 0 and magnitude != FP16_MAX and (magnitude == 0 or floor <= magnitude <= limit)
