"""The tensors of a model's file as they are planned, before ComfyUI makes a model of them."""

import torch

from ....precision.devices.memory import require_memory
from ....precision.formats.checkpoint import Checkpoint
from ....precision.formats.comfy_state import state_dict
from ....precision.plan.weights import MemoryPlan
from .devices import free_host_memory
from .progress import byte_progress


def load_tensors(checkpoint: Checkpoint, planned: MemoryPlan) -> dict[str, torch.Tensor]:
    """Make the tensors of a file in ComfyUI's format, as they are planned.

    Raises:
        NonFiniteWeight: a weight holds NaN or Inf.
        MemoryShortage: the weights do not fit into the host's memory.
    """
    require_memory(planned.bytes, f"Loading {checkpoint.path}", free_host_memory())
    return state_dict(checkpoint, planned.plans, byte_progress(checkpoint.weights.values()))
