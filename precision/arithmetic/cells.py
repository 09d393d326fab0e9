"""Numbers of a model's operations that a compiled graph writes and reads: on the device, at addresses that stay.

A CUDA graph overwrites its results when it runs again ("accessing tensor output of CUDAGraphs that has been overwritten"),
so what it records goes into tensors made outside of it. And a number read from a tensor is no constant of the graph: how an
operand is scaled can change without a new compilation, and blocks of a model can share one graph.
"""

import math
import sys
from collections.abc import Sequence

import torch

from ..amax import amax, norm_loses_nan

NOTHING = -1.0


class Cells:
    """One record and one power of two for each of several operations on one device.

    Args:
        count: how many operations.
        device: where they run.
    """

    def __init__(self, count: int, device: torch.device):
        # Only a tensor made outside of inference mode can be written to both inside and outside of it.
        with torch.inference_mode(False):
            self.records = torch.full((count,), NOTHING, dtype=torch.float32, device=device)
            self.scales = torch.ones((2, count), dtype=torch.float32, device=device)
            self.cells = [Cell(self, index) for index in range(count)]
        self.call = 0

    def clear(self) -> None:
        """Forget what was recorded."""
        self.call += 1
        if "torch._dynamo" in sys.modules:  # importing it takes seconds; before that nothing is compiled
            for tensor in (self.records, self.scales):
                torch._dynamo.mark_static_address(tensor, guard=False)
        self.records.fill_(NOTHING)

    def set_exponents(self, exponents: Sequence[float]) -> None:
        """The exponent of each operation, from which ``Cell.scale`` is had."""
        pairs = [[2.0**-exponent for exponent in exponents], [2.0**exponent for exponent in exponents]]
        self.scales.copy_(torch.tensor(pairs, dtype=torch.float32))

    def read(self) -> list[float]:
        """What each operation has recorded, ``NOTHING`` where it did not run: one transfer and one synchronization."""
        return self.records.tolist()


class Cell:
    """One operation's place in ``cells``. A graph is given the place as a tensor, so that it holds for every operation."""

    def __init__(self, cells: Cells, index: int):
        self.cells = cells
        self.device = cells.records.device
        self.at = torch.tensor([index], device=self.device)
        self.view = cells.records[index]
        self.written = -1

    def write_amax(self, tensor: torch.Tensor) -> None:
        """Record the amax of a tensor, in one kernel where it is the first record of the call; not in a compiled graph."""
        if self.written == self.cells.call or tensor.numel() == 0 or norm_loses_nan(tensor.device):
            self.record(amax(tensor))
        else:
            self.written = self.cells.call
            torch.linalg.vector_norm(tensor.detach(), math.inf, dtype=torch.float32, out=self.view)

    def write_row_norm(self, x: torch.Tensor) -> None:
        """Record the largest 2-norm of the rows of ``x``, in two kernels; not in a compiled graph."""
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32)
        torch.amax(norms, tuple(range(norms.dim())), out=self.view)

    def record(self, magnitude: torch.Tensor) -> None:
        """Keep the larger of ``magnitude`` (0-dim fp32) and what is recorded already; NaN stays."""
        magnitude = magnitude.detach()
        if not torch.compiler.is_compiling():
            torch.maximum(self.view, magnitude, out=self.view)
            return
        records = self.cells.records
        records.index_copy_(0, self.at, torch.maximum(records.index_select(0, self.at), magnitude.reshape(1)))

    def scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``2**-exponent`` and ``2**exponent``, each 0-dim fp32."""
        down, up = self.cells.scales.index_select(1, self.at).unbind()
        return down.reshape(()), up.reshape(())
