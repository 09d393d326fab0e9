"""Rotary position embeddings of ComfyUI's models, which comfy-kitchen computes on every device."""

import comfy.quant_ops
import torch

from ....precision.arithmetic.bounds.followed import ROTATES


def know_rotations() -> None:
    """Have the operations of comfy-kitchen known that rotate q and k, but for those that write over them."""
    kitchen = getattr(comfy.quant_ops, "ck", None)  # absent where ComfyUI could not import comfy-kitchen
    operations = torch.ops.comfy_kitchen
    names = (name for name in dir(kitchen) if name.startswith("apply_rope") and not name.endswith("_"))
    ROTATES.update(getattr(operations, name) for name in names if hasattr(operations, name))
