"""Models in ComfyUI's own quantization format: made weight by weight, into memory or into a file."""

import os
from collections.abc import Callable, Iterator, Mapping

import torch

from ..dtypes import QUANTIZED_NAMES
from ..errors import CheckpointError
from ..files.safetensors_file import write_safetensors
from .card import Card, Origin
from .checkpoint import Checkpoint, StoredWeight, looks_like_scale
from .comfy_format import AS_FILE, StoragePlan, finite_bound, plan_weight, specs_of, tensors_of

MODEL_PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
WHOLE_PREFIXES = ("diffusion_model.", "model.", "transformer.")


def state_dict(
    checkpoint: Checkpoint,
    storages: Mapping[str, str],
    progress: Callable[[int], None] | None = None,
    plans: Mapping[str, StoragePlan] | None = None,
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str]]]:
    """The checkpoint in ComfyUI's format, made weight by weight; and (tensor, note) where it is not stored as asked.

    Weights that do not change stay views of the file; every weight is checked for NaN and Inf.

    Args:
        storages: full layer name (without ``.weight``) -> storage; other tensors stay as in the file.
        progress: called with the bytes of the file just dealt with.
        plans: what :func:`plan_weights` made of ``storages``, where it was asked already.
    """
    plans = plans or plan_weights(checkpoint.weights, storages, checkpoint.path)
    result, notes = {}, []
    for name, weight in checkpoint.weights.items():
        plan = plans[name]
        result.update(tensors_of(weight, plan, checkpoint.path))
        if plan.note:
            notes.append((name, plan.note))
        if progress:
            progress(weight.data.nbytes)
    return result, notes


def check_finite(tensors: Mapping[str, torch.Tensor], path) -> None:
    """Raise :class:`NonFiniteWeight` for the first floating tensor that holds NaN or Inf."""
    for name, tensor in tensors.items():
        finite_bound(StoredWeight(name, tensor), path)


def storage_to_make(weight: StoredWeight, wanted: str) -> str:
    """``wanted``, or ``as_file`` from one 16- or 32-bit dtype to another: ComfyUI casts as it loads, with no second copy."""
    return wanted if wanted in QUANTIZED_NAMES or weight.scale is not None or weight.quantized else AS_FILE


def write_weights(
    target: str | os.PathLike,
    weights: Mapping[str, StoredWeight],
    storages: Mapping[str, str],
    metadata: dict[str, str],
    progress: Callable[[int], None] | None,
    origin: str | os.PathLike,
    release: Callable[[str], None] = lambda name: None,
    made_from: Origin | None = None,
) -> dict[str, StoragePlan]:
    """Write weights to a file in ComfyUI's format, one at a time; each is asked for twice, first for its size.

    Args:
        storages: full layer name -> storage; other tensors stay as they are.
        origin: what errors name as the place of a bad weight.
        release: called with the name of a weight that is written.
        made_from: what the card in the file's metadata tells of its making.

    Returns:
        What each weight was stored in.

    Raises:
        NonFiniteWeight: a weight holds NaN or Inf.
        CheckpointError: the target cannot be written.
    """
    plans, specs, card = {}, [], Card(made_from or Origin())
    for weight, plan in _planned(weights, storages, origin):
        plans[weight.name] = plan
        specs += specs_of(weight, plan)
        card.count(weight, plan)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights.items():
            made = tensors_of(weight, plans[name], origin)
            card.measure(weight, plans[name].storage, made)
            yield from made.items()
            del made  # before the next one is made
            release(name)
            if progress:
                progress(weight.data.nbytes)

    write_safetensors(target, specs, tensors(), metadata | card.metadata(), lambda: metadata | card.metadata())
    return plans


def model_prefix(checkpoint: Checkpoint) -> str:
    """What precedes the diffusion model's own names in the file; as in ComfyUI's ``unet_prefix_from_state_dict``."""
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


def plan_weights(weights: Mapping[str, StoredWeight], storages: Mapping[str, str], path) -> dict[str, StoragePlan]:
    """Decide what each weight will be stored in, by tensor name; looks into the data only where the answer depends on it.

    Args:
        storages: full layer name (without ``.weight``) -> storage; other tensors stay as they are.
    """
    return {weight.name: plan for weight, plan in _planned(weights, storages, path)}


def _planned(weights: Mapping[str, StoredWeight], storages: Mapping[str, str], path) -> Iterator[tuple[StoredWeight, StoragePlan]]:
    """Every weight and what it will be stored in; 16 bit where a tensor beside it would be taken for its scale."""
    beside_scales = {name.rpartition(".")[0] for name in weights if looks_like_scale(name)}
    for weight in weights.values():
        plan = plan_weight(weight, storages.get(weight.layer, AS_FILE), path)
        if plan.storage in QUANTIZED_NAMES and not weight.quantized and weight.layer in beside_scales:
            plan = StoragePlan("bf16" if weight.scale is not None else AS_FILE, "a tensor beside it is named like a scale")
        yield weight, plan
