"""The tensors of a model's file as they are planned, before ComfyUI makes a model of them."""

from collections.abc import Callable, Iterable
from time import perf_counter

import comfy.model_management
import comfy.utils
import torch

from ....precision.base.text import duration_text, size_text
from ....precision.devices.memory import require_memory
from ....precision.formats.checkpoint import Checkpoint, StoredWeight
from ....precision.formats.comfy_format import made_here, stays
from ....precision.make.on_gpu import OnGpu
from ....precision.plan.memory import MemoryPlan
from .devices import free_host_memory, quantizing_device

WORTH_TELLING = 2.0
SAVED = "Save Model with storage=as_file writes a file that every later load maps instead."


def load_tensors(
    checkpoint: Checkpoint, planned: MemoryPlan, read: bool = True
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Make the tensors of a file in ComfyUI's format, as they are planned, and notes on how long that took.

    Args:
        read: False to leave weights that stay slices of the file unread.

    Raises:
        NonFiniteWeight: a weight that is read holds NaN or Inf.
        MemoryShortage: what is made does not fit into the host's memory.
    """
    require_memory(planned.made, f"Loading {checkpoint.path}", free_host_memory())
    weights, plans, tensors = checkpoint.weights, planned.plans, {}
    advance, size, seconds = byte_progress(weights.values()), 0, 0.0
    with quantizing_device() as device:
        last = perf_counter()
        for weight, made in (device.weights if device else made_here)(weights, plans, checkpoint.path, read):
            if not stays(weight, plans[weight.name].storage):
                size += plans[weight.name].bytes
                seconds += perf_counter() - last
            tensors |= made
            advance(weight.data.nbytes)
            last = perf_counter()
    return tensors, _notes(size, seconds, device)


def _notes(made: int, seconds: float, device: OnGpu | None) -> list[str]:
    notes, size, took = [], size_text(made), duration_text(seconds)
    if seconds >= WORTH_TELLING and device and device.made:
        notes.append(f"Making {size} of weights took {took}, {size_text(device.made)} of them on the GPU. {SAVED}")
    elif seconds >= WORTH_TELLING:
        notes.append(f"Making {size} of weights took {took}. {SAVED}")
    if device and device.without_room:
        notes.append(f"{size_text(device.without_room)} were quantized on the CPU: the GPU had no room for them.")
    return notes


def byte_progress(weights: Iterable[StoredWeight]) -> Callable[[int], None]:
    """Return a function to call with the bytes of these weights just dealt with."""
    return advancing(comfy.utils.ProgressBar(max(1, sum(weight.data.nbytes for weight in weights))))


def advancing(bar: comfy.utils.ProgressBar) -> Callable:
    """Return a function that moves the bar on and raises ComfyUI's interrupt."""

    def advance(done: int = 1) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(done)

    return advance
