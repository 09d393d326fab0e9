"""ComfyUI's ``convrot_w4a4``: two signed numbers a byte, rotated, unpacked by comfy-kitchen."""

import math

import torch

from .format import Encoded, Format


class Int4(Format):
    """Two signed numbers a byte, the low half first, rotated; ``weight_scale`` fp32 (rows,)."""

    name, storage, since, colour = "convrot_w4a4", "int4", "0.28.0", (112, 156, 120)
    product, unpacker = "convrot_w4a4_linear", "dequantize_convrot_w4a4_weight"
    per_byte = 2

    def check(self, weight: Encoded) -> None:
        weight.require_shape("weight_scale", (weight.shape[0],), (weight.shape[0], 1))
        weight.group  # noqa: B018

    def rows(self, weight: Encoded, part: slice) -> torch.Tensor:
        scale = weight.numbers("weight_scale").reshape(-1)[part]
        return self.kitchen(self.unpacker)(weight.data[part], scale, weight.group)

    def bound(self, weight: Encoded) -> float:
        return 8 * weight.numbers("weight_scale").max().item() * math.sqrt(weight.group)
