"""Models in ComfyUI's own quantization format: made weight by weight, into memory or into a file."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..base.errors import CheckpointError
from ..files.safetensors_header import TensorSpec
from .checkpoint import Checkpoint, StoredWeight
from .comfy_format import WeightPlan, finite_bound, tensors_of

Made = tuple[str, StoredWeight, dict[str, torch.Tensor]]
"""A weight's name in the file, it, and its tensors as they are planned."""
Making = Callable[[Iterable[tuple[str, StoredWeight]], Mapping[str, WeightPlan], Any, bool], Iterator[Made]]
MODEL_PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
WHOLE_PREFIXES = ("diffusion_model.", "model.", "transformer.")


def check_finite(tensors: Mapping[str, torch.Tensor], path) -> None:
    """Raise :class:`NonFiniteWeight` for the first floating tensor that holds NaN or Inf."""
    for name, tensor in tensors.items():
        finite_bound(StoredWeight(name, tensor), path)


def planned_specs(plans: Mapping[str, WeightPlan]) -> list[TensorSpec]:
    """List the tensors that :func:`planned_tensors` will give."""
    return [spec for plan in plans.values() for spec in plan.specs]


def planned_tensors(
    weights: Mapping[str, StoredWeight],
    plans: Mapping[str, WeightPlan],
    path,
    done: Callable[[str, int], None],
    read: bool = True,
    making: Making | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Make weights in ComfyUI's format as they are planned, one after another, and yield their tensors by name.
    Data that do not change stay views of the file; every weight is checked for NaN and Inf.

    Args:
        path: what errors name as the place of a bad weight.
        done: called with the name of each weight that is written, and the bytes it had.
        read: False to leave weights whose data stay as they are unread, and unchecked.
        making: makes them as :func:`made_here` does, elsewhere or with other codes.

    Raises:
        NonFiniteWeight: a weight holds NaN or Inf.
    """
    for name, weight, tensors in (making or made_here)(weights.items(), plans, path, read):
        yield from tensors.items()
        done(name, weight.data.nbytes)


def made_here(
    weights: Iterable[tuple[str, StoredWeight]], plans: Mapping[str, WeightPlan], path, read: bool
) -> Iterator[Made]:
    """Make weights where they are, in their order; arguments and errors as of :func:`planned_tensors`."""
    for name, weight in weights:
        yield name, weight, tensors_of(weight, plans[name].storage, path, read)


def model_prefix(checkpoint: Checkpoint) -> str:
    """Return what precedes the diffusion model's own names in the file; as in ComfyUI's
    ``unet_prefix_from_state_dict``."""
    names = list(checkpoint.weights)
    inside = next((prefix for prefix in MODEL_PREFIXES if any(name.startswith(prefix) for name in names)), None)
    return inside or next((prefix for prefix in WHOLE_PREFIXES if all(name.startswith(prefix) for name in names)), "")


def model_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Map the diffusion model's own names to the shapes of its weights."""
    prefix = model_prefix(checkpoint)
    return {name.removeprefix(prefix): tuple(weight.shape) for name, weight in checkpoint.weights.items()}


def refuse_lora(checkpoint: Checkpoint) -> None:
    """Raise :class:`CheckpointError` for a LoRA, which is no model."""
    name = next((name for name in checkpoint.weights if "lora_" in name), None)
    if name is not None:
        raise CheckpointError(checkpoint.path, "a LoRA, which is applied in 16 bit", name, "Convert the model instead.")
