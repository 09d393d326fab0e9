"""The tensors of a model's file as they are planned, before ComfyUI makes a model of them."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from ....precision.base.text import duration_text, size_text
from ....precision.devices.memory import require_memory
from ....precision.formats.checkpoint import Checkpoint
from ....precision.formats.comfy_format import made_here, stays, tensors_made
from ....precision.plan.memory import MemoryPlan
from .devices import free_host_memory, quantizing_device
from .progress import byte_progress

WORTH_TELLING = 2.0
SAVED = "Save Model with storage=as_file writes a file that every later load maps instead."


@dataclass(frozen=True)
class LoadedTensors:
    """The tensors of a file in ComfyUI's format.

    Attributes:
        notes: what a user can do to load faster.
    """

    tensors: dict[str, torch.Tensor]
    notes: list[str]


def load_tensors(checkpoint: Checkpoint, planned: MemoryPlan, read: bool = True) -> LoadedTensors:
    """Make the tensors of a file in ComfyUI's format, as they are planned.

    Args:
        read: False to leave weights that stay slices of the file unread.

    Raises:
        NonFiniteWeight: a weight that is read holds NaN or Inf.
        MemoryShortage: what is made does not fit into the host's memory.
    """
    require_memory(planned.made, f"Loading {checkpoint.path}", free_host_memory())
    weights = checkpoint.weights
    slices = {name for name, weight in weights.items() if stays(weight, planned.plans[name].storage)}
    work = _Work(byte_progress(weights.values()), slices)
    with quantizing_device() as device:
        made = (device.weights if device else made_here)(weights, planned.plans, checkpoint.path, read)
        tensors = dict(tensors_made(made, work.done))
    size = sum(planned.plans[name].bytes for name in weights if name not in slices)
    return LoadedTensors(tensors, work.notes(size, device.made if device else 0))


class _Work:
    """Sum the seconds of making weights; slices of the file are left out."""

    def __init__(self, progress: Callable[[int], None], slices: set[str]):
        self._progress, self._slices = progress, slices
        self._last, self._seconds = perf_counter(), 0.0

    def done(self, name: str, size: int) -> None:
        now = perf_counter()
        if name not in self._slices:
            self._seconds += now - self._last
        self._progress(size)
        self._last = perf_counter()

    def notes(self, made: int, on_device: int) -> list[str]:
        if self._seconds < WORTH_TELLING:
            return []
        took, there = duration_text(self._seconds), size_text(on_device)
        if not on_device:
            return [f"Making {size_text(made)} of weights took {took}. {SAVED}"]
        return [f"Making {size_text(made)} of weights took {took}, {there} of them on the GPU. {SAVED}"]
