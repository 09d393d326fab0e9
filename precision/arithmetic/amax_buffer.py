"""Amax values of a model's operations, kept on the device at fixed addresses and read back once per model call.

A CUDA graph overwrites its results when it runs again ("accessing tensor output of CUDAGraphs that has been
overwritten"), so what it records goes into tensors made outside of it. And a number read from a tensor is no constant
of the graph: how an operand is scaled can change without a new compilation, and blocks of a model can share one graph.

Eager code writes to its place in one tensor of records. A graph writes to a tensor of its own for each record, which
inductor does in the kernel that finds the number: a place whose index is an input takes a kernel more.
"""

import math
import sys
from collections.abc import Sequence

import torch

from ..base.amax import amax, norm_loses_nan

NOTHING = -1.0


def largest_row_norm(x: torch.Tensor) -> torch.Tensor:
    """Compute the largest 2-norm of the rows of ``x`` (..., K), 0-dim fp32 and without a synchronisation; 0 where it is
    empty."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax()


class AmaxBuffer:
    """Hold a record and a power of two for each operation on a device.

    Args:
        count: how many records.
        device: where the operations run.
    """

    def __init__(self, count: int, device: torch.device):
        # Only a tensor made outside of inference mode can be written to both inside and outside of it.
        with torch.inference_mode(False):
            self.records = torch.full((count,), NOTHING, dtype=torch.float32, device=device)
            self.scales = torch.ones((2, count), dtype=torch.float32, device=device)
            self.entries = [Entry(self, index) for index in range(count)]
        self.graph_records = [entry.graph_record for entry in self.entries]
        self.has_graphs = False
        self.call = 0
        self._is_marked = False

    def clear(self) -> None:
        """Forget what was recorded."""
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

    def set_exponents(self, exponents: Sequence[float]) -> None:
        """Set the exponent of each record, from which ``Entry.scale`` is had."""
        pairs = [[2.0**-exponent for exponent in exponents], [2.0**exponent for exponent in exponents]]
        self.scales.copy_(torch.tensor(pairs, dtype=torch.float32))

    def read(self) -> list[float]:
        """Return every record, ``NOTHING`` where the operation did not run: one transfer and one synchronization."""
        if self.has_graphs:
            torch.maximum(self.records, torch.stack(self.graph_records), out=self.records)
        return self.records.tolist()


class Entry:
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


class Recorder:
    """Record numbers of one operation during a model call, without a synchronisation.

    ``device``: where it was measured, None before that. ``entries``: its records there, ``entry`` the first.
    ``missed``: the calibration's.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.entries: list[Entry] = []
        self.entry: Entry | None = None
        self.missed = Missed()

    def place(self, entries: list[Entry]) -> None:
        """Record there from now on."""
        self.entries, self.entry = entries, entries[0]

    def record(self, magnitude: torch.Tensor, place: int = 0) -> None:
        """Record the larger of ``magnitude`` (0-dim fp32) and the record of this call so far; NaN stays."""
        if self.entry is None or self.entry.device != magnitude.device:
            self.missed.any = True
        else:
            self.entries[place].record(magnitude)

    def record_amax(self, tensor: torch.Tensor, place: int = 0) -> None:
        """Record the amax of a tensor: one kernel where it is the first record of a call of eager code, else two."""
        entry = self.entries[place] if self.entries else None
        if (
            entry is None
            or torch.compiler.is_compiling()
            or entry.device != tensor.device
            or entry.written == entry.buffer.call
            or tensor.numel() == 0
            or norm_loses_nan(tensor.device)
        ):
            self.record(amax(tensor), place)
        else:
            entry.written = entry.buffer.call
            torch.linalg.vector_norm(tensor.detach(), math.inf, dtype=torch.float32, out=entry.view)
