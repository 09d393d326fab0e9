"""ComfyUI's ``convrot_w4a4`` and ``awq_w4a16``: unpacked by comfy-kitchen, and never written."""

import torch

from ..base.message import Message
from .format import Format
from .stored_weight import StoredWeight


class Int4(Format):
    """Two signed numbers a byte, the low half first, rotated; ``weight_scale`` fp32 (rows,)."""

    name = "convrot_w4a4"
    storage = "int4"
    since = "0.28.0"
    colour = (112, 156, 120)
    product = "convrot_w4a4_linear"
    unpacker = "dequantize_convrot_w4a4_weight"
    largest = 8
    rotated = True
    per_byte = 2
    by_row = ("weight_scale",)

    def check(self, weight: StoredWeight) -> None:
        weight.require_shape("weight_scale", (weight.shape[0],), (weight.shape[0], 1))

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        scale = weight.row_scales(part).reshape(-1)
        return self.kitchen(self.unpacker)(weight.data[part], scale, weight.group)


class Awq4(Format):
    """Two numbers a byte, the low half first: ``(number - 8) * weight_scale + weight_zeros``, both
    (groups, rows)."""

    name = "awq_w4a16"
    storage = "awq4"
    since = "0.38.1"
    colour = (160, 132, 200)
    product = "gemv_awq_w4a16"
    unpacker = "tensor.TensorCoreAWQW4A16Layout"
    quantizes_operands = False
    needs = ("weight_scale", "weight_zeros")
    in_fp32 = ()
    signed = ("weight_scale", "weight_zeros")
    largest = 8
    offset = "weight_zeros"
    per_byte = 2

    def check(self, weight: StoredWeight) -> None:
        rows, columns = weight.shape
        size = weight.setting("group_size", 64)
        if type(size) is not int or size < 1 or columns % size:
            raise ValueError(Message("a group_size of {0} for {1} inputs", f"{size!r}", columns))
        for name in self.needs:
            weight.require_shape(name, (columns // size, rows))

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        layout = self.kitchen(self.unpacker)
        data = weight.data[part]
        scale, zeros = (weight.numbers(name)[:, part] for name in self.needs)
        shape = (len(data), weight.shape[1])
        size = weight.setting("group_size", 64)
        return layout.dequantize(data, layout.Params(scale, torch.float32, shape, zeros, size))
