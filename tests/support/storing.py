"""Weights and checkpoints stored as asked, through the plan that decides it."""

import torch
from halfsafe.precision.formats.checkpoint import Checkpoint, StoredWeight
from halfsafe.precision.formats.comfy_format import made_here, tensors_made, tensors_of
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.plan.facts import LayerSpec
from halfsafe.precision.plan.layers import plan_weights

LAYERS = [
    LayerSpec("blocks.0.ffn.0", "Linear", (64, 32)),
    LayerSpec("blocks.0.norm3", "LayerNorm", (32,)),
    LayerSpec("time_embedding.0", "Linear", (32, 32)),
    LayerSpec("patch_embedding", "Conv3d", (32, 16, 1, 2, 2)),
]


def plan_of(weight: StoredWeight, storage: str) -> LayerPlan:
    """What one weight is stored in when asked to be stored in ``storage``, as in a file."""
    return plan_weights({weight.name: weight}, {weight.name: LayerPlan(storage)}, "m")[weight.name]


def tensors_in(weight: StoredWeight, storage: str) -> dict[str, torch.Tensor]:
    """The tensors of one weight that is asked to be stored in ``storage``."""
    return tensors_of(weight, plan_of(weight, storage).storage, "m")


def in_storages(
    checkpoint: Checkpoint, storages: dict[str, str]
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str]]]:
    """A checkpoint's tensors, its layers in these storages, and (tensor, why it is not stored as asked)."""
    by_name = {f"{layer}.weight": LayerPlan(storage) for layer, storage in storages.items()}
    plans = plan_weights(checkpoint.weights, by_name, checkpoint.path)
    made = dict(tensors_made(made_here(checkpoint.weights, plans, checkpoint.path), lambda name, size: None))
    return made, [(name, plan.note) for name, plan in plans.items() if plan.note]


def normal_weight(shape: tuple[int, int]) -> torch.Tensor:
    """A weight in fp32 of normal values, of the size that layers have, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 0.02
