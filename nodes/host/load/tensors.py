"""Make the tensors of a model's file as planned, before ComfyUI makes a model of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import comfy.model_management
import comfy.utils
import torch

from ....precision.base.message import Message
from ....precision.base.text import size_text
from ....precision.devices.memory import require_memory
from ....precision.files.zeros import STRIDE, zero_places
from ....precision.formats.checkpoint import Checkpoint, StoredWeight
from ....precision.formats.comfy_format import made_here, stays
from ....precision.make.on_gpu import OnGpu
from ....precision.make.weight_errors import measuring_errors, told_again
from ....precision.plan.load import ModelPlan
from .devices import free_host_memory, quantizing_device

WORTH_TELLING = 1 << 30
"""Bytes of converted weights from which the conversion is noted: it takes seconds."""
SAVED = "Save Model with storage=as_file writes them to a file that later loads map directly."


def load_tensors(
    checkpoint: Checkpoint, plan: ModelPlan, read: bool = True
) -> tuple[ModelPlan, dict[str, torch.Tensor]]:
    """Make the tensors of a file in ComfyUI's format as planned. Returns the plan with notes on the conversion, and
    with the error of weights that were quantized again.

    ``read``: False to leave memory-mapped weights unread.

    Raises:
        NonFiniteWeight: a weight that is read holds NaN or Inf.
        MemoryShortage: the allocated weights do not fit into the host's memory.
    """
    require_memory(plan.allocated, Message("Loading {0}", checkpoint.path), free_host_memory())
    weights = checkpoint.weights
    plans = plan.weights
    tensors = {}
    advance = byte_progress(weights.values())
    size = 0
    zeros: dict[str, list[int]] = defaultdict(list)
    errors: dict[str, float] = {}
    with quantizing_device() as device:
        every = (device.weights if device else made_here)(weights, plans, checkpoint.path, read)
        if [plan for plan in plans.values() if plan.again]:
            every = measuring_errors(every, plans, errors, all_changed=False)
        for weight, made in every:
            size += 0 if stays(weight, plans[weight.name].storage) else plans[weight.name].bytes
            tensors |= made
            if read and weight.start and weight.data.nbytes >= STRIDE:
                zeros[weight.file] += zero_places(weight.data, weight.start)
            advance(weight.data.nbytes)
    notes = (*plan.notes, *checkpoint.zero_notes(zeros), *_notes(size, device))
    return replace(plan, notes=notes, costs=(*told_again(plans, errors), *plan.costs)), tensors


def _notes(made: int, device: OnGpu | None) -> list[str]:
    notes: list[str] = []
    if made >= WORTH_TELLING:
        notes.append(Message("{0} of weights were converted while loading. {1}", size_text(made), SAVED))
    if device and device.without_room:
        size = size_text(device.without_room)
        notes.append(Message("{0} were quantized on the CPU: the GPU had too little memory.", size))
    return notes


def byte_progress(weights: Iterable[StoredWeight]) -> Callable[[int], None]:
    """Return a function to call with the bytes of the weights that were just processed."""
    return advancing(comfy.utils.ProgressBar(max(1, sum(weight.data.nbytes for weight in weights))))


def advancing(bar: comfy.utils.ProgressBar) -> Callable:
    """Return a function that moves the bar on and raises ComfyUI's interrupt."""

    def advance(done: int = 1) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(done)

    return advance
